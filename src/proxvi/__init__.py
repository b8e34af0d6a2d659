"""Proximity variational inference: variational inference that depends less on where it starts."""

from importlib.metadata import version as _version

from proxvi.constraints import (
    LimitTelemetry,
    Proximity,
    Reference,
    SpeedLimit,
    Telemetry,
    parameter_average,
    statistic_average,
)
from proxvi.distances import inverse_huber, kl, squared
from proxvi.estimators import AnnealedELBO, LeaveOneOutELBO, VimcoELBO, WarmUpELBO
from proxvi.evaluation import evaluate
from proxvi.starts import Luck, Race, luck, race
from proxvi.statistics import entropy, identity, kl_to_prior, mean_variance, orthogonal
from proxvi.svi import ProximitySVI
from proxvi.training import Checkpointing, ConfigurationError, Reporting, Validation, fit
from proxvi.transforms import proximity, proximity_inner_loop, speed_limit, telemetry

__version__ = _version("proxvi")

__all__ = [
    "AnnealedELBO",
    "Checkpointing",
    "ConfigurationError",
    "LeaveOneOutELBO",
    "LimitTelemetry",
    "Luck",
    "Proximity",
    "ProximitySVI",
    "Race",
    "Reference",
    "Reporting",
    "SpeedLimit",
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
    "luck",
    "mean_variance",
    "orthogonal",
    "parameter_average",
    "proximity",
    "proximity_inner_loop",
    "race",
    "speed_limit",
    "squared",
    "statistic_average",
    "telemetry",
]
