"""Plots. Needs the extra `plot`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from proxvi.starts import Luck

__all__ = ["luck"]

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")

WINDOWS = 200  # of a trace


def pyplot() -> Any:
    """Return `matplotlib.pyplot`, imported when a plot is made and not before."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need Matplotlib: pip install 'proxvi[plot]'.") from error
    return plt


def save(figure: Any, path: Path, *, svg: bool = False) -> None:
    """Save a figure and close it; make the folder if there is none. With `svg` also as SVG, beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")  # labels may lie outside of the axes
    if svg:
        with pyplot().rc_context({"svg.hashsalt": "proxvi"}):  # the same bytes every time
            figure.savefig(path.with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
    pyplot().close(figure)


def luck(runs: "Mapping[str, Luck]", path: Path) -> None:
    """Plot how much inferences depend on their start: the ELBOs during the run, and the sorted final ones.

    Args:
        runs: what `luck` returned, by name.
        path: where to save the picture.
    """
    plt = pyplot()
    figure, panels = plt.subplots(
        len(runs), 2, figsize=(9, 2.8 * len(runs)), sharey="row", squeeze=False, layout="constrained"
    )
    for (left, right), (name, run) in zip(panels, runs.items(), strict=True):
        elbos, best, tolerance = run.elbos, run.best, run.tolerance
        # Means of windows: the noise of single steps would fill the panel.
        windows = np.array_split(run.traces, min(WINDOWS, run.traces.shape[1]), axis=1)
        traces = np.stack([np.mean(window, axis=1) for window in windows], axis=1)
        left.plot(
            np.linspace(0, 1, traces.shape[1]), traces.T, color=COLOURS[0], lw=0.6, alpha=min(1.0, 10 / len(elbos))
        )
        ordered = np.sort(elbos[np.isfinite(elbos)])
        good = ordered >= best - tolerance
        place = np.arange(len(ordered))
        right.plot(place[good], ordered[good], "o", ms=4, color=COLOURS[0], label=f"within {tolerance:g} of the best")
        right.plot(place[~good], ordered[~good], "X", ms=5, color=COLOURS[1], label="the others")
        low = np.min(ordered) - 0.05 * (best - np.min(ordered)) - tolerance
        left.set(ylim=(low, best + tolerance + 0.02 * (best - low)), ylabel="ELBO", title=name)
        right.set(title=f"{good.sum() / len(elbos):.0%} of {len(elbos)} starts within {tolerance:g} nats of the best")
        right.legend(fontsize="small", loc="lower right")  # where the sorted points are not
    panels[-1, 0].set_xlabel("part of the run")
    panels[-1, 1].set_xlabel("start, by final ELBO")
    save(figure, path)
