"""ELBOs that NumPyro lacks."""

from proxvi.estimators.annealing import AnnealedELBO, ScheduledELBO, WarmUpELBO, as_scheduled, with_elbo
from proxvi.estimators.score_function import (
    LeaveOneOutELBO,
    MultiParticleELBO,
    OrderedTraceELBO,
    VimcoELBO,
    scores_of_parents,
)

__all__ = [
    "AnnealedELBO",
    "LeaveOneOutELBO",
    "MultiParticleELBO",
    "OrderedTraceELBO",
    "ScheduledELBO",
    "VimcoELBO",
    "WarmUpELBO",
    "as_scheduled",
    "scores_of_parents",
    "with_elbo",
]
