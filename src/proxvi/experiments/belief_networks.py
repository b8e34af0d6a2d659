"""Tables 1 and 2: sigmoid belief networks on binarised MNIST, by every method from a good and a bad start."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import proxvi
from proxvi import plots
from proxvi._validation import check_known, check_number
from proxvi.datasets import BinarizedMNIST
from proxvi.experiments import results, tables
from proxvi.experiments.methods import falls, held
from proxvi.experiments.sweeps import Options
from proxvi.experiments.trials import active_units, approximation, decode
from proxvi.models.sbn import BAD, GOOD, belief_network

__all__ = ["METHODS", "STEPS", "Grid", "Trial", "report", "reproduce_table_1", "reproduce_table_2"]

STEPS = 4_000_000  # the paper's
STARTS = {"good": GOOD, "bad": BAD}


@dataclass(frozen=True)
class Trial:
    """One cell of a table.

    Args:
        method: one of `METHODS`.
        start: "good" or "bad".
        units: in each layer, from the data up.
        steps: of Adam; the decay of the magnitude or temperature is spread over them.
        gamma: the factor by which that falls.
        decay: of the moving average.
        learning_rate: of Adam.
        batch_size: digits in a batch.
        particles: samples of each digit's latent variables for a gradient.
        seed: of everything.
    """

    method: str
    start: str
    units: tuple[int, ...] = (200,)
    steps: int = STEPS
    gamma: float = 1e-10
    decay: float = 0.9999
    learning_rate: float = 1e-3
    batch_size: int = 20
    particles: int = 5
    seed: int = 0

    @property
    def name(self) -> str:
        """What its files are called."""
        return results.name(f"{self.method} {self.start} {len(self.units)} layers", asdict(self))

    def svi(self, digits: BinarizedMNIST) -> proxvi.ProximitySVI:
        """What is trained."""
        network = belief_network(digits.train.mean(0), units=self.units, start=STARTS[self.start])
        estimator, constraints = METHODS[self.method](self)
        optimizer = optax.adam(self.learning_rate, eps=1e-6)  # the authors' ε
        return proxvi.ProximitySVI(*network, optimizer, estimator, constraints)

    def measure(self, svi: Any, params: dict[str, Any], digits: np.ndarray) -> dict[str, Any]:
        """Entropy of the first layer, in nats of a digit: whether the approximation is alive."""
        return {"entropy": jnp.mean(proxvi.entropy(approximation(svi, params, digits, "z1"), total=True))}

    def describe(self, svi: Any, params: dict[str, Any], digits: np.ndarray) -> dict[str, Any]:
        """How many units of the first layer are alive: their probabilities vary from digit to digit."""
        return {"active_units": active_units(approximation(svi, params, digits, "z1").mean)}


METHODS: dict[str, Callable[[Trial], tuple[Any, Any]]] = {
    "VI": lambda trial: (proxvi.LeaveOneOutELBO(trial.particles), ()),
    "annealing": lambda trial: (proxvi.AnnealedELBO(proxvi.LeaveOneOutELBO(trial.particles), falls(trial)), ()),
    "PVI, entropy": lambda trial: (proxvi.LeaveOneOutELBO(trial.particles), held(proxvi.entropy, trial)),
    "PVI, mean/variance": lambda trial: (proxvi.LeaveOneOutELBO(trial.particles), held(proxvi.mean_variance, trial)),
    "PVI, KL": lambda trial: (proxvi.LeaveOneOutELBO(trial.particles), held(proxvi.kl_to_prior, trial)),
}
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


@dataclass(frozen=True)
class Grid:
    """Which trials; every combination of them.

    Args:
        scale: share of the paper's 4 million steps; the decay of the magnitude is spread over them.
        methods: which of `METHODS`.
        starts: "bad", "good".
        gammas: factors by which the magnitude, or the temperature of annealing, falls over a run.
        seeds: of everything in a trial.
    """

    scale: float = 1.0
    methods: tuple[str, ...] = tuple(METHODS)
    starts: tuple[str, ...] = tuple(STARTS)
    gammas: tuple[float, ...] = (1e-10,)
    seeds: tuple[int, ...] = (0,)

    def trials(self, units: tuple[int, ...]) -> list[Trial]:
        """All combinations; the decay means nothing to VI, which runs once."""
        check_number("scale", self.scale, above=0.0, remedy="1 is the paper's 4 million steps")
        for gamma in self.gammas:
            remedy = "1e-10 lets the constraint go, 1 never does"
            check_number("gammas", gamma, above=0.0, below=1.0, remedy=remedy)
        check_known("methods", self.methods, METHODS)
        check_known("starts", self.starts, STARTS)
        steps = max(1, round(self.scale * STEPS))
        trials = (
            Trial(method, start, units, steps, gamma=1e-10 if method == "VI" else gamma, seed=seed)
            for seed, gamma, start, method in product(self.seeds, self.gammas, self.starts, self.methods)
        )
        return list(dict.fromkeys(trials))


def reproduce_table_1(grid: Grid = Grid(), how: Options = Options()) -> str:  # noqa: B008, both are frozen
    """Sigmoid belief networks of one layer on binarised MNIST, by every method from a good and a bad start.

    A trial takes about 3 hours of one core at full scale. Each writes a result file; what is there already is not run
    again, and what was interrupted goes on from its checkpoint. The table and plots are of all result files in the
    folder.
    """
    return _reproduce("table-1", (200,), grid, how)


def reproduce_table_2(grid: Grid = Grid(), how: Options = Options()) -> str:  # noqa: B008
    """Sigmoid belief networks of three layers, as in table 1.

    A trial takes about 7 hours of one core at full scale.
    """
    return _reproduce("table-2", (200, 200, 200), grid, how)


def _reproduce(name: str, units: tuple[int, ...], grid: Grid, how: Options) -> str:
    how.run(name, grid.trials(units))
    return report(how.results / name)


def report(folder: Path) -> str:
    """The table and the plots of the result files in a folder."""
    records = tables.records(folder)
    if not records:
        return f"no result files in {folder}"
    order = list(METHODS)
    records.sort(key=lambda r: (order.index(r["settings"]["method"]), -r["settings"]["steps"], -r["settings"]["gamma"]))
    figures = tables.grouped(records, lambda settings: settings["method"], lambda settings: settings["start"])
    common = tables.usual(records)
    caption = (
        f"Validation ELBO / log likelihood in nats; units in each layer: {', '.join(map(str, common['units']))}; "
        f"{common['steps']:,} steps ({common['steps'] / STEPS:g} of the paper's), γ {common['gamma']:g}, "
        f"{common['digits']:,} digits, {common['samples']:,} samples"
    )
    text = f"{caption}\n\n{tables.table(figures, sorted(STARTS), PAPER.get(len(common['units']), {}))}"
    (folder / "table.md").write_text(text + "\n")
    layer = "" if len(common["units"]) == 1 else ", first layer"
    plots.curves(figures, folder / "curves.png", entropy=f"entropy of q{layer}")
    drawn = {
        f"{method}, {start} start": np.array([decode(image) for image in seeds[0]["samples"][:12]])
        for method, cells in figures.items()
        for start, seeds in sorted(cells.items())
    }
    plots.digits(drawn, folder / "samples.png")
    return text
