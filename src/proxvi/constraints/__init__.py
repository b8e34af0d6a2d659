"""What is kept close to its past, to what, and how hard."""

from proxvi.constraints.proximity_constraint import (
    ConstraintState,
    Proximity,
    ProximityStep,
    Telemetry,
    add,
    share_of_gradient,
)
from proxvi.constraints.references import Reference, parameter_average, statistic_average

__all__ = [
    "ConstraintState",
    "Proximity",
    "ProximityStep",
    "Reference",
    "Telemetry",
    "add",
    "parameter_average",
    "share_of_gradient",
    "statistic_average",
]
