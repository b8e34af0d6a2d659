"""What a race costs over the same number of bare steps, and how long it takes to compile.

taskset -c 1 python benchmarks/race_cost.py

The model is one-compartment pharmacokinetics (`luck/problems/theoph.py`), 64 lanes. The bare steps are one compiled
loop of NumPyro's `SVI.update`. They take turns, and the median counts.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import numpy as np
import optax
from numpyro.infer import SVI
from records import Row, add_json_option, write_record

import proxvi

sys.path.append(str(Path(__file__).parent / "luck"))
import problems


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400_000, help="of all lanes together")
    parser.add_argument("--rounds", type=int, default=11)
    add_json_option(parser)
    arguments = parser.parse_args()
    problem = problems.load("theoph")
    svi = SVI(problem.model, problem.new_guide(), optax.adam(problem.rate), problem.loss)

    def race(number: int) -> None:
        proxvi.race(svi, jax.random.key(number), arguments.steps, progress_bar=False)

    @jax.jit
    def bare(key: jax.Array) -> Any:
        return jax.lax.fori_loop(0, arguments.steps, lambda _, state: svi.update(state)[0], svi.init(key)).optim_state

    def seconds(run: Callable[..., Any], *args: Any) -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(*args))
        return time.perf_counter() - began

    first = seconds(race, 0)
    seconds(bare, jax.random.key(0))
    pairs = [(seconds(bare, jax.random.key(i)), seconds(race, i)) for i in range(1, arguments.rounds + 1)]
    plain, raced = np.array(pairs).T
    compiling = first - float(np.median(raced))
    rows = [
        Row("bare steps", 1.0, seconds=float(np.median(plain)) / arguments.steps),
        Row.of_ratios("race", raced / plain, seconds=float(np.median(raced)) / arguments.steps),
        Row("compilation", compiling / float(np.median(plain)), seconds=compiling, seconds_of="a first race"),
    ]
    spread = f"{rows[1].low:.3f} to {rows[1].high:.3f}"
    print(f"race over bare steps {rows[1].ratio:.3f} ({spread}); compiled in {compiling:.1f} s")
    write_record(arguments.json, rows)


if __name__ == "__main__":
    main()
