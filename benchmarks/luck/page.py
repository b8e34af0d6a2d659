"""The benchmark of luck as tables and a picture, made from its result files.

    python benchmarks/luck/page.py

puts the tables into README.md, docs/benchmark.md and docs/seeds.md, and draws benchmark.png and four.png (and .svg) in
results/luck.
"""

import argparse
import json
import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import problems
from remedies import REMEDIES
from run import RESULTS
from scipy.stats import rankdata

from proxvi.plots import COLOURS, pyplot, save

OTHER_FAMILY = ("Pathfinder",)  # its covariance is not diagonal, so its ELBO may be above the best of the others
RESAMPLES = 2_000
NEAR, FAR = COLOURS[:2]


class Results(NamedTuple):
    """The result files, by problem and remedy.

    Attributes:
        best: the best ELBO that is known of each problem.
        gaps: by problem, steps and remedy: what each seed loses to it, in nats.
        seconds: by the same.
        inapplicable: the cells that say that the remedy does not apply.
    """

    best: dict[str, float]
    gaps: dict[tuple[str, int, str], np.ndarray]
    seconds: dict[tuple[str, int, str], float]
    inapplicable: set[tuple[str, int, str]]

    def tolerance(self, problem: str) -> float:
        """Two nats, or a thousandth of the ELBO, whichever is more."""
        return max(2.0, 1e-3 * abs(self.best[problem]))

    def within(self, cell: tuple[str, int, str]) -> int:
        """How many seeds end near the best."""
        return int(np.sum(self.gaps[cell] <= self.tolerance(cell[0])))


def read(folder: Path) -> Results:
    """Read all result files of a folder. A run that ended with NaN has an infinite gap."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    inapplicable = {(r["problem"], r["steps"], r["remedy"]) for r in files if r["elbos"] is None}
    files = [record for record in files if record["elbos"] is not None]
    elbos = {
        (r["problem"], r["steps"], r["remedy"]): np.array([-np.inf if e is None else e for e in r["elbos"]])
        for r in files
    }
    best: dict[str, float] = defaultdict(lambda: -np.inf)
    for (problem, _, remedy), values in elbos.items():
        if remedy not in OTHER_FAMILY:
            best[problem] = max(best[problem], values.max())
    keys = {(r["problem"], r["steps"], r["remedy"]): r for r in files}
    return Results(
        dict(best),
        {cell: best[cell[0]] - values for cell, values in elbos.items()},
        {cell: r["seconds"] for cell, r in keys.items()},
        inapplicable,
    )


def cells(results: Results) -> dict[str, dict[str, tuple[str, int, str]]]:
    """For each problem at its own number of steps, and each remedy: the cell."""
    found: dict[str, dict[str, tuple[str, int, str]]] = {}
    for name in problems.names():
        steps = problems.load(name).steps
        there = {remedy: (name, steps, remedy) for remedy in REMEDIES if (name, steps, remedy) in results.gaps}
        if there:
            found[name] = there
    return found


def established(results: Results) -> list[str]:
    """The remedies that were tried on at least half of the problems; a new one is shown, but not yet ranked."""
    tried = {remedy: {p for p, _, r in (*results.gaps, *results.inapplicable) if r == remedy} for remedy in REMEDIES}
    known = set().union(*tried.values())
    return [remedy for remedy in REMEDIES if len(tried[remedy]) >= len(known) / 2]


def complete(results: Results, name: str) -> bool:
    """Whether all established remedies were tried on a problem."""
    cell = (name, problems.load(name).steps)
    return all((*cell, r) in results.gaps or (*cell, r) in results.inapplicable for r in established(results))


def number(x: float) -> str:
    """As short as it can be."""
    return "∞" if not np.isfinite(x) else f"{x:.1f}" if x < 100 else f"{x:,.0f}"


def table(rows: list[list[str]], head: list[str]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return re.sub(r"-(?=[\d∞])", "−", "\n".join(f"| {' | '.join(row)} |" for row in lines))


def summary(results: Results, shown: list[str] | None = None) -> str:
    """A row a remedy: how often it is near the best, its rank, and if all are shown, what it costs."""
    found = cells(results)
    # A problem counts once all remedies were tried on it; a control does not.
    real = [name for name in found if complete(results, name) and not problems.load(name).control]
    ranked = ranks(results, real)
    rows = []
    for remedy in sorted(shown or ranked, key=lambda name: ranked[name][0]):
        there = [found[name][remedy] for name in real if remedy in found[name]]
        seeds = sum(len(results.gaps[cell]) for cell in there)
        near = sum(results.within(cell) for cell in there)
        # Against one run, the median seed: where does this remedy cost most?
        cost = {
            name: np.median(results.gaps[found[name][remedy]]) - np.median(results.gaps[found[name]["one run"]])
            for name in found
            if remedy in found[name] and complete(results, name)
        }
        worst = max(cost, key=lambda name: cost[name])
        times = [results.seconds[cell] / results.seconds[found[cell[0]]["one run"]] for cell in there]
        mean, low, high = ranked[remedy]
        rows.append(
            [
                remedy,
                f"{near / seeds:.0%} of {seeds}",
                f"{mean:.1f} ({low:.1f} to {high:.1f})",
                f"{number(max(cost[worst], 0.0))}" + (f" ({worst.replace('_', ' ')})" if cost[worst] > 0 else ""),
                f"{np.median(times):.1f}",
            ]
        )
    head = ["remedy", "seeds near the best", "mean rank (90% interval)", "most lost to one run, median seed", "time"]
    if shown is not None:
        return table([row[:3] for row in rows], head[:3])
    return table(rows, head)


def ranks(results: Results, names: list[str]) -> dict[str, tuple[float, float, float]]:
    """The mean rank of each remedy over the problems by its median gap, and its interval by a bootstrap.

    Gaps within the tolerance are equal, and equal remedies share their ranks. The bootstrap draws the problems, and
    the seeds within each.
    """
    found, generator = cells(results), np.random.default_rng(0)
    remedies = established(results)
    drawn = np.full((RESAMPLES + 1, len(names), len(remedies)), np.nan)  # the first is not resampled
    for p, name in enumerate(names):
        medians = []
        there = {remedy: cell for remedy, cell in found[name].items() if remedy in remedies}
        for cell in there.values():
            gaps = results.gaps[cell]
            resampled = gaps[generator.integers(len(gaps), size=(RESAMPLES, len(gaps)))]
            median = np.median(np.concatenate([np.sort(gaps)[None], resampled]), axis=1)
            medians.append(np.where(median <= results.tolerance(name), 0.0, median))
        drawn[:, p, [remedies.index(remedy) for remedy in there]] = rankdata(medians, axis=0).T
    chosen = generator.integers(len(names), size=(RESAMPLES, len(names)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a remedy may be in none of the problems that were drawn
        ranks = np.nanmean(drawn[0], axis=0)
        low, high = np.nanquantile(
            np.nanmean(drawn[1 + np.arange(RESAMPLES)[:, None], chosen], axis=1), [0.05, 0.95], axis=0
        )
    return {
        remedy: (float(ranks[i]), float(low[i]), float(high[i]))
        for i, remedy in enumerate(remedies)
        if np.isfinite(ranks[i])
    }


def by_problem(results: Results) -> str:
    """A row a problem, a column a remedy: how many seeds end near the best, and the median gap."""
    found = cells(results)
    rows = []
    for name, there in found.items():
        steps = problems.load(name).steps
        mark = "" if complete(results, name) else ", not all run"
        row = [f"{name.replace('_', ' ')} ({results.best[name]:,.1f}){mark}", f"{steps:,}"]
        for remedy in REMEDIES:
            if remedy not in there:
                row.append("")
                continue
            row.append(f"{results.within(there[remedy])}, {number(np.median(results.gaps[there[remedy]]))}")
        rows.append(row)
    return table(rows, ["problem (best known)", "steps", *REMEDIES])


def by_steps(results: Results, names: list[str], remedies: list[str]) -> str:
    """A row a cell, for some problems at all numbers of steps."""
    rows = []
    for name in names:
        there = sorted((steps, remedies.index(r)) for p, steps, r in results.gaps if p == name and r in remedies)
        for steps, index in there:
            cell = (name, steps, remedies[index])
            gaps = results.gaps[cell]
            if len(gaps) < 20:  # a search for the best known
                continue
            row = [f"{name} ({results.best[name]:.1f})", f"{steps:,}", remedies[index]]
            row += [f"{results.within(cell)} of {len(gaps)}", f"{np.median(gaps):.1f}", f"{gaps.max():.1f}"]
            rows.append(row)
    return table(rows, ["problem", "steps", "remedy", "within 2 nats of the best", "median gap", "worst gap"])


def about_problems() -> str:
    """A row a problem: what its file says of it."""
    return table(
        [[name.replace("_", " "), problems.about(name)] for name in problems.names()], ["problem", "what it is"]
    )


def stopping(path: Path) -> str:
    """A row a problem and learning rate: how the rule for convergence did."""
    rows = []
    for row in json.loads(path.read_text())["rows"]:
        cells = [row["problem"], f"{row['rate']:g}", str(row["should_have_stopped"]), str(row["stopped"])]
        rows.append([*cells, f"{row['median_step']:,.0f}", str(row["too_early"]), number(row["most_gained"])])
    head = ["problem", "rate", "should stop", "stopped", "median step", "too early", "missed at most, nats"]
    return table(rows, head)


IN_README = ["one run", "best of 4", "small start", "KL warm-up", "MAP start", "speed limit", "race, plain"]
FOUR = ["theoph", "mcycle", "sunspots", "galaxies"]
RESTARTS_AND_RACES = ["one run", "best of 4", "best of 16", "race, plain", "race, plain and speed limit"]


def picture(results: Results, path: Path) -> None:
    """A panel a problem, a row a remedy, a dot a seed."""
    plt = pyplot()
    found = cells(results)
    height = -(-len(found) // 3)
    figure, panels = plt.subplots(height, 3, figsize=(12, 2.9 * height), sharey=True, layout="constrained")
    for panel, (name, there) in zip(panels.flat, found.items(), strict=False):
        tolerance = results.tolerance(name)
        for row, remedy in enumerate(REMEDIES):
            if (name, problems.load(name).steps, remedy) in results.inapplicable:
                place = {"transform": panel.get_yaxis_transform(), "va": "center", "ha": "center"}
                panel.text(0.5, row, "does not apply", color="grey", fontsize=7, **place)
            if remedy not in there:
                continue
            dots(panel, row, results.gaps[there[remedy]], tolerance)
        panel.axvspan(tolerance / 50, tolerance, color=NEAR, alpha=0.08, lw=0)
        control = ", a control" if problems.load(name).control else ""
        panel.set(xscale="log", title=f"{name.replace('_', ' ')}{control}", xlim=(tolerance / 50, None))
        panel.set_yticks(range(len(REMEDIES)), list(REMEDIES))
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    for panel in panels.flat[len(found) :]:
        panel.axis("off")
    panels.flat[0].invert_yaxis()
    figure.supxlabel("nats below the best known ELBO: blue dots are near the best, orange ones are not")
    save(figure, path, svg=True)


def picture_of_four(results: Results, path: Path, steps: int = 48_000) -> None:
    """Four problems with many steps: a row a remedy, a dot a seed."""
    plt = pyplot()
    figure, panels = plt.subplots(1, len(FOUR), figsize=(11, 2.1), sharey=True, layout="constrained")
    rows = {"one run": "one run", "best of 4": "best of 4 restarts", "race, plain": "proxvi.race"}
    titles = ("drug in the blood", "crash test", "sunspots", "galaxies")
    for panel, name, title in zip(panels, FOUR, titles, strict=True):
        tolerance = results.tolerance(name)
        panel.axvspan(0.05, tolerance, color=NEAR, alpha=0.08, lw=0)
        for row, remedy in enumerate(rows):
            if (cell := (name, steps, remedy)) not in results.gaps:
                continue
            dots(panel, row, results.gaps[cell], tolerance)
            share = f"{results.within(cell)} of {len(results.gaps[cell])}"
            panel.text(1.0, row - 0.3, share, transform=panel.get_yaxis_transform(), ha="right", fontsize=8)
        panel.set(xscale="log", title=title, xlim=(0.05, 400), ylim=(len(rows) - 0.5, -0.6))
        panel.set_yticks(range(len(rows)), list(rows.values()))
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    figure.supxlabel(
        f"nats below the best known ELBO, {steps:,} gradient steps in all (blue: within 2 nats)", fontsize=10
    )
    save(figure, path, svg=True)


def dots(panel: Any, row: int, gaps: np.ndarray, tolerance: float) -> None:
    """The seeds of a cell; a triangle points to those that are off the scale, above the best known or NaN."""
    shown = np.clip(gaps, tolerance / 30, tolerance * 1e4)
    above, ended_with_nan = gaps < 0.0, np.isinf(gaps)
    for marker, of_kind in (("o", ~above & ~ended_with_nan), ("<", above), (">", ended_with_nan)):
        for color, side in ((NEAR, gaps <= tolerance), (FAR, gaps > tolerance)):
            here = of_kind & side
            panel.plot(shown[here], np.full(here.sum(), row), marker, ms=4, alpha=0.5, color=color)


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmark.md", ROOT / "docs" / "seeds.md"]


def with_tables(text: str, results: Results) -> str:
    """A page with its tables made again: each stands between two comments, the first of which has its name."""
    tables = {
        "readme": summary(results, IN_README),
        "summary": summary(results),
        "by problem": by_problem(results),
        "problems": about_problems(),
        "stopping": stopping(ROOT / "results" / "benchmarks" / "stopping.json"),
        "by steps": by_steps(results, FOUR, RESTARTS_AND_RACES),
    }
    for name, made in tables.items():
        pattern = rf"(<!-- table: {name} -->\n\n).*?(\n\n<!-- end -->)"
        text = re.sub(pattern, lambda found, made=made: found[1] + made + found[2], text, flags=re.DOTALL)
    return text


def main() -> None:
    """Put the tables into the pages, and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    results = read((given := parser.parse_args()).results)
    for path in PAGES:
        path.write_text(with_tables(path.read_text(), results))
    picture(results, given.results / "benchmark")
    picture_of_four(results, given.results / "four")


if __name__ == "__main__":
    main()
