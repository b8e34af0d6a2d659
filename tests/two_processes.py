"""One of several processes that run `fit` together; started by the tests, with the port, its number and a folder."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import faults  # pyright: ignore[reportMissingImports]
import jax
import numpy as np

import proxvi

if __name__ == "__main__":
    port, number, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, number, heartbeat_timeout_seconds=10)
    mesh = jax.make_mesh((4,), ("data",))
    rows = 3.0 + np.random.default_rng(0).standard_normal((1_000, 50), np.float32)
    result = proxvi.fit(
        faults.make_svi(),
        jax.random.key(0),
        200,
        rows,
        batch_size=100,
        report_every=20,
        mesh=mesh,
        checkpoints=folder,
        checkpoint_every=0.0,
        metrics_file=f"{folder}.jsonl",
    )
    print(f"bits {faults.bits(result)} loss {float(result.losses[-1]):.6f}")
