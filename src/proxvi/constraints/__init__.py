"""The proximity constraint and its references."""

from proxvi.constraints.proximity_constraint import (
    ConstraintState,
    Proximity,
    ProximityStep,
    Telemetry,
    add,
    as_constraints,
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
    "as_constraints",
    "parameter_average",
    "share_of_gradient",
    "statistic_average",
]
