"""What a thousand starts cost over one: figure 1's entropy PVI, ten thousand steps, one compiled call each.

taskset -c 1 python benchmarks/starts.py
"""

import argparse
import os
import time

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
from records import Row, add_json_option, write_record

from proxvi_paper.experiments import figure_1
from proxvi_paper.models import factor


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=10_000)
    add_json_option(parser)
    arguments = parser.parse_args()
    trial = figure_1.Trial("PVI, entropy", data_sets=1, steps=arguments.steps)
    x = figure_1.data_sets(trial)[0]
    method = figure_1.METHODS[trial.method]
    program = jax.jit(jax.vmap(lambda means: method(trial, factor.start(means), x)))
    with_compilation, without = {}, {}
    for count in (1, arguments.starts):
        starts = figure_1.ring(count)
        began = time.process_time()  # of the processor: the machine may be shared
        jax.block_until_ready(program(starts))
        with_compilation[count] = time.process_time() - began
        began = time.process_time()
        _, traces = jax.block_until_ready(program(starts))
        without[count] = time.process_time() - began
        assert jnp.all(jnp.isfinite(traces))
        spent = f"{without[count]:.2f} s, {with_compilation[count]:.2f} s with compilation"
        print(f"{count:6,} starts x {arguments.steps:,} steps: {spent}")
    rows = []
    for name, seconds in {"with compilation": with_compilation, "without": without}.items():
        all_starts, ratio = seconds[arguments.starts], seconds[arguments.starts] / seconds[1]
        rows.append(Row(f"many starts over one, {name}", ratio, seconds=all_starts, seconds_of="all starts"))
        print(f"{arguments.starts:,} starts over one, {name}: {ratio:.0f}")
    write_record(arguments.json, rows)


if __name__ == "__main__":
    main()
