"""How much luck there is in plain variational inference, and what removes it at an equal number of gradient steps.

    python benchmarks/luck/run.py theoph --steps 12000 --repetitions 20 --results results/luck
    python benchmarks/luck/run.py --table

A repetition is one user's whole procedure. All use AutoNormal from uniform(−2, 2) starts, and Adam at 0.02 with a
cosine decay over the run (a race has its own). Final ELBOs are means over 1,000 samples.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from problems import PROBLEMS

import proxvi

RATE = 0.02
PARTICLES = 1_000


def restarts(model: Any, steps: int, each: int, repetitions: int, key: jax.Array) -> list[float]:
    """The best of `each` runs that share the steps."""
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, steps // each))
    svi = SVI(model, AutoNormal(model), optimizer, Trace_ELBO())
    report = proxvi.luck(svi, key, steps // each, starts=each * repetitions, particles=PARTICLES, progress_bar=False)
    return np.nanmax(report.elbos.reshape(repetitions, each), axis=1).tolist()


def races(model: Any, steps: int, methods: tuple[str, ...], repetitions: int, key: jax.Array) -> list[float]:
    """Races of 64 lanes."""
    svi = SVI(model, AutoNormal(model), optax.adam(RATE), Trace_ELBO())
    found = []
    for r in range(repetitions):
        result = proxvi.race(
            svi,
            jax.random.fold_in(key, r),
            steps,
            starts=64 // len(methods),
            methods=methods,
            particles=PARTICLES,
            progress_bar=False,
        )
        found.append(result.elbo)
    return found


METHODS: dict[str, Any] = {
    "one run": lambda *args: restarts(args[0], args[1], 1, *args[2:]),
    "best of 4": lambda *args: restarts(args[0], args[1], 4, *args[2:]),
    "best of 16": lambda *args: restarts(args[0], args[1], 16, *args[2:]),
    "race, plain": lambda *args: races(args[0], args[1], ("plain",), *args[2:]),
    "race, plain and speed limit": lambda *args: races(args[0], args[1], ("plain", "speed limit"), *args[2:]),
}


def table(folder: Path) -> str:
    """The table of the result files in a folder; the best known ELBO of a problem is the best in any of them."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    lines = [
        "| problem | steps | method | within 2 nats of the best | median gap | worst gap |",
        "|---|---|---|---|---|---|",
    ]
    for problem in PROBLEMS:
        best = max((max(r["elbos"]) for r in records if r["problem"] == problem), default=0.0)
        ours = [r for r in records if r["problem"] == problem]
        for record in sorted(ours, key=lambda r: (r["steps"], list(METHODS).index(r["method"]))):
            gaps = best - np.array(record["elbos"])
            cells = [f"{problem} ({best:.1f})".replace("-", "−"), f"{record['steps']:,}", record["method"]]
            cells += [f"{np.sum(gaps <= 2.0)} of {len(gaps)}", f"{np.median(gaps):.1f}", f"{gaps.max():.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the methods on a problem, one result file each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", nargs="*", help=", ".join(PROBLEMS))
    parser.add_argument("--table", action="store_true", help="print the table of the result files that are there")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--results", type=Path, default=Path("results/luck"))
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.results))
    for problem in arguments.problems:
        model = PROBLEMS[problem](Path(__file__).parent / "data")
        for method in arguments.methods:
            name = f"{problem}-{method.replace(', ', '-').replace(' ', '-')}-{arguments.steps}.json"
            if (arguments.results / name).exists():
                continue
            began = time.perf_counter()
            elbos = METHODS[method](model, arguments.steps, arguments.repetitions, jax.random.key(1))
            record = {
                "problem": problem,
                "method": method,
                "steps": arguments.steps,
                "elbos": elbos,
                "seconds": time.perf_counter() - began,
            }
            arguments.results.mkdir(parents=True, exist_ok=True)
            (arguments.results / name).write_text(json.dumps(record, indent=1) + "\n")
            print(problem, method, f"median {np.median(elbos):.2f} best {np.max(elbos):.2f}", flush=True)


if __name__ == "__main__":
    main()
