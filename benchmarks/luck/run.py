"""How much luck there is in variational inference, and what removes it at an equal number of gradient steps.

    python benchmarks/luck/run.py                                  # every cell that has no result file yet
    python benchmarks/luck/run.py theoph --remedies "one run" "race, plain" --steps 48000
    python benchmarks/luck/page.py                                 # the table, the ranks and the picture

A cell is a problem (a file in `problems`) with a remedy (a function in `remedies.py`). A seed is one user's whole
procedure. Final ELBOs are means over many samples.
"""

import argparse
import json
import math
import multiprocessing
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import problems
from remedies import REMEDIES

sys.path.append(str(Path(__file__).parents[1]))
from records import provenance

RESULTS = Path(__file__).parents[2] / "results" / "luck"


class Cell(NamedTuple):
    """One problem with one remedy.

    Attributes:
        problem: its name.
        remedy: its name.
        steps: None for the problem's own.
        seeds: how many users.
    """

    problem: str
    remedy: str
    steps: int | None = None
    seeds: int = 20

    def file(self) -> str:
        """The name of its result file."""
        steps = self.steps or problems.load(self.problem).steps
        return f"{self.problem}-{re.sub('[^a-z0-9]+', '-', self.remedy.lower())}-{steps}.json"


def measure(cell: Cell, results: Path) -> dict[str, Any]:
    """Run a cell and write its result file."""
    problem = problems.load(cell.problem)
    steps = cell.steps or problem.steps
    began = time.perf_counter()
    elbos = REMEDIES[cell.remedy](partial(problems.load, cell.problem), steps, jax.random.key(1), cell.seeds)
    seconds = time.perf_counter() - began
    record: dict[str, Any] = {
        "problem": cell.problem,
        "remedy": cell.remedy,
        "steps": steps,
        "elbos": None if elbos is None else [e if math.isfinite(e) else None for e in elbos.tolist()],
        "seconds": round(seconds, 1),
        "command": f'python benchmarks/luck/run.py {cell.problem} --remedies "{cell.remedy}" --steps {steps} '
        f"--seeds {cell.seeds}",
        **provenance(),
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / cell.file()).write_text(json.dumps(record, indent=1) + "\n")
    jax.clear_caches()  # or the compiled programs of all cells pile up
    return record


def run(cells: Iterable[Cell], results: Path, executor: Executor) -> int:
    """Run the cells that have no result file yet, on any `concurrent.futures.Executor`; return how many failed."""
    missing = [cell for cell in cells if not (results / cell.file()).exists()]
    futures = {executor.submit(measure, cell, results): cell for cell in missing}
    failed = 0
    for number, future in enumerate(as_completed(futures), 1):
        cell = futures[future]
        if (error := future.exception()) is not None:
            failed += 1
            print(f"{number}/{len(missing)} {cell.problem}, {cell.remedy}: {error!r}", flush=True)
            continue
        record = future.result()
        elbos = [-np.inf if e is None else e for e in record["elbos"] or ()]
        said = f"median {np.median(elbos):.2f}, best {np.max(elbos):.2f}" if elbos else "not for this problem"
        print(f"{number}/{len(missing)} {cell.problem}, {cell.remedy}: {said}, {record['seconds']:.0f} s", flush=True)
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Run cells, in processes of their own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", nargs="*", help=f"all of them, if none is named: {', '.join(problems.names())}")
    parser.add_argument("--remedies", nargs="+", choices=REMEDIES, default=list(REMEDIES))
    parser.add_argument("--steps", type=int, help="gradient steps in all, in place of the problem's own")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1, help="cells at once")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder; what is there is not run again")
    given = parser.parse_args(arguments)
    unknown = set(given.problems) - set(problems.names())
    if unknown:
        parser.error(f"no problem {', '.join(sorted(unknown))}; there are {', '.join(problems.names())}")
    cells = [
        Cell(problem, remedy, given.steps, given.seeds)
        for problem in given.problems or problems.names()
        for remedy in given.remedies
    ]
    with ProcessPoolExecutor(given.workers, mp_context=multiprocessing.get_context("spawn")) as executor:
        return run(cells, given.results, executor)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
