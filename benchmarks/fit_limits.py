"""`fit` at its limits: steps of 10 µs, and a checkpoint of 10^8 parameters.

    taskset -c 1 python benchmarks/fit_limits.py

The steps take turns with bare scans of `svi.update`, in one process. The checkpoint holds the parameters
and Adam's moments; what counts is how long `save` keeps the caller, while a thread writes.
"""

import argparse
import os
import tempfile
import time

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from records import Row, add_json_option, write_record

import proxvi
from proxvi.training._orbax_store import OrbaxStore
from proxvi.training.checkpoints import Checkpoints

TURN = 20_000  # steps


def model(x):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    numpyro.sample("x", dist.Normal(mean, 1.0), obs=x)


def tiny_steps(rows, steps, length):
    """Seconds of each turn of `fit`, with its default report every 1,000 steps, and of scans of `length` after it."""
    x, key = 3.0 + jax.random.normal(jax.random.key(1), (rows,)), jax.random.key(0)
    constraint = proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, steps // 2, 1e-10))
    svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(1e-3), Trace_ELBO(), constraint)
    state = svi.init(key, x)

    @jax.jit
    def bare(state, x):  # keeps the losses, as `fit` does
        def scan(state, _):
            return jax.lax.scan(lambda state, _: svi.update(state, x), state, None, length=length)

        return jax.lax.scan(scan, state, None, length=TURN // length)

    jax.block_until_ready(bare(state, x))
    ours, theirs, resumed = [], [], 0.0

    def callback(step, _):
        nonlocal resumed
        if step % TURN:
            return
        now = time.perf_counter()
        if step > 2 * TURN:  # the first two compile and find the pace
            ours.append(now - resumed)
        started = time.perf_counter()
        jax.block_until_ready(bare(state, x))
        if len(theirs) < len(ours):
            theirs.append(time.perf_counter() - started)
        resumed = time.perf_counter()

    proxvi.fit(svi, key, steps, x, reporting=proxvi.Reporting(callback=callback, progress=False))
    return np.array(ours), np.array(theirs)


def checkpoint(parameters):
    """Seconds that `save` takes in the caller's thread, and in the background."""
    tree = {name: jnp.full(parameters, value) for name, value in {"params": 1.0, "mu": 2.0, "nu": 3.0}.items()}
    jax.block_until_ready(tree)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(OrbaxStore(folder, keep=1), {})
        started = time.perf_counter()
        checkpoints.save(1, tree, {})
        blocked = time.perf_counter() - started
        checkpoints.wait()
        written = time.perf_counter() - started
        checkpoints.close()
    return blocked, written


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_500, help="of the data; 5,500 make a step of about 10 µs")
    parser.add_argument("--steps", type=int, default=400_000)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    add_json_option(parser)
    arguments = parser.parse_args()
    table = []
    for length in (1_000, TURN):  # XLA takes longer for a step of a long scan
        ours, theirs = tiny_steps(arguments.rows, arguments.steps, length)
        seconds = float(np.median(theirs)) / TURN
        print(
            f"scans of {length:,} steps: {1e6 * seconds:.1f} µs a step, "
            f"fit {np.median(ours / theirs):.3f} times as long (median of {len(ours)})"
        )
        table.append(Row.of_ratios(f"fit over scans of {length:,} tiny steps", ours / theirs, seconds=seconds))
    blocked, written = checkpoint(arguments.parameters)
    print(f"{arguments.parameters:,} parameters: save blocks {1e3 * blocked:.1f} ms, and writes for {written:.1f} s")
    table += [Row("seconds that a checkpoint blocks", blocked), Row("seconds until it is written", written)]
    write_record(arguments.json, table)


if __name__ == "__main__":
    main()
