"""Proximity variational inference: variational inference that depends less on where it starts."""

from importlib.metadata import version as _version

from proxvi.checkpoints import ConfigurationError
from proxvi.constraint import Proximity, Telemetry
from proxvi.distances import inverse_huber, kl, squared
from proxvi.estimators import LeaveOneOutELBO, VimcoELBO
from proxvi.evaluation import evaluate
from proxvi.inner_loop import proximity_inner_loop
from proxvi.references import Reference, parameter_average, statistic_average
from proxvi.starts import multistart
from proxvi.statistics import entropy, identity, kl_to_prior, mean_variance, orthogonal
from proxvi.svi import ProximitySVI
from proxvi.tempered import AnnealedELBO, WarmUpELBO
from proxvi.training import fit
from proxvi.transform import proximity, telemetry

__version__ = _version("proxvi")

__all__ = [
    "AnnealedELBO",
    "ConfigurationError",
    "LeaveOneOutELBO",
    "Proximity",
    "ProximitySVI",
    "Reference",
    "Telemetry",
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
