"""What the tables' methods have in common."""

from collections.abc import Callable, Iterable
from typing import Any

import optax

import proxvi
from proxvi.experiments.trials import Trial

__all__ = ["check_known", "falls", "held"]


def falls(trial: Trial) -> optax.Schedule:
    """From 1 to γ over the run, as a power of the step: the paper's schedule."""
    return optax.exponential_decay(1.0, trial.steps, trial.gamma)


def held(statistic: Callable[..., Any], trial: Trial) -> proxvi.Proximity:
    """The constraint of the paper's experiments: relative to the first ELBO, close to the statistic's own average."""
    return proxvi.Proximity(statistic, magnitude=falls(trial), reference=proxvi.statistic_average(trial.decay))


def check_known(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that a table does not have."""
    if unknown := set(given) - set(known):
        raise ValueError(f"`{name}` must be of {list(known)}, got {sorted(unknown)}; mind the case.")
