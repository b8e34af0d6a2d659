"""Algorithm 1 of the paper: each step solved by an inner loop, as an Optax optimiser to compare Algorithm 2 with."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from proxvi._calls import Arguments, check_call, check_parameters
from proxvi.constraint import ConstraintState, Proximity, Telemetry, add, share

__all__ = ["InnerLoopState", "proximity_inner_loop"]


class InnerLoopState(NamedTuple):
    """State of `proximity_inner_loop`.

    Attributes:
        constraint: what the next step needs.
        key: for the noise of the next step.
        telemetry: what the latest step did, at the point where the inner loop ended.
        iterations: of the latest inner loop.
        residual: its last change of any parameter; above the tolerance where the loop ran into its cap.
    """

    constraint: ConstraintState
    key: Array
    telemetry: Telemetry
    iterations: Array
    residual: Array


def proximity_inner_loop(
    key: Array,
    learning_rate: optax.ScalarOrSchedule,
    constraint: Proximity,
    *,
    noise: float = 1e-3,
    inner_learning_rate: float | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 100,
    example: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Solve for each step by an inner loop: proximity variational inference as first stated (Algorithm 1).

        U(λ') = ∇L(λ_t)ᵀ(λ' − λ_t) − ‖λ' − λ_t‖² / 2ρ − k_t · d(f(λ̃_t), f(λ'))        with L = ELBO
        λ' ← λ_t + noise,  then  λ' ← λ' + η ∇U(λ')  until it rests;  λ_{t+1} = λ'

    It is a whole optimiser, not a link. With `k = 0` it is gradient descent. The paper's inner step is `η = ρ`, for
    which the loop is the fixed-point iteration `λ' ← λ_t + ρ (∇L(λ_t) − k ∇d(λ'))`; it contracts while ρ k times the
    curvature of `d ∘ f` is below 1, and a smaller `inner_learning_rate` makes it contract beyond that.

    Args:
        key: for the noise that each inner loop starts from.
        learning_rate: `ρ`, a number or an Optax schedule.
        constraint: the constraint; its statistic is a function of the parameters, as for `proximity`. A reference with
            decay 0 is the iterate that the step starts from, `λ̃ = λ_t`.
        noise: standard deviation of the start around `λ_t`.
        inner_learning_rate: `η`; None takes `ρ`.
        tolerance: the loop ends when no parameter changes by more than this.
        max_iterations: of the inner loop.
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
    _check_real("noise", noise, at_least=0.0, remedy="0 starts at the current parameters")
    _check_real("tolerance", tolerance, at_least=0.0, remedy="0 runs until nothing moves, or the cap")
    if not callable(learning_rate):
        _check_real("learning_rate", learning_rate, above=0.0, remedy="1e-3 is the paper's")
    if inner_learning_rate is not None:
        _check_real("inner_learning_rate", inner_learning_rate, above=0.0, remedy="None takes the learning rate")
    if isinstance(max_iterations, bool) or not isinstance(max_iterations, int) or max_iterations < 1:
        raise ValueError(
            f"`max_iterations` must be an integer of at least 1, got {max_iterations!r}; 1 is one gradient step."
        )
    arguments = Arguments.of(constraint.statistic, example)

    def init(params: Any) -> InnerLoopState:
        check_parameters(params)
        return InnerLoopState(
            constraint.init(params, lambda: arguments.describe(constraint.statistic, params)),
            key,
            Telemetry.zeros(),
            jnp.zeros((), jnp.int32),
            jnp.zeros(()),
        )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, InnerLoopState]:
        check_call(updates, params, extra, relative=constraint.relative)
        at = arguments.bind(constraint.statistic, params, extra)
        before = state.constraint
        magnitude, first_loss = constraint.strength(before, extra.get("value"))
        # λ_t is in the past of the new iterate, so the reference takes it in before it is read.
        value = at(params)
        reference = constraint.reference.fold(before.reference, params, value, before.step)
        after = constraint.advance(before, first_loss, reference)
        target = constraint.reference.read(reference, at, value, after.step)

        rate: Any = learning_rate(before.step) if callable(learning_rate) else learning_rate
        mix = 1.0 if inner_learning_rate is None else inner_learning_rate / rate

        def apart(step: Any) -> Array:
            return constraint.apart(target, at(optax.apply_updates(params, step)))

        def iterate(carry: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
            step, iteration, _ = carry
            pull = add(updates, magnitude, jax.grad(apart)(step))
            # step + η ∇U = (1 − η/ρ) step − (η/ρ) ρ (∇(−L) + k ∇d): exactly −ρ∇(−L) where k = 0 and η = ρ
            moved = jax.tree.map(lambda s, g: ((1.0 - mix) * s + mix * (-rate * g)).astype(s.dtype), step, pull)
            change = jax.tree.reduce(jnp.maximum, jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), moved, step))
            return moved, iteration + 1, change.astype(state.residual.dtype)

        def unfinished(carry: tuple[Any, Array, Array]) -> Array:
            _, iteration, change = carry
            return (iteration < max_iterations) & (change > tolerance)

        next_key, noise_key = jax.random.split(state.key)
        start = jax.tree.map(lambda n: noise * n, optax.tree.random_like(noise_key, params, jax.random.normal))
        infinite = jnp.full_like(state.residual, jnp.inf)
        step, iterations, residual = jax.lax.while_loop(
            unfinished, iterate, (start, jnp.zeros((), jnp.int32), infinite)
        )
        distance, slope = jax.value_and_grad(apart)(step)
        report = Telemetry(distance, magnitude, share(updates, magnitude, slope))
        return step, InnerLoopState(after, next_key, report, iterations, residual)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_real(
    name: str, value: Any, *, at_least: float | None = None, above: float | None = None, remedy: str
) -> None:
    bound = f"of at least {at_least:g}" if at_least is not None else f"above {above:g}"
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or (at_least is not None and value < at_least)
        or (above is not None and value <= above)
    ):
        raise ValueError(f"`{name}` must be a finite number {bound}, got {value!r}; {remedy}.")
