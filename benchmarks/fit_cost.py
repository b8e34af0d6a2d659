"""What `fit` costs over a bare compiled loop: progress bar, metrics file and checkpoints on.

    taskset -c 1 python benchmarks/fit_cost.py

`fit` reports every 200 steps; in between, its callback times 200 steps of a bare `lax.scan` of `svi.update` on the same
batches' worth of data. So the two take turns in one process. The total counts the intervals with a checkpoint too.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from records import Row, add_json_option, write_record
from svi_cost import CASES, PIXELS, constraint

import proxvi


def compare(case, steps, every, seconds):
    """Seconds of each interval of `fit`, and of the bare loop after it."""
    model, guide, loss, size = case
    data = jax.random.bernoulli(jax.random.key(1), 0.13, (5_000, PIXELS)).astype(jnp.float32)
    svi = proxvi.ProximitySVI(model, guide, optax.adam(1e-3, eps=1e-6), loss, constraint())
    state = svi.init(jax.random.key(0), data[:size])
    rows = jax.random.permutation(jax.random.key(2), 5_000)[: 5_000 // size * size].reshape(-1, size)
    order = jnp.resize(rows, (every, size))

    @jax.jit
    def bare(state, data, order):
        return jax.lax.scan(lambda s, rows: svi.update(s, data[rows]), state, order)

    jax.block_until_ready(bare(state, data, order))
    ours, theirs, resumed = [], [], None

    def callback(step, _):
        nonlocal resumed, state
        now = time.perf_counter()
        if resumed is not None and step > 2 * every:  # the first two intervals compile and find the pace
            ours.append(now - resumed)
        started = time.perf_counter()
        state, _ = jax.block_until_ready(bare(state, data, order))  # trains on, as `fit` does
        if len(theirs) < len(ours):
            theirs.append(time.perf_counter() - started)
        resumed = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        proxvi.fit(
            svi,
            jax.random.key(0),
            steps,
            data,
            batch_size=size,
            checkpointing=proxvi.Checkpointing(Path(folder) / "checkpoints", every=seconds),
            reporting=proxvi.Reporting(
                every=every, progress=True, callback=callback, metrics_file=Path(folder) / "metrics.jsonl"
            ),
        )
        lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        saved = sum("checkpoint" in line for line in lines)
    return np.array(ours), np.array(theirs), saved


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8_000)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=float, default=10.0, help="seconds; the default of `fit` is 300")
    add_json_option(parser)
    arguments = parser.parse_args()
    table, rows = [], []
    for name in ("SBN, leave-one-out", "VAE, TraceMeanField"):
        ours, theirs, saved = compare(CASES[name], arguments.steps, arguments.every, arguments.checkpoint_every)
        median, total = np.median(ours / theirs), ours.sum() / theirs.sum()
        pace = 1e3 * np.median(theirs) / arguments.every
        rows.append(Row.of_ratios(name, ours / theirs, seconds=float(np.median(ours)) / arguments.every))
        rows.append(Row(f"{name}, total", float(total)))
        table.append(f"{name:22} {pace:10.2f} {median:8.3f} {total:8.3f} {saved:12d}")
    print(f"{'':22} {'ms a step':>10} {'median':>8} {'total':>8} {'checkpoints':>12}")
    print("\n".join(table))
    write_record(arguments.json, rows)


if __name__ == "__main__":
    main()
