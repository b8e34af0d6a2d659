"""Algorithm 1 of the paper, which solves for each step by an inner loop, as an Optax optimiser."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from proxvi._arguments import Arguments, check_call, check_parameters
from proxvi._typing import Int, ParamTree, Scalar, Tree
from proxvi._validation import check_integer, check_number
from proxvi.constraints import ConstraintState, Proximity, Telemetry, add, share_of_gradient

__all__ = ["InnerLoopState", "proximity_inner_loop"]


class InnerLoopState(NamedTuple):
    """State of `proximity_inner_loop`.

    Attributes:
        constraint: what the next step needs.
        key: for the noise of the next step.
        telemetry: what the latest step did, at the point where the inner loop ended.
        iterations: number of iterations of the latest inner loop.
        residual: its last change of any parameter; above the tolerance if the loop reached `max_iterations`.
    """

    constraint: ConstraintState
    key: Array
    telemetry: Telemetry
    iterations: Int[Array, ""]
    residual: Scalar


class _Inner(NamedTuple):
    """What the inner loop carries."""

    step: ParamTree  # λ' − λ_t
    slope: ParamTree  # ∇d there
    merit: Scalar  # −ρU there
    mix: Scalar  # η/ρ
    iteration: Int[Array, ""]
    change: Scalar  # the largest of any parameter, in the latest iteration


def proximity_inner_loop(
    key: Array,
    learning_rate: optax.ScalarOrSchedule,
    constraint: Proximity,
    *,
    noise: float = 1e-3,
    inner_learning_rate: float | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 100,
    example: Mapping[str, Tree] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Solve for each step by an inner loop: proximity variational inference as first stated (Algorithm 1).

        U(λ') = ∇L(λ_t)ᵀ(λ' − λ_t) − ‖λ' − λ_t‖² / 2ρ − k_t · d(f(λ̃_t), f(λ'))        with L = ELBO
        λ' ← λ_t + noise,  then  λ' ← λ' + η ∇U(λ')  until it rests;  λ_{t+1} = λ'

    It is a whole optimiser, not a link. With `k = 0` it is gradient descent. The paper's inner step is `η = ρ`. Here a
    step that lowers `U` is taken back and `η` is halved. Without that, the loop diverges where `d ∘ f` curves by more
    than 1/ρk, and at every kink of the inverse Huber distance.

    Args:
        key: for the noise that each inner loop starts from.
        learning_rate: `ρ`, a number or an Optax schedule.
        constraint: the constraint; its statistic is a function of the parameters, as for `proximity`. A reference with
            decay 0 is the iterate that the step starts from, `λ̃ = λ_t`.
        noise: standard deviation of the start around `λ_t`.
        inner_learning_rate: `η` to begin with, `ρ` at most; None takes `ρ`.
        tolerance: the loop ends when no parameter changes by more than this.
        max_iterations: the most iterations of one inner loop.
        example: as for `proximity`.

    Returns:
        The optimiser.

    Example:
        >>> import jax, jax.numpy as jnp, optax, proxvi
        >>> constraint = proxvi.Proximity(
        ...     proxvi.identity,
        ...     magnitude=1.0,
        ...     distance=proxvi.squared,
        ...     reference=proxvi.parameter_average(0.0),
        ...     relative=False,
        ... )
        >>> optimizer = proxvi.proximity_inner_loop(jax.random.key(0), 0.1, constraint)
        >>> params = jnp.array([1.0])
        >>> updates, state = optimizer.update(jnp.array([1.2]), optimizer.init(params), params)
        >>> bool(jnp.allclose(updates, -0.1 * 1.2 / (1 + 2 * 0.1 * 1.0)))  # −ρ g / (1 + 2 ρ k)
        True
    """
    if not isinstance(constraint, Proximity):
        raise TypeError(
            f"`constraint` must be a Proximity, got {constraint!r}; write `Proximity(statistic, magnitude=...)`."
        )
    check_number("noise", noise, at_least=0.0, remedy="0 starts at the current parameters")
    check_number("tolerance", tolerance, at_least=0.0, remedy="0 runs until nothing moves, or the cap")
    if not callable(learning_rate):
        check_number("learning_rate", learning_rate, above=0.0, remedy="1e-3 is the paper's")
    if inner_learning_rate is not None:
        check_number("inner_learning_rate", inner_learning_rate, above=0.0, remedy="None takes the learning rate")
    check_integer("max_iterations", max_iterations, remedy="1 is one gradient step")
    arguments = Arguments.of(constraint.statistic, example)

    def init(params: ParamTree) -> InnerLoopState:
        check_parameters(params)
        return InnerLoopState(
            constraint.init(params, lambda: arguments.describe(constraint.statistic, params)),
            jnp.array(key, copy=True),  # so that a loop may donate the state
            Telemetry.unmeasured(),
            jnp.zeros((), jnp.int32),
            jnp.zeros(()),
        )

    def update(
        updates: ParamTree, state: Any, params: ParamTree = None, **extra: Any
    ) -> tuple[ParamTree, InnerLoopState]:
        check_call(updates, params, extra, relative=constraint.relative)
        at = arguments.bind(constraint.statistic, params, extra)
        before = state.constraint
        # λ_t is in the past of the new iterate, so the reference takes it in before it is read.
        target, magnitude, after = constraint.advance(
            before, params, at(params), at, extra.get("value"), read_first=False
        )

        rate: Any = learning_rate(before.step) if callable(learning_rate) else learning_rate
        largest: Any = 1.0 if inner_learning_rate is None else jnp.minimum(inner_learning_rate / rate, 1.0)

        def distance_after(step: ParamTree) -> Scalar:
            return constraint.distance_to(target, at(optax.apply_updates(params, step)))

        def merit(step: ParamTree, distance: Scalar) -> Scalar:
            """−ρ U, to be minimised; the factor ρ keeps it finite where a schedule starts at 0."""
            # no `optax.tree.vdot`, which flattens: arrays that are split over explicit axes cannot be
            linear, square = (optax.tree.sum(jax.tree.map(jnp.multiply, other, step)) for other in (updates, step))
            return rate * linear + 0.5 * square + rate * jnp.where(magnitude == 0.0, 0.0, magnitude * distance)

        def iterate(carry: _Inner) -> _Inner:
            pull = add(updates, magnitude, carry.slope)
            # step + η ∇U = (1 − η/ρ) step − (η/ρ) ρ (∇(−L) + k ∇d): exactly −ρ∇(−L) where k = 0 and η = ρ
            mix = carry.mix
            moved = jax.tree.map(lambda s, g: ((1.0 - mix) * s + mix * (-rate * g)).astype(s.dtype), carry.step, pull)
            distance, slope = jax.value_and_grad(distance_after)(moved)
            after = merit(moved, distance)
            change = jax.tree.reduce(jnp.maximum, jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), moved, carry.step))
            # A step that overshoots (at a kink of the distance it always does) is taken back and halved.
            better = after <= carry.merit
            step, slope = jax.tree.map(
                lambda new, old: jnp.where(better, new, old), (moved, slope), (carry.step, carry.slope)
            )
            return _Inner(
                step,
                slope,
                jnp.where(better, after, carry.merit),
                jnp.where(better, mix, 0.5 * mix),
                carry.iteration + 1,
                change.astype(carry.change.dtype),
            )

        def is_unfinished(carry: _Inner) -> Array:
            return (carry.iteration < max_iterations) & (carry.change > tolerance)

        next_key, noise_key = jax.random.split(state.key)
        start = jax.tree.map(lambda n: noise * n, optax.tree.random_like(noise_key, params, jax.random.normal))
        distance, slope = jax.value_and_grad(distance_after)(start)
        ended = jax.lax.while_loop(
            is_unfinished,
            iterate,
            _Inner(
                start,
                slope,
                merit(start, distance),
                jnp.asarray(largest, magnitude.dtype),
                jnp.zeros((), jnp.int32),
                jnp.full_like(state.residual, jnp.inf),
            ),
        )
        report = Telemetry(distance_after(ended.step), magnitude, share_of_gradient(updates, magnitude, ended.slope))
        # With a gradient that is not finite the loop would return the noise that it began with: return NaN instead.
        step = jax.tree.map(lambda s: jnp.where(jnp.isfinite(ended.merit), s, jnp.nan).astype(s.dtype), ended.step)
        return step, InnerLoopState(after, next_key, report, ended.iteration, ended.change)

    return optax.GradientTransformationExtraArgs(init, update)
