"""Tables 1 and 2: sigmoid belief networks on binarised MNIST, by every method from a good and a bad start."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import SVI

import proxvi
from proxvi._typing import Params
from proxvi._validation import check_number
from proxvi.svi import steers
from proxvi.training._progress import Progress
from proxvi_paper import plots
from proxvi_paper.datasets import BinarizedMNIST
from proxvi_paper.experiments import tables
from proxvi_paper.experiments.digit_trials import (
    REPORTS,
    SPEED_LIMIT,
    WATCHED,
    DigitGrid,
    DigitTrial,
    active_units,
    approximation,
    check_known,
    decode,
)
from proxvi_paper.models.sbn import BAD, GOOD, belief_network

__all__ = ["METHODS", "STEPS", "OneLayer", "ThreeLayers", "Trial", "report"]

STEPS = 4_000_000  # the paper's
STARTS = {"good": GOOD, "bad": BAD}
SCALE = " (scale "  # marks the rows of shorter runs
PATIENCE = REPORTS // 10


@dataclass(frozen=True, kw_only=True)
class Trial(DigitTrial):
    """One cell of a table.

    Args:
        start: "good" or "bad".
        units: in each layer, from the data up.
        particles: samples of each digit's latent variables for a gradient.
    """

    training_settings = (
        *("method", "start", "units", "steps", "gamma", "decay"),
        *("learning_rate", "batch_size", "particles", "seed"),
    )

    start: str
    units: tuple[int, ...] = (200,)
    steps: int = STEPS
    batch_size: int = 20
    particles: int = 5

    @property
    def title(self) -> str:
        """The first part of its name."""
        return f"{self.method} {self.start} {len(self.units)} layers"

    def svi(self, digits: BinarizedMNIST) -> proxvi.ProximitySVI:
        """What is trained."""
        network = belief_network(digits.train.mean(0), units=self.units, start=STARTS[self.start])
        optimizer = optax.adam(self.learning_rate, eps=1e-6)  # the authors' ε
        return proxvi.ProximitySVI(*network, optimizer, *METHODS[self.method](self))

    def watch(self, svi: SVI, params: Params, digits: np.ndarray) -> dict[str, Any]:
        """Entropy of the first layer, in nats of a digit."""
        return {"entropy": jnp.mean(proxvi.entropy(approximation(svi, params, digits, "z1"), total=True))}

    def describe(self, svi: SVI, params: Params, digits: np.ndarray) -> dict[str, Any]:
        """How many units of the first layer depend on the digit."""
        return {"active_units": active_units(approximation(svi, params, digits, "z1").mean)}


def _plain(trial: Trial) -> proxvi.LeaveOneOutELBO:
    return proxvi.LeaveOneOutELBO(trial.particles)


METHODS: dict[str, Callable[[Trial], tuple[Any, Any]]] = {  # estimator and constraint
    "VI": lambda trial: (_plain(trial), ()),
    "annealing": lambda trial: (proxvi.AnnealedELBO(_plain(trial), trial.schedule()), ()),
    "PVI, entropy": lambda trial: (_plain(trial), trial.proximity(proxvi.entropy)),
    "PVI, mean/variance": lambda trial: (_plain(trial), trial.proximity(proxvi.mean_variance)),
    "PVI, KL": lambda trial: (_plain(trial), trial.proximity(proxvi.kl_to_prior)),
    SPEED_LIMIT: lambda trial: (_plain(trial), proxvi.SpeedLimit()),
}
WITHOUT_DECAY = ("VI", SPEED_LIMIT)
# Validation ELBO and marginal likelihood, by layers, method and start.
PAPER: dict[int, tables.Paper] = {
    1: {
        "VI": {"bad": (-663.7, -636.7), "good": (-122.1, -114.1)},
        "annealing": {"bad": (-119.4, -110.2), "good": (-116.5, -108.7)},
        "PVI, entropy": {"bad": (-118.0, -110.0), "good": (-114.1, -107.5)},
        "PVI, mean/variance": {"bad": (-119.9, -111.1), "good": (-115.7, -108.3)},
    },
    3: {
        "VI": {"bad": (-504.5, -464.3), "good": (-117.4, -105.1)},
        "annealing": {"bad": (-105.8, -97.3), "good": (-101.4, -94.3)},
        "PVI, entropy": {"bad": (-106.0, -98.3), "good": (-99.9, -93.7)},
        "PVI, mean/variance": {"bad": (-105.9, -97.5), "good": (-100.6, -93.9)},
    },
}


@dataclass(frozen=True, kw_only=True)
class OneLayer(DigitGrid):
    """Sigmoid belief networks of one layer on binarised MNIST, by every method from a good and a bad start.

    A trial takes about 3 hours of one core at full scale.

    Args:
        starts: "bad", "good".
        gammas: factors by which the magnitude, or the temperature of annealing, falls over a run.
    """

    known_methods = METHODS
    full_steps = STEPS
    units: ClassVar[tuple[int, ...]] = (200,)

    methods: tuple[str, ...] = tuple(name for name in METHODS if name != SPEED_LIMIT)  # that one is asked for by name
    starts: tuple[str, ...] = tuple(STARTS)
    gammas: tuple[float, ...] = (1e-10,)

    def __post_init__(self) -> None:
        """Check the options before hours of training."""
        super().__post_init__()
        check_known("starts", self.starts, STARTS)
        for gamma in self.gammas:
            check_number("gammas", gamma, above=0.0, below=1.0, remedy="1e-10 lets the constraint go")

    def trials(self) -> list[Trial]:
        """All combinations. A method without a decay runs once."""
        trials = (
            Trial(
                method=method,
                start=start,
                units=self.units,
                gamma=Trial.gamma if method in WITHOUT_DECAY else gamma,
                seed=seed,
                **self.common,
            )
            for seed, gamma, start, method in product(self.seeds, self.gammas, self.starts, self.methods)
        )
        return list(dict.fromkeys(trials))


class ThreeLayers(OneLayer):
    """Sigmoid belief networks of three layers, as in table 1.

    A trial takes about 7 hours of one core at full scale.
    """

    units = (200, 200, 200)


@tables.report
def report(records: list[tables.Record], folder: Path) -> str:
    """Tables of the full and of the shorter runs, what early stopping would give, curves and samples."""

    def row(settings: dict[str, Any]) -> str:
        scale = settings["steps"] / STEPS
        return settings["method"] + ("" if scale == 1 else f"{SCALE}{scale:g})")

    order = list(METHODS)
    records.sort(key=lambda r: (order.index(r["settings"]["method"]), -r["settings"]["steps"], -r["settings"]["gamma"]))
    varied = (*tables.VARIED, "steps")
    common = tables.usual(records, varied)
    figures = tables.grouped(records, row, lambda settings: settings["start"], varied)
    layers = len(common["units"])
    paper = PAPER.get(layers, {})
    shorter = {name: cells for name, cells in figures.items() if SCALE in name}
    full = {name: {} for name in paper} | {name: cells for name, cells in figures.items() if name not in shorter}
    for suffix, part in (("", full), ("-shorter", shorter)):
        drawn = {
            f"{method}, {start} start": decode(seeds[0]["samples"][:12])
            for method, cells in part.items()
            for start, seeds in sorted(cells.items())
        }
        if drawn:
            entropy = "entropy of q" if layers == 1 else "entropy, layer 1"
            plots.curves(part, folder / f"curves{suffix}.png", entropy=entropy)
            plots.digits(drawn, folder / f"samples{suffix}.png")
    text = [
        f"Validation ELBO / log likelihood in nats; units in each layer: {', '.join(map(str, common['units']))}; "
        f"γ {common['gamma']:g}, {common['digits']:,} digits, {common['samples']:,} samples. "
        f"At the paper's size, {STEPS:,} steps:",
        tables.table(full, sorted(STARTS), paper, missing="missing"),
    ]
    if shorter:
        text.append("Shorter runs. The scale is their share of the paper's steps; the decay is spread over them:")
        text.append(tables.table(shorter, sorted(STARTS), paper))
    text.append(
        f"ELBO of the first {WATCHED:,} validation digits: at the end of the run, at its best, and where `fit` would "
        f"stop with a patience of {PATIENCE} reports. Means over seeds, steps of each seed:"
    )
    text.append(_early_stopping(figures))
    return "\n\n".join(text)


def _early_stopping(figures: tables.Figures) -> str:
    """A row for each cell: the ELBO on watched digits at the end, at its best, and at the stop."""
    head = ("method", "start", "end", "best", "at step", "at the stop", "at step")
    cells = ((name, start, seeds) for name, starts in figures.items() for start, seeds in sorted(starts.items()))
    rows = ((name, start, *_stopping([seed["curves"] for seed in seeds])) for name, start, seeds in cells)
    return tables.markdown(head, rows, rule=" --- ")


def _stopping(curves: list[dict[str, list[float]]]) -> tuple[str, ...]:
    def elbo(reports: list[int]) -> str:
        values = [curve["validation_elbo"][i] for curve, i in zip(curves, reports, strict=True)]
        return tables.number(float(np.mean(values)))

    def steps(reports: list[int]) -> str:
        return ", ".join(f"{curve['step'][i]:,.0f}" for curve, i in zip(curves, reports, strict=True))

    best = [int(np.nanargmax(curve["validation_elbo"])) for curve in curves]
    stop = [_stop(curve) for curve in curves]
    return elbo([-1] * len(curves)), elbo(best), steps(best), elbo(stop), steps(stop)


def _stop(curves: dict[str, list[float]]) -> int:
    """The report after which `fit` would stop; the last one if it would not."""
    progress = Progress(np.empty(0))
    for i, elbo in enumerate(curves["validation_elbo"]):
        progress.validate(elbo, held=steers({name: curve[i] for name, curve in curves.items()}))
        if progress.waited == PATIENCE:
            return i
    return len(curves["step"]) - 1
