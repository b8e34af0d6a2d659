"""What a finished run says aloud about its constraints."""

import warnings
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from proxvi.constraints import LOSSES_OF_UNIT, Proximity, SpeedLimit
from proxvi.constraints.limit import END
from proxvi.transforms import ProximityState

# A constraint with more than this in its telemetry steers: a share of the gradient, or, of a speed limit, a change of
# the update. A small one counts, too: made in most steps, it keeps up what the loss pulls down only weakly.
STEERS = {"share": 0.01, "pull": 0.0}
LITTLE = 0.1  # of a run, after the constraint let go
SMALL_UNIT = 1e-3  # of what the loss fell in the run; the losses that make up the unit then lie about 0 by chance


def steers(telemetry: Mapping[str, object]) -> bool:
    """Whether a constraint, or one of several, steers, by what its `Telemetry` or `LimitTelemetry` says."""
    return any(bool(np.any(np.asarray(telemetry.get(name, 0.0)) > bound)) for name, bound in STEERS.items())


def warn_after_run(
    constraints: Sequence[Proximity | SpeedLimit],
    states: Sequence[ProximityState],
    losses: np.ndarray,
    *,
    start: int = 0,
    ended_itself: bool = False,
) -> None:
    """Warn if a constraint still steers, let go too late, or never had any strength.

    Args:
        constraints: of the inference.
        states: theirs, after the run.
        losses: of all steps of the run.
        start: how many steps the constraints had seen before.
        ended_itself: the run took fewer steps than it was given. `fit` ends one only once no constraint holds.
    """
    for constraint, kept in zip(constraints, states, strict=True):
        if isinstance(constraint, SpeedLimit):
            if not ended_itself:
                _warn_if_limited(constraint, kept)
        else:
            _warn_if_held(constraint, kept)
            _warn_if_little_was_left(constraint, kept, start)
            _warn_if_unit_is_small(constraint, kept, losses)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)  # where `run` or `fit` was called


def _name(constraint: Proximity) -> str:
    return getattr(constraint.statistic, "__name__", "statistic")


def _warn_if_limited(constraint: SpeedLimit, kept: ProximityState) -> None:
    limit = jax.device_get(kept.constraint)
    if not constraint.is_off and limit.active > 0 and limit.step < END * limit.over:
        _warn(
            f"{constraint!r} has changed {100 * limit.active / limit.step:.2g}% of the updates, and has not ended, so "
            f"this may not be an optimum of the ELBO yet. A limit ends after 2 `over` steps: make `over` less than "
            "half of the run."
        )


def _warn_if_held(constraint: Proximity, kept: ProximityState) -> None:
    """Warn if the constraint, when its share was last measured, made up more than 1% of the gradient."""
    report = jax.device_get(kept.telemetry)
    # At an optimum both gradients vanish, and their ratio says nothing once the magnitude is next to nothing.
    if steers(report._asdict()) and not constraint.has_let_go(report.magnitude, kept.constraint):
        _warn(
            f"the constraint on `{_name(constraint)}` still makes up {100 * report.share:.0f}% of the gradient at the "
            f"end, at magnitude {report.magnitude:.2g}: this is not yet an optimum of the ELBO. Let `magnitude` "
            "decay to nothing within the run, as `optax.exponential_decay(1.0, num_steps, 1e-10)` does."
        )


def _warn_if_little_was_left(constraint: Proximity, kept: ProximityState, start: int) -> None:
    """Warn if the constraint let go so late that the rest of the run was too short to climb the ELBO alone."""
    num_steps = int(kept.constraint.step) - start  # a step that is skipped is none of the constraint's
    left = None if constraint.is_off else constraint.steps_after_release(start, num_steps)
    if left is not None and left < LITTLE * num_steps:
        _warn(
            f"the magnitude of the constraint on `{_name(constraint)}` let go {left} steps before the end of "
            f"{num_steps}: little of the run is left to climb the ELBO alone, and the optimiser may still remember the "
            "constraint's gradients. Run longer, let `magnitude` decay faster, or lower Adam's `b2`."
        )


def _warn_if_unit_is_small(constraint: Proximity, kept: ProximityState, losses: np.ndarray) -> None:
    """Warn if the first losses, the unit of `magnitude`, were next to nothing beside what the loss then fell."""
    parts = losses[:LOSSES_OF_UNIT], losses[-max(1, len(losses) // 10) :]
    first, last = (part[np.isfinite(part)] for part in parts)
    if not constraint.relative or constraint.is_off or not first.size or not last.size:
        return
    unit, fall = float(kept.constraint.unit), float(first.mean() - last.mean())
    if unit < SMALL_UNIT * fall:
        _warn(
            f"the unit of `magnitude`, the mean size of the first losses, is {unit:.2g}, but the loss has fallen by "
            f"{fall:.2g}: the constraint on `{_name(constraint)}` had next to no strength. Give `magnitude` in "
            "nats, with `relative=False`."
        )
