"""Proximity variational inference: variational inference that depends less on where it starts."""

from importlib.metadata import version as _version

from proxvi.constraints import Proximity, Reference, Telemetry, parameter_average, statistic_average
from proxvi.distances import inverse_huber, kl, squared
from proxvi.estimators import AnnealedELBO, LeaveOneOutELBO, VimcoELBO, WarmUpELBO
from proxvi.evaluation import evaluate
from proxvi.starts import multistart
from proxvi.statistics import entropy, identity, kl_to_prior, mean_variance, orthogonal
from proxvi.svi import ProximitySVI
from proxvi.training import Checkpointing, ConfigurationError, Reporting, Validation, fit
from proxvi.transforms import proximity, proximity_inner_loop, telemetry

__version__ = _version("proxvi")

__all__ = [
    "AnnealedELBO",
    "Checkpointing",
    "ConfigurationError",
    "LeaveOneOutELBO",
    "Proximity",
    "ProximitySVI",
    "Reference",
    "Reporting",
    "Telemetry",
    "Validation",
    "VimcoELBO",
    "WarmUpELBO",
    "entropy",
    "evaluate",
    "fit",
    "identity",
    "inverse_huber",
    "kl",
    "kl_to_prior",
    "mean_variance",
    "multistart",
    "orthogonal",
    "parameter_average",
    "proximity",
    "proximity_inner_loop",
    "squared",
    "statistic_average",
    "telemetry",
]
