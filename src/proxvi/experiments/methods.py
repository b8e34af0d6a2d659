"""What the tables' methods have in common."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import optax

import proxvi

__all__ = ["Decaying", "falls", "held"]


@runtime_checkable
class Decaying(Protocol):
    """Settings of a magnitude that falls, and of the average that it holds on to."""

    @property
    def steps(self) -> int:
        """Of the optimiser; the fall is spread over them."""
        ...

    @property
    def gamma(self) -> float:
        """The factor by which it falls."""
        ...

    @property
    def decay(self) -> float:
        """Of the moving average."""
        ...


def falls(trial: Decaying) -> optax.Schedule:
    """From 1 to γ over the run, as a power of the step: the paper's schedule."""
    return optax.exponential_decay(1.0, trial.steps, trial.gamma)


def held(statistic: Callable[..., Any], trial: Decaying) -> proxvi.Proximity:
    """The constraint of the paper's experiments: relative to the first ELBO, close to the statistic's own average."""
    return proxvi.Proximity(statistic, magnitude=falls(trial), reference=proxvi.statistic_average(trial.decay))
