"""One of two processes that run `fit` together; started by the tests, with the port, its number and a folder."""

import sys

import faults
import grain
import jax

import proxvi

STEPS = 200


def fit(num_steps, data, metrics_file, **options):
    reporting = proxvi.Reporting(every=20, metrics_file=metrics_file)
    result = proxvi.fit(faults.make_svi(), jax.random.key(0), num_steps, data, reporting=reporting, **options)
    print(f"bits {faults.bits(result)} loss {float(result.losses[-1]):.6f}", flush=True)


if __name__ == "__main__":
    port, number, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, number, heartbeat_timeout_seconds=20)
    mesh = jax.make_mesh((4,), ("data",))
    rows = faults.data()
    fit(100, rows, f"{folder}-arrays.jsonl", batch_size=100, mesh=mesh)
    # Each process streams the rows that it owns, in an order of its own, half a batch at a time.
    stream = grain.MapDataset.source(list(rows[number::2])).shuffle(seed=number).repeat().batch(50).to_iter_dataset()
    fit(STEPS, stream, f"{folder}.jsonl", mesh=mesh, checkpointing=proxvi.Checkpointing(folder, every=0.0))
