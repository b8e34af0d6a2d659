"""Tables in Markdown, our figures beside the paper's, from result files."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from proxvi.experiments.results import current

__all__ = ["Figures", "Paper", "grouped", "records", "table", "usual"]

DAGGER = "†"
TOLD_APART = ("method", "magnitude", "start", "seed")  # by row, column and mean; other settings are to be the same
Paper = Mapping[str, Mapping[str, tuple[float, float]]]  # ELBO and log likelihood, by row and column
Figures = dict[str, dict[str, list[dict[str, Any]]]]  # of all seeds, by row and column


def records(folder: Path) -> list[dict[str, Any]]:
    """All result files of a folder, by seed and name, but for those of another protocol."""
    found = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    return sorted(filter(current, found), key=lambda record: record["settings"]["seed"])


def usual(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings that most trials have, for a caption; without those that tell trials apart."""
    values = {key: [r["settings"][key] for r in records] for key in records[0]["settings"] if key not in TOLD_APART}
    return {key: max(of_all, key=of_all.count) for key, of_all in values.items()}


def grouped(
    records: list[dict[str, Any]], row: Callable[[dict[str, Any]], str], column: Callable[[dict[str, Any]], str]
) -> Figures:
    """Figures by where they belong, which `row` and `column` tell from the settings.

    What is not as usual makes a row of its own, which says so: only seeds are averaged, and a caption with the usual
    settings is true of all other rows.
    """
    common, figures = usual(records), {}
    for record in records:
        settings = record["settings"]
        more = ", ".join(f"{key} {settings[key]}" for key, value in common.items() if settings[key] != value)
        label = row(settings) + (f" ({more})" if more else "")
        figures.setdefault(label, {}).setdefault(column(settings), []).append(record["figures"])
    return figures


def table(figures: Figures, columns: Iterable[str], paper: Paper) -> str:
    """One row a method; each cell is ELBO / log likelihood, with the standard deviation over seeds if there are any."""
    columns = list(columns)
    head = ["method", *(heading for column in columns for heading in (column, f"{column}, paper"))]
    rows = [head, ["---"] * len(head)]
    for name, cells in figures.items():
        row = [name]
        for column in columns:
            theirs = paper.get(name.split(" (")[0], {}).get(column)
            row += [_ours(cells.get(column, [])), "" if theirs is None else " / ".join(map(_number, theirs))]
        rows.append(row)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if any(DAGGER in line for line in lines):
        lines += ["", f"{DAGGER} More than half of the digits have a Pareto k̂ above 0.7: expect this to be too low."]
    return "\n".join(lines)


def _ours(seeds: list[dict[str, Any]]) -> str:
    if not seeds:
        return ""
    cells = []
    for name in ("elbo", "log_likelihood"):
        values = np.array([figures[name] for figures in seeds])
        spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
        heavy = name == "log_likelihood" and not all(figures["khat_above"] <= 0.5 for figures in seeds)
        cells.append(_number(float(np.mean(values))) + spread + (DAGGER if heavy else ""))
    return " / ".join(cells) + (f" ({len(seeds)} seeds)" if len(seeds) > 1 else "")


def _number(x: float) -> str:
    return f"{x:.1f}".replace("-", "−")
