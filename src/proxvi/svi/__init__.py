"""Constraints in NumPyro's SVI."""

from proxvi.svi._nonfinite import Skipped, guarded_update, raise_if_stopped, stays_finite
from proxvi.svi._run_warnings import ACTIVE, warn_after_run
from proxvi.svi.proximity_svi import (
    ProximitySVI,
    ProximitySVIState,
    unweighted_sites,
    with_loss,
    with_params,
)

__all__ = [
    "ACTIVE",
    "ProximitySVI",
    "ProximitySVIState",
    "Skipped",
    "guarded_update",
    "raise_if_stopped",
    "stays_finite",
    "unweighted_sites",
    "warn_after_run",
    "with_loss",
    "with_params",
]
