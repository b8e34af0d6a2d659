"""What a person looks at. Needs the extra `plot`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from proxvi.starts import Starts

__all__ = ["arrows", "curves", "digits", "starts", "study"]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need Matplotlib: pip install 'proxvi[plot]'.") from error
    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")  # labels may stand out
    _pyplot().close(figure)


def arrows(ends: Mapping[str, np.ndarray], begins: np.ndarray, truth: np.ndarray, path: Path) -> None:
    """Arrows from where two parameters started to where they ended, a panel a method, as in the paper's Figure 1."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, len(ends), figsize=(4.6 * len(ends), 4.8), sharex=True, sharey=True, squeeze=False)
    for letter, axes, (name, end) in zip("abcdefgh", panels[0], ends.items(), strict=False):
        for one, other in zip(begins, end, strict=True):
            axes.annotate(
                "", xy=other, xytext=one, arrowprops={"arrowstyle": "->", "color": "tab:green", "lw": 0.7, "alpha": 0.7}
            )
        axes.plot(*end.T, "o", color="tab:green", ms=5, label="end")
        axes.plot(*truth, "o", color="tab:red", ms=6, zorder=5, label="truth")
        reach = 1.08 * np.abs(begins - truth).max()
        axes.set(xlim=(truth[0] - reach, truth[0] + reach), ylim=(truth[1] - reach, truth[1] + reach), aspect="equal")
        axes.set(xlabel="$\\mu_1$", title=f"({letter}) {name}")
    panels[0, 0].set_ylabel("$\\mu_2$")
    panels[0, 0].legend(loc="upper left", fontsize="small")
    figure.tight_layout()
    _save(figure, path)


def study(grid: Mapping[str, Sequence[float]], shares: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """The share of starts that are not trapped, along each setting: a panel a setting, a line a method."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, len(grid), figsize=(4 * len(grid), 3.4), sharey=True, layout="constrained")
    for axes, (setting, values) in zip(panels, grid.items(), strict=True):
        for i, (method, line) in enumerate(shares[setting].items()):  # thinner and thinner: lines that agree all show
            axes.plot(values, line, marker="osv^"[i % 4], ms=11 - 2 * i, lw=7 - 1.8 * i, label=method)
        axes.set(xscale="log", xlabel=setting.replace("_", " "), ylim=(-0.05, 1.05))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of starts not trapped")
    panels[-1].legend(fontsize="small")
    _save(figure, path)


def starts(runs: "Mapping[str, Starts]", path: Path, tolerance: float = 2.0) -> None:
    """How much inferences depend on their start: the ELBOs on the way, and the final ones in order.

    Args:
        runs: what `multistart` returned, by name.
        path: where to save the picture.
        tolerance: as for `Starts.report`; final ELBOs this close to the best of their run are green.
    """
    plt = _pyplot()
    figure, panels = plt.subplots(
        len(runs), 2, figsize=(9, 2.8 * len(runs)), sharey="row", squeeze=False, layout="constrained"
    )
    for (left, right), (name, run) in zip(panels, runs.items(), strict=True):
        elbos, traces = np.asarray(run.elbos), np.asarray(run.traces)
        best = np.nanmax(elbos)
        left.plot(traces.T, color="tab:blue", lw=0.6, alpha=min(1.0, 10 / len(elbos)))
        ordered = np.sort(elbos[np.isfinite(elbos)])
        good = ordered >= best - tolerance
        place = np.arange(len(ordered))
        right.plot(place[good], ordered[good], "o", ms=4, color="tab:green", label=f"within {tolerance:g} of the best")
        right.plot(place[~good], ordered[~good], "o", ms=4, color="tab:red", label="the others")
        low = np.min(ordered) - 0.05 * (best - np.min(ordered)) - tolerance
        left.set(ylim=(low, best + tolerance + 0.02 * (best - low)), ylabel="ELBO", title=name)
        right.set(title=f"{good.sum() / len(elbos):.0%} of {len(elbos)} starts within {tolerance:g} nats of the best")
        right.legend(fontsize="small", loc="lower right")  # where the sorted points are not
    panels[-1, 0].set_xlabel("step")
    panels[-1, 1].set_xlabel("start, by final ELBO")
    _save(figure, path)


def curves(
    figures: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]],
    path: Path,
    *,
    upper: float = 20.0,
    entropy: str = "entropy of q",
) -> None:
    """Training over time: the ELBO, whole and its upper end, the entropy of q and the magnitude of the constraint.

    Args:
        figures: those of trials, by method (a line each) and by start (a column each, to its own scale), all seeds.
        path: where to save the picture.
        upper: how many nats the upper end is.
        entropy: what that curve is to be called.
    """
    plt = _pyplot()
    columns = sorted({column for cells in figures.values() for column in cells})
    traces = {
        column: [seed["curves"] for cells in figures.values() for seed in cells.get(column, [])] for column in columns
    }
    rows = {"validation ELBO": "validation_elbo", "its upper end": "validation_elbo", entropy: "entropy"}
    if any("magnitude" in trace for column in columns for trace in traces[column]):
        rows["magnitude"] = "magnitude"
    size = {"figsize": (5.2 * len(columns), 8.5), "sharex": True, "squeeze": False}
    figure, panels = plt.subplots(len(rows), len(columns), layout="constrained", **size)
    lines: dict[str, Any] = {}
    for j, column in enumerate(columns):
        for i, (method, cells) in enumerate(figures.items()):
            color = plt.get_cmap("tab20")(2 * i % 20 + i // 10)
            for seed in cells.get(column, []):
                for axes, name in zip(panels[:, j], rows.values(), strict=True):
                    if name in seed["curves"]:
                        (lines[method],) = axes.plot(seed["curves"]["step"], seed["curves"][name], color=color, lw=1.2)
        elbos = [trace["validation_elbo"] for trace in traces[column]]
        worst, best = min(map(np.nanmin, elbos)), max(map(np.nanmax, elbos))
        panels[0, j].set(title=column, yscale="symlog" if worst < 10 * best < 0 else "linear")
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
    _save(figure, path)


def digits(images: Mapping[str, np.ndarray], path: Path) -> None:
    """Rows of images of 28 × 28 pixels, a row a name."""
    plt = _pyplot()
    most = max(len(row) for row in images.values())
    figure, panels = plt.subplots(len(images), 1, figsize=(0.6 * most, 0.66 * len(images)), squeeze=False)
    for axes, (name, row) in zip(panels[:, 0], images.items(), strict=True):
        axes.imshow(np.hstack([image.reshape(28, 28) for image in row]), cmap="gray_r", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
    _save(figure, path)
