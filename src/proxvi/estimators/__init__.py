"""ELBOs that NumPyro lacks."""

from proxvi.estimators.annealing import AnnealedELBO, TemperedELBO, WarmUpELBO
from proxvi.estimators.score_function import LeaveOneOutELBO, MultiParticleELBO, OrderedTraceELBO, VimcoELBO

__all__ = [
    "AnnealedELBO",
    "LeaveOneOutELBO",
    "MultiParticleELBO",
    "OrderedTraceELBO",
    "TemperedELBO",
    "VimcoELBO",
    "WarmUpELBO",
]
