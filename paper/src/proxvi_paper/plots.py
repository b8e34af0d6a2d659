"""Plots of the paper's figure and tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from proxvi.plots import COLOURS, pyplot, save

__all__ = ["arrows", "curves", "digits", "study"]


def arrows(ends: Mapping[str, np.ndarray], begins: np.ndarray, truth: np.ndarray, path: Path) -> None:
    """Arrows from the start to the end of two parameters, a panel for each method, as in the paper's Figure 1."""
    plt = pyplot()
    figure, panels = plt.subplots(1, len(ends), figsize=(4.6 * len(ends), 4.8), sharex=True, sharey=True, squeeze=False)
    for letter, axes, (name, end) in zip("abcdefgh", panels[0], ends.items(), strict=False):
        for one, other in zip(begins, end, strict=True):
            axes.annotate(
                "", xy=other, xytext=one, arrowprops={"arrowstyle": "->", "color": COLOURS[0], "lw": 0.7, "alpha": 0.7}
            )
        axes.plot(*end.T, "o", color=COLOURS[0], ms=5, label="end")
        axes.plot(*truth, "X", color=COLOURS[1], ms=8, zorder=5, label="truth")
        reach = 1.08 * np.abs(begins - truth).max()
        axes.set(xlim=(truth[0] - reach, truth[0] + reach), ylim=(truth[1] - reach, truth[1] + reach), aspect="equal")
        axes.set(xlabel="$\\mu_1$", title=f"({letter}) {name}")
    panels[0, 0].set_ylabel("$\\mu_2$")
    panels[0, 0].legend(loc="upper left", fontsize="small")
    figure.tight_layout()
    save(figure, path, svg=True)


def study(grid: Mapping[str, Sequence[float]], shares: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """The share of starts that are not trapped: a panel for each setting, a line for each method."""
    plt = pyplot()
    figure, panels = plt.subplots(1, len(grid), figsize=(4 * len(grid), 3.4), sharey=True, layout="constrained")
    for axes, (setting, values) in zip(panels, grid.items(), strict=True):
        for i, (method, line) in enumerate(
            shares[setting].items()
        ):  # thinner and thinner, so that equal lines all show
            axes.plot(values, line, color=COLOURS[i], marker="osv^"[i % 4], ms=11 - 2 * i, lw=7 - 1.8 * i, label=method)
        axes.set(xscale="log", xlabel=setting.replace("_", " "), ylim=(-0.05, 1.05))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of starts not trapped")
    panels[-1].legend(fontsize="small")
    save(figure, path, svg=True)


def curves(
    figures: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]],
    path: Path,
    *,
    upper: float = 20.0,
    entropy: str = "entropy of q",
) -> None:
    """Training over time: the ELBO and its upper end, the entropy of q and the magnitude of the constraint.

    Args:
        figures: of all seeds, by method (a line each) and by start (a column each, with its own scale; "" for the one
            start that there is).
        path: where to save the picture.
        upper: how many nats the panel of the upper end shows.
        entropy: what that curve shows.
    """
    plt = pyplot()
    columns = sorted({column for cells in figures.values() for column in cells})
    traces = {
        column: [seed["curves"] for cells in figures.values() for seed in cells.get(column, [])] for column in columns
    }
    rows = {"watched ELBO, nats": "validation_elbo", "its upper end, nats": "validation_elbo"}
    rows[f"{entropy}, nats"] = "entropy"
    if any("magnitude" in trace for column in columns for trace in traces[column]):
        rows["magnitude"] = "magnitude"
    size = {"figsize": (5.2 * len(columns), 8.5), "sharex": True, "squeeze": False}
    figure, panels = plt.subplots(len(rows), len(columns), layout="constrained", **size)
    lines: dict[str, Any] = {}
    for j, column in enumerate(columns):
        for i, (method, cells) in enumerate(figures.items()):
            color = COLOURS[i % len(COLOURS)]
            for seed in cells.get(column, []):
                for axes, name in zip(panels[:, j], rows.values(), strict=True):
                    if name in seed["curves"]:
                        # Schedules are alike: thinner and thinner, so that all show.
                        width = 1.2 + (3.0 * (1.0 - i / len(figures)) if name == "magnitude" else 0.0)
                        curve = seed["curves"]["step"], seed["curves"][name]
                        (line,) = axes.plot(*curve, color=color, lw=width)
                        lines.setdefault(method, line)
        elbos = [trace["validation_elbo"] for trace in traces[column]]
        worst, best = min(map(np.nanmin, elbos)), max(map(np.nanmax, elbos))
        panels[0, j].set(title=f"{column} start" if column else "")
        panels[0, j].set(yscale="symlog" if worst < 10 * best < 0 else "linear")
        panels[1, j].set(ylim=(best - upper, best + upper / 20))
        panels[-1, j].set(xlabel="step")
        panels[-1, j].locator_params(axis="x", nbins=5)  # or numbers of six digits run into each other
        if "magnitude" in rows:
            panels[-1, j].set(yscale="log")
    named = {method: lines[method] for method in figures if method in lines}  # in the order of the table
    figure.legend(named.values(), named, loc="outside upper center", ncols=2 * len(columns), fontsize="small")
    for axes, name in zip(panels[:, 0], rows, strict=True):
        axes.set_ylabel(name)
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    save(figure, path, svg=True)


def digits(images: Mapping[str, np.ndarray], path: Path) -> None:
    """Rows of images of 28 × 28 pixels, a row for each name."""
    plt = pyplot()
    most = max(len(row) for row in images.values())
    figure, panels = plt.subplots(len(images), 1, figsize=(0.6 * most, 0.66 * len(images)), squeeze=False)
    for axes, (name, row) in zip(panels[:, 0], images.items(), strict=True):
        axes.imshow(np.hstack([image.reshape(28, 28) for image in row]), cmap="gray_r", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
    save(figure, path, svg=True)
