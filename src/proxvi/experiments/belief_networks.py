"""Tables 1 and 2: sigmoid belief networks on binarised MNIST, by every method from a good and a bad start."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import optax
from numpyro.infer.svi import SVIRunResult

import proxvi
from proxvi.datasets import binarized_mnist
from proxvi.experiments import results
from proxvi.models.sbn import BAD, GOOD, belief_network

__all__ = ["METHODS", "STEPS", "Trial", "train"]

STEPS = 4_000_000  # the paper's
REPORTS = 200
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


def _constrained(statistic: Callable[..., Any]) -> Callable[[Trial], tuple[Any, Any]]:
    def method(trial: Trial) -> tuple[Any, Any]:
        return proxvi.LeaveOneOutELBO(trial.particles), proxvi.Proximity(
            statistic, magnitude=_falls(trial), reference=proxvi.statistic_average(trial.decay)
        )

    return method


def _falls(trial: Trial) -> optax.Schedule:
    return optax.exponential_decay(1.0, trial.steps, trial.gamma)


METHODS: dict[str, Callable[[Trial], tuple[Any, Any]]] = {
    "VI": lambda trial: (proxvi.LeaveOneOutELBO(trial.particles), ()),
    "annealing": lambda trial: (proxvi.AnnealedELBO(proxvi.LeaveOneOutELBO(trial.particles), _falls(trial)), ()),
    "PVI, entropy": _constrained(proxvi.entropy),
    "PVI, mean/variance": _constrained(proxvi.mean_variance),
    "PVI, KL": _constrained(proxvi.kl_to_prior),
}


def train(trial: Trial, folder: Path, *, progress: bool | None = None) -> SVIRunResult:
    """Train one network; resumes from its checkpoint if there is one.

    Args:
        trial: what to train.
        folder: checkpoints and metrics go to a folder of the trial's name in it.
        progress: as for `fit`.
    """
    digits = binarized_mnist()
    network = belief_network(digits.train.mean(0), units=trial.units, start=STARTS[trial.start])
    estimator, constraints = METHODS[trial.method](trial)
    optimizer = optax.adam(trial.learning_rate, eps=1e-6)  # the authors' ε
    svi = proxvi.ProximitySVI(*network, optimizer, estimator, constraints)
    held_out = digits.valid[:1_000]

    @jax.jit
    def entropy(params: dict[str, Any]) -> dict[str, Any]:
        """Of the first layer, in nats of a digit: whether the approximation is alive."""
        seeded = numpyro.handlers.seed(numpyro.handlers.substitute(network.guide, params), jax.random.key(0))
        trace = numpyro.handlers.trace(seeded).get_trace(held_out)
        return {"entropy": jnp.mean(proxvi.entropy(trace["z1"]["fn"], total=True))}

    return proxvi.fit(
        svi,
        jax.random.key(trial.seed),
        trial.steps,
        digits.train,
        batch_size=trial.batch_size,
        report_every=max(1, trial.steps // REPORTS),
        progress=progress,
        measure=entropy,
        metrics_file=folder / trial.name / "metrics.jsonl",
        checkpoints=folder / trial.name / "checkpoints",
        keep=1,
        configuration=asdict(trial),
        validation=held_out,
    )
