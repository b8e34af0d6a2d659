"""The constraints: the paper's with its references, and the speed limit."""

from proxvi.constraints.limit import LimitState, LimitTelemetry, SpeedLimit
from proxvi.constraints.proximity_constraint import (
    LOSSES_OF_UNIT,
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
    "LOSSES_OF_UNIT",
    "ConstraintState",
    "LimitState",
    "LimitTelemetry",
    "Proximity",
    "ProximityStep",
    "Reference",
    "SpeedLimit",
    "Telemetry",
    "add",
    "as_constraints",
    "parameter_average",
    "share_of_gradient",
    "statistic_average",
]
