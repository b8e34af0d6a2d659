"""Constraints in any Optax loop."""

from proxvi.transforms.constrained import ConstrainedState, ProximityState, proximity, telemetry
from proxvi.transforms.inner_loop import InnerLoopState, proximity_inner_loop
from proxvi.transforms.limited import speed_limit

__all__ = [
    "ConstrainedState",
    "InnerLoopState",
    "ProximityState",
    "proximity",
    "proximity_inner_loop",
    "speed_limit",
    "telemetry",
]
