"""The proximity constraint: its definition, and what it adds to the objective at one step.

Both doors share this. It knows nothing of Optax chains or of NumPyro models.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from proxvi import _distributions
from proxvi._validation import check_number, first_value
from proxvi.constraints.references import Reference, parameter_average
from proxvi.distances import inverse_huber

__all__ = ["ConstraintState", "Proximity", "Telemetry"]

SHARE_EVERY = 16  # at every step the two norms would be a tenth of the time of a sigmoid belief network's step


class Telemetry(NamedTuple):
    """What a constraint did at the latest step, for a person to look at; no later step reads it.

    Attributes:
        distance: `d(f(λ̃), f(λ_t))`.
        magnitude: `k_t`.
        share: of the gradient that is the constraint's, `‖k ∇d‖ / (‖∇(−ELBO)‖ + ‖k ∇d‖)`, in [0, 1]. It is two more
            passes over the parameters, so `proximity` measures it at every 16th step and keeps it in between, and
            `ProximitySVI` at the end of `run` and when `measure_share` asks for it; NaN where it was not yet measured.

    Example:
        >>> Telemetry(distance=0.5, magnitude=2.0, share=0.1).share
        0.1
    """

    distance: Any
    magnitude: Any
    share: Any

    @classmethod
    def unmeasured(cls) -> "Telemetry":
        """Before the first step."""
        return cls(jnp.zeros(()), jnp.zeros(()), jnp.full((), jnp.nan))


class ConstraintState(NamedTuple):
    """What the next step of a constraint cannot recompute.

    Attributes:
        step: how many were taken.
        first_loss: size of the first loss that is finite and not 0; 0 until there is one.
        reference: state of the reference.
    """

    step: Array
    first_loss: Array
    reference: Any


@dataclass(frozen=True)
class Proximity:
    """One proximity constraint: what is kept close, to what, how close and how hard.

        objective at step t:   −ELBO(λ) + k_t · d(f(λ̃_t), f(λ))

    Attributes:
        statistic: `f`, the function whose value is kept close.
        magnitude: `k`, a number or an Optax schedule of the step. `optax.exponential_decay(1.0, T, 1e-10)` is the
            paper's `γ^{t/T}` with `γ = 1e-10`. A constant never lets go.
        distance: `d`, a function of the reference's statistic and the current one.
        reference: `λ̃`, what is averaged and how long.
        relative: whether `magnitude` is in units of the first loss seen, `|ELBO_0|`, as in the paper.

    Example:
        >>> import optax, proxvi
        >>> constraint = Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, 10_000, 1e-10))
        >>> constraint.distance.__name__
        'inverse_huber'
    """

    statistic: Callable[..., Any]
    _: KW_ONLY
    magnitude: Any
    distance: Callable[[Any, Any], Array] = inverse_huber
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

    def init(self, params: Any, describe: Callable[[], Any]) -> ConstraintState:
        """Start at `params`; `describe()` gives the shapes and dtypes of the statistic, if the reference asks."""
        return ConstraintState(
            step=jnp.zeros((), jnp.int32),
            first_loss=jnp.zeros(()),
            reference=self.reference.init(params, describe),
        )

    def strength(self, state: ConstraintState, loss: Any = None) -> tuple[Array, Array]:
        """The magnitude `k_t`, never negative, and the first loss, which `loss` sets if it is the first."""
        magnitude = self.magnitude(state.step) if callable(self.magnitude) else self.magnitude
        magnitude = jnp.maximum(jnp.asarray(magnitude, state.first_loss.dtype), 0.0)
        if not self.relative:
            return magnitude, state.first_loss
        size = jnp.abs(jnp.asarray(jax.lax.stop_gradient(loss), state.first_loss.dtype))
        first_loss = jnp.where((state.first_loss == 0.0) & jnp.isfinite(size), size, state.first_loss)
        return magnitude * first_loss, first_loss

    def measure(
        self, state: ConstraintState, params: Any, value: Any, statistic: Callable[[Any], Any]
    ) -> tuple[Array, Any]:
        """The distance `d(f(λ̃_t), f(λ_t))`, differentiable in `value`, and the reference with `λ_t` taken in.

        `value` is `f(λ_t)`; `statistic` evaluates `f` elsewhere, if the reference asks.
        """
        seen = jax.lax.stop_gradient((params, value))
        reference, step = state.reference, state.step
        if self.reference.lagged:
            target = self.reference.read(reference, statistic, seen[1], step)
            reference = self.reference.fold(reference, *seen, step)
        else:
            reference = self.reference.fold(reference, *seen, step)
            target = self.reference.read(reference, statistic, seen[1], step)
        return self.apart(target, value), reference

    def advance(self, state: ConstraintState, first_loss: Array, reference: Any) -> ConstraintState:
        """The state for the next step."""
        return ConstraintState(jnp.asarray(optax.safe_increment(state.step)), first_loss, reference)

    def apart(self, target: Any, value: Any) -> Array:
        """The distance from `target` = `f(λ̃)`, which carries no gradient, to `value` = `f(λ)`."""
        _check_statistic(value)
        distance = self.distance(jax.lax.stop_gradient(target), value)
        if jnp.shape(distance) != () or not jnp.issubdtype(jnp.result_type(distance), jnp.floating):
            raise ValueError(
                f"`distance` must return a real scalar, got shape {jnp.shape(distance)} and dtype "
                f"{jnp.result_type(distance)}; sum over the entries of the statistic."
            )
        return jnp.asarray(distance, jnp.result_type(float))


def add(gradient: Any, magnitude: Array, slope: Any) -> Any:
    """`g + k ∇d`; with `k = 0` it is `g` to the last bit, whatever `∇d` holds."""
    return jax.tree.map(
        lambda g, c: jnp.where(magnitude == 0.0, g, (g + magnitude * c).astype(g.dtype)), gradient, slope
    )


def share(gradient: Any, magnitude: Array, slope: Any) -> Array:
    """`‖k ∇d‖ / (‖g‖ + ‖k ∇d‖)`, and 0 where both vanish."""
    ours, theirs = magnitude * _norm(slope), _norm(gradient)
    total = ours + theirs
    return jnp.where(total == 0.0, 0.0, ours / jnp.where(total == 0.0, 1.0, total))


def _norm(tree: Any) -> Array:
    # A dot product runs at memory speed on every backend, where a sum of squares does not on CPU.
    squares = [jnp.vdot(x, x, preferred_element_type=jnp.result_type(float)) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros(())))


def _check_statistic(value: Any) -> None:
    """A statistic must have a gradient: real floating leaves, at least one of them."""
    named = _distributions.leaves_with_names(value)
    if not named:
        raise ValueError(
            f"`statistic` must return at least one array or distribution, got {value!r}; return what is to be "
            "kept close."
        )
    for name, leaf in named:
        if _distributions.is_distribution(leaf):
            continue
        try:
            dtype = jnp.result_type(leaf)
        except TypeError:
            dtype = type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"`statistic` must return real floating-point arrays, got {dtype} at {name}; integers have no "
                "gradient to constrain."
            )
