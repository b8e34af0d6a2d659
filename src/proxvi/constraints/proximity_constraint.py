"""The paper's constraint: its definition, and one step of it, for `proximity` and `ProximitySVI`."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from proxvi._typing import Distance, Float, Int, ParamTree, Scalar, Statistic, Tree
from proxvi._validation import check_number, first_value
from proxvi.constraints._inner_product import inner_product
from proxvi.constraints.references import Reference, parameter_average
from proxvi.distances import inverse_huber

__all__ = ["ConstraintState", "Proximity", "ProximityStep", "Telemetry"]

LOSSES_OF_UNIT = 10
LET_GO = 1e-6  # a magnitude of less than this part of its unit, or of its first value, holds nothing


class Telemetry(NamedTuple):
    """What a constraint did at the latest step. It is for people: no later step reads it.

    Attributes:
        distance: `d(f(λ̃), f(λ_t))`.
        magnitude: `k_t`.
        share: the constraint's share of the gradient, `‖k ∇d‖ / (‖∇(−ELBO)‖ + ‖k ∇d‖)`, in [0, 1]. Measuring it takes
            two more passes over the parameters. So `proximity` measures it at every 16th step, from the second on, and
            `ProximitySVI` at the end of `run` and in `measure_share`. NaN means not measured yet.

    Example:
        >>> Telemetry(distance=0.5, magnitude=2.0, share=0.1).share
        0.1
    """

    distance: Float[Array, "*starts"] | float
    magnitude: Float[Array, "*starts"] | float
    share: Float[Array, "*starts"] | float

    @classmethod
    def unmeasured(cls) -> "Telemetry":
        """Before the first step."""
        return cls(jnp.zeros(()), jnp.zeros(()), jnp.full((), jnp.nan))


class ConstraintState(NamedTuple):
    """What the next step of a constraint cannot recompute.

    Attributes:
        step: how many were taken.
        unit: mean size of the first losses, those that are not finite or 0 left out; 0 until there is one.
        losses: how many it is the mean of, `LOSSES_OF_UNIT` in the end.
        reference: state of the reference.
    """

    step: Array
    unit: Array
    losses: Array
    reference: Tree


class ProximityStep(NamedTuple):
    """What a constraint adds to one step.

    Attributes:
        distance: `d(f(λ̃_t), f(λ_t))`, differentiable in `f(λ_t)`.
        magnitude: `k_t`, never negative.
        state: for the next step.
    """

    distance: Scalar
    magnitude: Scalar
    state: ConstraintState


@dataclass(frozen=True)
class Proximity:
    """The paper's constraint: a statistic of the approximation stays close to its past.

        objective at step t:   −ELBO(λ) + k_t · d(f(λ̃_t), f(λ))

    Attributes:
        statistic: `f`, a function whose value is kept close.
        magnitude: `k`, a number or an Optax schedule of the step. `optax.exponential_decay(1.0, T, 1e-10)` is the
            paper's `γ^{t/T}` with `γ = 1e-10`. A constant never lets go, so the result is
            not an optimum of the ELBO.
        distance: `d`, a function of the reference's statistic and the current one.
        reference: `λ̃`, a moving average of the parameters or of the statistic.
        relative: whether `magnitude` is in units of the first loss, `|ELBO_0|`, as in the paper. It is the mean size of
            the first ten, because one loss of one batch is noisy. It still depends on the units of the data and on
            constants in the loss: give `magnitude` in nats and False where that matters.

    Example:
        >>> import optax, proxvi
        >>> constraint = Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, 10_000, 1e-10))
        >>> constraint.distance.__name__
        'inverse_huber'
    """

    statistic: Statistic
    _: KW_ONLY
    magnitude: optax.ScalarOrSchedule
    distance: Distance = inverse_huber
    reference: Reference = field(default_factory=parameter_average)
    relative: bool = True

    def __post_init__(self) -> None:
        for name, remedy in (("statistic", "entropy"), ("distance", "inverse_huber")):
            if not callable(getattr(self, name)):
                raise TypeError(
                    f"`{name}` must be a function, got {getattr(self, name)!r}; pass for example `proxvi.{remedy}`, "
                    "without calling it."
                )
        if not isinstance(self.reference, Reference):
            raise TypeError(
                f"`reference` must be a Reference, got {self.reference!r}; call `parameter_average()` or "
                "`statistic_average()`."
            )
        if not isinstance(self.relative, bool):
            raise TypeError(
                f"`relative` must be True or False, got {self.relative!r}; True measures `magnitude` in units of "
                "the first loss."
            )
        first = first_value("magnitude", self.magnitude)
        kind, remedy = "number, or an Optax schedule of numbers, finite and", "0 switches the constraint off"
        check_number("magnitude", first, at_least=0.0, kind=kind, remedy=remedy)

    @property
    def is_off(self) -> bool:
        """Whether the magnitude is the number 0: then `ProximitySVI` leaves the constraint out of the program."""
        return isinstance(self.magnitude, int | float) and self.magnitude == 0

    def has_let_go(self, magnitude: Array | np.ndarray | float, state: ConstraintState) -> bool:
        """Whether a magnitude `k_t` is too small to hold anything."""
        first = float(state.unit) if self.relative else self._first_magnitude
        return bool(magnitude <= LET_GO * first)

    def steps_after_release(self, start: int, num_steps: int) -> int | None:
        """How many of the steps from `start` on are left once a schedule has let go; None if it never does."""
        if not callable(self.magnitude):
            return None
        steps = np.unique(np.linspace(start, start + num_steps, 101).astype(int))
        magnitudes = np.asarray(jax.vmap(self.magnitude)(jnp.asarray(steps)))
        held = steps[magnitudes > LET_GO * self._first_magnitude]
        end = start + num_steps
        return None if held.size and held[-1] == end else end - int(max(held, default=start))

    @property
    def _first_magnitude(self) -> float:
        return np.asarray(first_value("magnitude", self.magnitude)).item()

    def init(self, params: ParamTree, describe: Callable[[], Tree]) -> ConstraintState:
        """The state before the first step; `describe()` gives the shapes and dtypes of the statistic."""
        return ConstraintState(
            step=jnp.zeros((), jnp.int32),
            unit=jnp.zeros(()),
            losses=jnp.zeros((), jnp.int32),
            reference=self.reference.init(params, describe),
        )

    def step(
        self,
        state: ConstraintState,
        params: ParamTree,
        value: Tree,
        statistic: Callable[[ParamTree], Tree],
        loss: Scalar | None = None,
    ) -> ProximityStep:
        """One step of the constraint.

        Args:
            state: from `init`, or from the step before.
            params: `λ_t`.
            value: `f(λ_t)`, through which the distance is differentiable.
            statistic: `f`, for references that evaluate it elsewhere.
            loss: `−ELBO(λ_t)`, the unit of a relative magnitude if it is the first.
        """
        target, magnitude, after = self.advance(state, params, value, statistic, loss)
        return ProximityStep(self.distance_to(target, value), magnitude, after)

    def advance(
        self,
        state: ConstraintState,
        params: ParamTree,
        value: Tree,
        statistic: Callable[[ParamTree], Tree],
        loss: Scalar | None = None,
        *,
        read_first: bool | None = None,
    ) -> tuple[Tree, Scalar, ConstraintState]:
        """`f(λ̃_t)`, `k_t` and the next state: a step without its distance. `read_first` overrides the reference's."""
        magnitude, unit, losses = self._effective_magnitude(state, loss)
        target, reference = self.reference.advance(
            state.reference,
            *jax.lax.stop_gradient((params, value)),
            state.step,
            statistic,
            read_first=self.reference.read_first if read_first is None else read_first,
        )
        step = jnp.asarray(optax.safe_increment(state.step))
        return target, magnitude, ConstraintState(step, unit, losses, reference)

    def _effective_magnitude(
        self, state: ConstraintState, loss: Scalar | None
    ) -> tuple[Scalar, Scalar, Int[Array, ""]]:
        """`k_t`, its unit with this loss in it, and of how many losses that is the mean."""
        magnitude = self.magnitude(state.step) if callable(self.magnitude) else self.magnitude
        magnitude = jnp.maximum(jnp.asarray(magnitude, state.unit.dtype), 0.0)
        if not self.relative:
            return magnitude, state.unit, state.losses
        size = jnp.abs(jnp.asarray(jax.lax.stop_gradient(loss), state.unit.dtype))
        counts = (state.losses < LOSSES_OF_UNIT) & jnp.isfinite(size) & (size != 0.0)
        losses = state.losses + counts.astype(state.losses.dtype)
        unit = jnp.where(counts, state.unit + (size - state.unit) / losses, state.unit)
        return magnitude * unit, unit, losses

    def distance_to(self, target: Tree, value: Tree) -> Scalar:
        """The distance from `target` = `f(λ̃)`, which carries no gradient, to `value` = `f(λ)`."""
        distance = self.distance(jax.lax.stop_gradient(target), value)
        if jnp.shape(distance) != () or not jnp.issubdtype(jnp.result_type(distance), jnp.floating):
            raise ValueError(
                f"`distance` must return a real scalar, got shape {jnp.shape(distance)} and dtype "
                f"{jnp.result_type(distance)}; sum over the entries of the statistic."
            )
        return jnp.asarray(distance, jnp.result_type(float))


def as_constraints(
    constraint: Any,
    kinds: tuple[type, ...] = (Proximity,),
    expected: str = "a Proximity or a sequence of them",
    remedy: str = "`Proximity(proxvi.entropy, magnitude=...)`",
) -> tuple[Any, ...]:
    """One constraint of these kinds, or several, as a tuple."""
    constraints = (constraint,) if isinstance(constraint, kinds) else constraint
    if not isinstance(constraints, Sequence) or not all(isinstance(c, kinds) for c in constraints):
        raise TypeError(f"`constraint` must be {expected}, got {constraint!r}; write {remedy}.")
    return tuple(constraints)


def add(gradient: ParamTree, magnitude: Scalar, slope: ParamTree) -> ParamTree:
    """`g + k ∇d`; with `k = 0` it is `g` to the last bit, whatever `∇d` holds."""
    return jax.tree.map(
        lambda g, c: jnp.where(magnitude == 0.0, g, (g + magnitude * c).astype(g.dtype)), gradient, slope
    )


def share_of_gradient(gradient: ParamTree, magnitude: Scalar, slope: ParamTree) -> Scalar:
    """`‖k ∇d‖ / (‖g‖ + ‖k ∇d‖)`, and 0 where both vanish."""
    ours, theirs = magnitude * jnp.sqrt(inner_product(slope, slope)), jnp.sqrt(inner_product(gradient, gradient))
    total = ours + theirs
    return jnp.where(total == 0.0, 0.0, ours / jnp.where(total == 0.0, 1.0, total))
