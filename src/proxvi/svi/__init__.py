"""Constraints in NumPyro's SVI."""

from proxvi.svi._nonfinite import Skipped, guarded_update, is_finite, raise_if_stopped, stays_finite
from proxvi.svi._run_warnings import steers, warn_after_run
from proxvi.svi.proximity_svi import (
    ProximitySVI,
    ProximitySVIState,
    batch_sites,
    check_statistics_of_batches,
    with_limits_of,
    with_loss,
    with_params,
)

__all__ = [
    "ProximitySVI",
    "ProximitySVIState",
    "Skipped",
    "batch_sites",
    "check_statistics_of_batches",
    "guarded_update",
    "is_finite",
    "raise_if_stopped",
    "stays_finite",
    "steers",
    "warn_after_run",
    "with_limits_of",
    "with_loss",
    "with_params",
]
