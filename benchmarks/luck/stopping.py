"""How often the rule for convergence is wrong, on problems whose runs are known to the end.

    python benchmarks/luck/stopping.py --json results/benchmarks/stopping.json

Adam with a constant rate, 20 seeds a problem. A run stops too early if as many steps again gained more than the rule
allows. It should have stopped by half of all steps if the other half gained less than that.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import problems
from numpyro.infer import SVI

from proxvi.training import has_converged, is_time_to_ask

sys.path.append(str(Path(__file__).parents[1]))
from records import provenance

WITHIN = 2.0


def losses_of(name: str, steps: int, seeds: int, rate: float) -> np.ndarray:
    """The losses of all seeds."""
    problem = problems.load(name)

    def run(key: jax.Array) -> jax.Array:
        svi = SVI(problem.model, problem.new_guide(), optax.adam(rate), problem.loss)
        state = svi.init(key, *problem.data)
        return jax.lax.scan(lambda state, _: svi.update(state, *problem.data), state, length=steps)[1]

    return np.asarray(jax.jit(lambda keys: jax.lax.map(run, keys))(jax.random.split(jax.random.key(0), seeds)))


def stops_at(losses: np.ndarray, every: int) -> int | None:
    """The step at which `fit` with a report every so many steps would stop."""
    for step in range(every, len(losses) + 1, every):
        if is_time_to_ask(step - every, step) and has_converged(losses[:step], WITHIN):
            return step
    return None


def gained(losses: np.ndarray, step: int) -> float:
    """What as many steps again gained: the mean of the last quarter of a run twice as long, against that of this."""
    quarter = step // 4
    return float(losses[step - quarter : step].mean() - losses[2 * step - quarter : 2 * step].mean())


def main() -> None:
    """Print a row a problem and rate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--problems", nargs="+", default=["logistic", "schools", "nile", "mcycle", "galaxies", "theoph"]
    )
    given = parser.parse_args()
    rows = []
    for name in given.problems:
        for rate in (0.01, 0.05):
            losses = losses_of(name, given.steps, given.seeds, rate)
            half = given.steps // 2
            stops = [stops_at(row[:half], 500) for row in losses]
            gains = [gained(row, stop) for row, stop in zip(losses, stops, strict=True) if stop is not None]
            row = {
                "problem": name,
                "rate": rate,
                "stopped": len(gains),
                "median_step": float(np.median([stop for stop in stops if stop is not None])) if gains else None,
                "too_early": int(np.sum(np.array(gains) > WITHIN)),
                "most_gained": float(np.max(gains)) if gains else None,
                "should_have_stopped": int(np.sum([gained(row, half) <= WITHIN for row in losses])),
            }
            rows.append(row)
            print(row, flush=True)
    if given.json is not None:
        command = shlex.join(["python", "benchmarks/luck/stopping.py", *sys.argv[1:]])
        given.json.write_text(json.dumps({"command": command, **provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
