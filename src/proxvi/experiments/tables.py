"""Tables in Markdown, our figures beside the paper's, from result files."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Figures", "Paper", "grouped", "records", "table"]

Paper = Mapping[str, Mapping[str, tuple[float, float]]]  # ELBO and log likelihood, by row and column
Figures = dict[str, dict[str, list[dict[str, Any]]]]  # of all seeds, by row and column


def records(folder: Path) -> list[dict[str, Any]]:
    """All result files of a folder, by name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def grouped(
    of: Iterable[dict[str, Any]], row: Callable[[dict[str, Any]], str], column: Callable[[dict[str, Any]], str]
) -> Figures:
    """Figures by where they belong, which `row` and `column` tell from the settings."""
    figures: Figures = {}
    for record in of:
        settings = record["settings"]
        figures.setdefault(row(settings), {}).setdefault(column(settings), []).append(record["figures"])
    return figures


def table(figures: Figures, columns: Iterable[str], paper: Paper) -> str:
    """One row a method; each cell is ELBO / log likelihood, with the standard deviation over seeds if there are any."""
    columns = list(columns)
    head = ["method", *(heading for column in columns for heading in (column, f"{column}, paper"))]
    rows = [head, ["---"] * len(head)]
    for name, cells in figures.items():
        row = [name]
        for column in columns:
            theirs = paper.get(name, {}).get(column)
            row += [_ours(cells.get(column, [])), "" if theirs is None else " / ".join(map(_number, theirs))]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ours(seeds: list[dict[str, Any]]) -> str:
    if not seeds:
        return ""
    cells = []
    for name in ("elbo", "log_likelihood"):
        values = np.array([figures[name] for figures in seeds])
        spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
        cells.append(_number(float(np.mean(values))) + spread)
    return " / ".join(cells) + (f" ({len(seeds)} seeds)" if len(seeds) > 1 else "")


def _number(x: float) -> str:
    return f"{x:.1f}".replace("-", "−")
