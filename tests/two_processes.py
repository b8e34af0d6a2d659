"""One of two processes that run `fit` together; started by the tests, with the port, its number and a folder."""

import sys

import faults  # pyright: ignore[reportMissingImports]
import grain
import jax

import proxvi

STEPS = 200


def fit(num_steps, data, batch_size=None, **options):
    result = proxvi.fit(
        faults.make_svi(), jax.random.key(0), num_steps, data, batch_size=batch_size, report_every=20, **options
    )
    print(f"bits {faults.bits(result)} loss {float(result.losses[-1]):.6f}", flush=True)


if __name__ == "__main__":
    port, number, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, number, heartbeat_timeout_seconds=20)
    mesh = jax.make_mesh((4,), ("data",))
    rows = faults.data()
    fit(100, rows, 100, mesh=mesh, metrics_file=f"{folder}-arrays.jsonl")
    # Each process streams the rows that it owns, in an order of its own, half a batch at a time.
    stream = grain.MapDataset.source(rows[number::2]).shuffle(seed=number).repeat().batch(50).to_iter_dataset()
    fit(STEPS, stream, mesh=mesh, metrics_file=f"{folder}.jsonl", checkpoints=folder, checkpoint_every=0.0)
