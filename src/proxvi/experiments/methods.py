"""What the tables' methods have in common."""

from collections.abc import Callable
from typing import Any

import optax

import proxvi
from proxvi.experiments.trials import Trial

__all__ = ["falls", "held"]


def falls(trial: Trial) -> optax.Schedule:
    """From 1 to γ over the run, as a power of the step: the paper's schedule."""
    return optax.exponential_decay(1.0, trial.steps, trial.gamma)


def held(statistic: Callable[..., Any], trial: Trial) -> proxvi.Proximity:
    """The constraint of the paper's experiments: relative to the first ELBO, close to the statistic's own average."""
    return proxvi.Proximity(statistic, magnitude=falls(trial), reference=proxvi.statistic_average(trial.decay))
