"""Door 1: constraints in any Optax loop."""

from proxvi.transforms.chain_link import ProximityState, proximity, telemetry
from proxvi.transforms.inner_loop import InnerLoopState, proximity_inner_loop

__all__ = ["InnerLoopState", "ProximityState", "proximity", "proximity_inner_loop", "telemetry"]
