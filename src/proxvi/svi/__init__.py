"""Door 2: constraints in NumPyro's SVI."""

from proxvi.svi.proximity_svi import ACTIVE, ProximitySVI, ProximitySVIState, Skipped, stays_finite

__all__ = ["ACTIVE", "ProximitySVI", "ProximitySVIState", "Skipped", "stays_finite"]
