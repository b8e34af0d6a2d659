"""What is kept close to its past, to what, and how hard."""

from proxvi.constraints.proximity_constraint import (
    SHARE_EVERY,
    ConstraintState,
    Proximity,
    Telemetry,
    add,
    share,
)
from proxvi.constraints.references import Reference, parameter_average, statistic_average

__all__ = [
    "SHARE_EVERY",
    "ConstraintState",
    "Proximity",
    "Reference",
    "Telemetry",
    "add",
    "parameter_average",
    "share",
    "statistic_average",
]
