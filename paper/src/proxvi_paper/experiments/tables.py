"""Tables in Markdown from result files, with our figures beside the paper's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from proxvi_paper.experiments.results import is_current, load

__all__ = [
    "VARIED",
    "Figures",
    "Paper",
    "Record",
    "grouped",
    "markdown",
    "number",
    "records",
    "report",
    "table",
    "unusual",
    "usual",
]

DAGGER, DOUBLE_DAGGER = "†", "‡"
NOTES = {
    DAGGER: "More than half of the digits have a Pareto k̂ above 0.7: expect this to be too low.",
    DOUBLE_DAGGER: "Not all seeds are of one version of proxvi: see CHANGELOG.md for what differs.",
}
VARIED = ("method", "magnitude", "start", "seed")  # tables 1 to 3 show these as rows, columns and means
Record = dict[str, Any]  # a result file
Paper = Mapping[str, Mapping[str, tuple[float, float]]]  # ELBO and log likelihood, by row and column
Figures = dict[str, dict[str, list[dict[str, Any]]]]  # of all seeds, by row and column


def records(folder: Path) -> list[Record]:
    """All result files of a folder, by seed and file name. Files of another protocol are left out."""
    found = [record for path in sorted(folder.glob("*.json")) if (record := load(path)) is not None]
    return sorted(filter(is_current, found), key=lambda record: record["settings"]["seed"])


def report(make: Callable[[list[Record], Path], str]) -> Callable[[Path], str]:
    """Turn a function of the result files and their folder into a function of the folder that also saves the text."""

    @wraps(make)
    def report(folder: Path) -> str:
        found = records(folder)
        if not found:
            return f"no result files in {folder}"
        text = make(found, folder)
        (folder / "table.md").write_text(text + "\n")
        return text

    return report


def usual(records: list[Record], varied: Iterable[str] = VARIED) -> dict[str, Any]:
    """The settings that most trials have, without those in `varied`."""
    values = {key: [r["settings"][key] for r in records] for key in records[0]["settings"] if key not in varied}
    return {key: max(of_all, key=of_all.count) for key, of_all in values.items()}


def unusual(settings: dict[str, Any], usual: dict[str, Any]) -> str:
    """The settings that are not the usual ones, as in " (steps 400,000)"; empty if there are none."""
    differences = {key: settings[key] for key, value in usual.items() if settings[key] != value}
    named = (f"{key} {value:,}" if type(value) is int else f"{key} {value}" for key, value in differences.items())
    return f" ({', '.join(named)})" if differences else ""


def grouped(
    records: list[Record],
    row: Callable[[dict[str, Any]], str],
    column: Callable[[dict[str, Any]], str],
    varied: Iterable[str] = VARIED,
) -> Figures:
    """Figures by row and column, which are functions of the settings in `varied`.

    A trial with unusual settings gets a row of its own, which names them. So only seeds are averaged, and a caption
    with the usual settings is true of all other rows.
    """
    common, figures = usual(records, varied), {}
    for record in records:
        settings = record["settings"]
        label = row(settings) + unusual(settings, common)
        made_by = {"version": record.get("versions", {}).get("proxvi")}
        figures.setdefault(label, {}).setdefault(column(settings), []).append(record["figures"] | made_by)
    return figures


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---") -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'|'.join([rule] * len(head))}|", *lines[1:]])


def table(figures: Figures, columns: Iterable[str], paper: Paper, missing: str = "") -> str:
    """A row for each method. A cell is ELBO / log likelihood, with the standard deviation over several seeds.

    A cell that only the paper has reads `missing`.
    """
    columns = list(columns)
    rows = []
    for name, cells in figures.items():
        row = [name]
        for column in columns:
            theirs = paper.get(name.split(" (")[0], {}).get(column)
            ours = _cell(cells[column]) if column in cells else missing if theirs else ""
            row += [ours, " / ".join(map(number, theirs or ()))]
        rows.append(row)
    head = ["method", *(heading for column in columns for heading in (column, f"{column}, paper"))]
    text = markdown(head, rows, rule=" --- ")
    return "\n\n".join([text, *(f"{mark} {note}" for mark, note in NOTES.items() if mark in text)])


def _cell(seeds: list[dict[str, Any]]) -> str:
    cells = []
    for name in ("elbo", "log_likelihood"):
        values = np.array([figures[name] for figures in seeds])
        spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
        unreliable = name == "log_likelihood" and not all(figures["khat_above"] <= 0.5 for figures in seeds)
        cells.append(number(float(np.mean(values))) + spread + (DAGGER if unreliable else ""))
    mixed = DOUBLE_DAGGER if len({figures["version"] for figures in seeds}) > 1 else ""
    return " / ".join(cells) + (f" ({len(seeds)} seeds{mixed})" if len(seeds) > 1 else "")


def number(x: float) -> str:
    """With one decimal and a minus sign."""
    return f"{x:.1f}".replace("-", "−")
