"""Does a speed limit need settings? `over`, Adam's b2 and the learning rate, on the two problems of rescue.py.

    python examples/speed_limit_settings.py mixture --results again
    PROXVI_DATA=... python examples/speed_limit_settings.py network --seeds 2 --steps 10000 --results again

One of the three is varied at a time, from the good and from the bad start, with the limit and without it. `over` is a
share of the run; the learning rate is in units of that of rescue.py. Each point has a result file. With `--picture`
it draws them: the median, and lines to the best and the worst seed.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rescue import Problem, finished, fit, mixture, network, save_result, statistic_of

import proxvi

DEFAULT = {"over": 0.33, "b2": 0.999, "rate": 1.0}
STUDY = {
    "over": (0.1, 0.2, 0.33, 0.5, 0.7, 1.0),
    "b2": (0.9, 0.99, 0.999),
    "rate": (0.3, 1.0, 3.0),
}
STARTS = ("good", "bad")


def points() -> list[dict[str, float]]:
    """The settings, one of them varied at a time; `over` 0 is plain VI."""
    varied = [{**DEFAULT, name: value} for name, values in STUDY.items() for value in values]
    plain = [{**point, "over": 0.0} for point in varied]
    return [dict(point) for point in dict.fromkeys(tuple(point.items()) for point in varied + plain)]


def run(problem: Problem, point: dict[str, float], start: str, seeds: int, steps: int) -> np.ndarray:
    """The final ELBO of each seed, for a data point."""
    rate = optax.cosine_decay_schedule(point["rate"] * problem.learning_rate, steps)
    limit = proxvi.SpeedLimit(statistic_of(problem), over=point["over"] * steps)
    optimizer = optax.adam(rate, b2=point["b2"])
    svi = proxvi.ProximitySVI(problem.model, problem.guide, optimizer, proxvi.LeaveOneOutELBO(5), limit)
    one = partial(fit, problem, svi, steps=steps, start=start)
    every = jax.vmap(one) if problem.batch_size is None else partial(jax.lax.map, one)
    return np.asarray(jax.jit(every)(jax.random.split(jax.random.key(0), seeds))) / len(problem.data)


def picture(found: dict[tuple[tuple[str, float], ...], dict[str, np.ndarray]], title: str, path: Path) -> None:
    """One panel a setting; the good start above the bad one, with the limit and without it."""
    from proxvi.plots import COLOURS, pyplot, save

    plt = pyplot()
    figure, axes = plt.subplots(2, len(STUDY), figsize=(10, 5), layout="constrained", sharex="col", sharey="row")
    titles = {"over": "over, share of the run", "b2": "Adam's b2", "rate": "learning rate, relative"}
    for column, (name, values) in enumerate(STUDY.items()):
        at = np.arange(len(values))
        for row, start in enumerate(STARTS):
            for limited, colour in ((True, COLOURS[0]), (False, COLOURS[1])):
                shown = [{**DEFAULT, name: value} | ({} if limited else {"over": 0.0}) for value in values]
                ends = [-found[tuple(point.items())][start] for point in shown]
                label, beside = ("speed limit", at - 0.06) if limited else ("VI", at + 0.06)
                axes[row, column].plot(beside, [np.median(end) for end in ends], "o-", color=colour, label=label)
                axes[row, column].vlines(beside, [end.min() for end in ends], [end.max() for end in ends], color=colour)
        axes[1, column].set_xticks(at, [f"{value:g}" for value in values])
        axes[1, column].set_xlabel(titles[name])
    for row, start in enumerate(STARTS):
        axes[row, 0].set(ylabel=f"{start} start\n−ELBO of a data point", yscale="log")
        axes[row, 0].yaxis.set_major_formatter("{x:g}")
        axes[row, 0].yaxis.set_minor_formatter("{x:g}")
    axes[0, 0].legend(frameon=False)
    figure.suptitle(title)
    save(figure, path)


def main() -> None:
    """Run one problem at all points; print a table, and draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problem", choices=["mixture", "network"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=None, help="as in rescue.py, if not given")
    parser.add_argument("--results", type=Path, default=None, help="a folder; what is there is not run again")
    parser.add_argument("--picture", type=Path, default=None, help="where to save it; needs matplotlib")
    arguments = parser.parse_args()
    problem = {"mixture": mixture, "network": network}[arguments.problem]()
    steps = arguments.steps or problem.steps
    found: dict[tuple[tuple[str, float], ...], dict[str, np.ndarray]] = {}
    print("| over | b2 | rate | start | median ELBO | worst |\n|---|---|---|---|---|---|")
    for point in points():
        ends = found.setdefault(tuple(point.items()), {})
        for start in STARTS:
            settings: dict[str, Any] = {"problem": arguments.problem, "start": start, "seeds": arguments.seeds}
            settings |= {"steps": steps, **point}
            name = "-".join([arguments.problem, start, *(f"{key}-{value:g}" for key, value in point.items())])
            path = arguments.results and arguments.results / f"{name}.json"
            known = finished(path, settings)
            if known is None:
                began = time.perf_counter()
                known = run(problem, point, start, arguments.seeds, steps)
                if path is not None:
                    save_result(path, settings, known, time.perf_counter() - began, "speed_limit_settings.py")
            ends[start] = known
            values = " | ".join(f"{value:g}" for value in point.values())
            print(f"| {values} | {start} | {np.median(known):.3f} | {np.min(known):.3f} |", flush=True)
    if arguments.picture is not None:
        picture(found, f"{arguments.problem}, {arguments.seeds} seeds, {steps:,} steps", arguments.picture)


if __name__ == "__main__":
    main()
