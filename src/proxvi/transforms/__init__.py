"""Door 1: constraints in any Optax loop."""

from proxvi.transforms.inner_loop import InnerLoopState, proximity_inner_loop
from proxvi.transforms.link import ProximityState, proximity, telemetry

__all__ = ["InnerLoopState", "ProximityState", "proximity", "proximity_inner_loop", "telemetry"]
