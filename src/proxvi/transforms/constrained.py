"""Any Optax optimiser with constraints (Algorithm 2 of the paper)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from proxvi._arguments import Arguments, check_call, check_parameters
from proxvi._typing import ParamTree, Scalar, Tree
from proxvi.constraints import (
    LimitTelemetry,
    Proximity,
    Telemetry,
    add,
    as_constraints,
    share_of_gradient,
)

__all__ = ["ConstrainedState", "ProximityState", "proximity", "telemetry"]

SHARE_EVERY = 16  # at every step the two norms would be a tenth of the time of a sigmoid belief network's step


class ProximityState(NamedTuple):
    """State of one constraint.

    Attributes:
        constraint: what the next step needs; a `ConstraintState`, or a `LimitState`.
        telemetry: what the latest step did; a `Telemetry`, or a `LimitTelemetry`.
    """

    constraint: Any
    telemetry: Any


class ConstrainedState(NamedTuple):
    """State of `proximity`.

    Attributes:
        constraints: one for each constraint.
        optimizer: of the optimiser within.
    """

    constraints: tuple[ProximityState, ...]
    optimizer: optax.OptState


def proximity(
    optimizer: optax.GradientTransformation,
    constraint: Proximity | Sequence[Proximity],
    *,
    example: Mapping[str, Tree] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Give an optimiser constraints: fast proximity variational inference (Algorithm 2).

        g ← ∇(−ELBO)(λ_t) + Σ k_t · ∇_λ d(f(λ̃_t), f(λ_t)),   then a step of the optimiser along g

    It needs the parameters, and with `relative` the loss: `update(grads, state, params, value=loss)`. It takes the
    optimiser, and is no link of a chain, because behind the optimiser it would push the wrong way.

    Args:
        optimizer: any Optax optimiser, or a chain of them.
        constraint: one or several. A statistic is a function of the parameters here. Its other arguments are taken by
            name from `update`: an argument called `batch` from `update(..., batch=batch)`. An argument with a default
            other than None keeps it.
        example: the further arguments of the statistics by name, as arrays or `jax.ShapeDtypeStruct`.
            `statistic_average` needs them, because Optax's `init` sees only the parameters.

    Returns:
        The optimiser. `telemetry(state)` reads from its state what each constraint did.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro.distributions as dist, optax, proxvi
        >>> constraint = proxvi.Proximity(
        ...     lambda params: proxvi.entropy(dist.Bernoulli(logits=params).to_event(1)),
        ...     magnitude=optax.exponential_decay(1.0, 1_000, 1e-10),
        ... )
        >>> optimizer = proxvi.proximity(optax.adam(0.1), constraint)
        >>> params = jnp.zeros(3)
        >>> state = optimizer.init(params)
        >>> loss, grads = jax.value_and_grad(lambda p: jnp.sum((p - 2.0) ** 2))(params)
        >>> updates, state = optimizer.update(grads, state, params, value=loss)
        >>> print(proxvi.telemetry(state)[0].magnitude)
        12.0
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"`optimizer` must be an Optax optimiser, got {optimizer!r}; write "
            "`proximity(optax.adam(1e-3), constraint)`."
        )
    inner = optax.with_extra_args_support(optimizer)
    constraints = as_constraints(constraint)
    arguments = Arguments.of_all([c.statistic for c in constraints], example)
    relative = any(c.relative for c in constraints)

    def init(params: ParamTree) -> ConstrainedState:
        check_parameters(params)
        states = [
            ProximityState(c.init(params, lambda c=c, a=a: a.describe(c.statistic, params)), Telemetry.unmeasured())
            for c, a in zip(constraints, arguments, strict=True)
        ]
        return ConstrainedState(tuple(states), inner.init(params))

    def update(
        updates: ParamTree, state: Any, params: ParamTree = None, **extra: Any
    ) -> tuple[ParamTree, ConstrainedState]:
        check_call(updates, params, extra, relative=relative)
        gradient, states = updates, []
        for c, a, before in zip(constraints, arguments, state.constraints, strict=True):
            slope, magnitude, after = _slope(
                c, before, updates, params, a.bind(c.statistic, params, extra), extra.get("value")
            )
            gradient = add(gradient, magnitude, slope)
            states.append(after)
        step, of_optimizer = inner.update(gradient, state.optimizer, params, **extra)
        return step, ConstrainedState(tuple(states), of_optimizer)

    return optax.GradientTransformationExtraArgs(init, update)


def _slope(
    constraint: Proximity,
    before: Any,
    gradient: ParamTree,
    params: ParamTree,
    statistic: Callable[[ParamTree], Tree],
    loss: Any,
) -> tuple[ParamTree, Scalar, ProximityState]:
    """`∇d` of one constraint, its magnitude and its next state; its share is that beside `gradient`, the loss's own."""

    def distance_at(p: ParamTree) -> tuple[Any, Any]:
        step = constraint.step(before.constraint, p, statistic(p), statistic, loss)
        return step.distance, (step.magnitude, step.state)

    (distance, (magnitude, after)), slope = jax.value_and_grad(distance_at, has_aux=True)(params)
    share = jax.lax.cond(
        before.constraint.step % SHARE_EVERY == 1,  # at step 0 the reference is the current iterate
        lambda: share_of_gradient(gradient, magnitude, slope),
        lambda: before.telemetry.share,
    )
    return slope, magnitude, ProximityState(after, Telemetry(distance, magnitude, share))


def telemetry(state: Tree) -> tuple[Any, ...]:
    """Read from the state of an optimiser what each constraint did at the latest step. Nothing is computed.

    Args:
        state: the state of an Optax optimiser, or any tree that holds it.

    Returns:
        One `Telemetry` for each constraint, and one `LimitTelemetry` for each speed limit, in their order.

    Example:
        >>> import jax.numpy as jnp, optax, proxvi
        >>> constraint = proxvi.Proximity(proxvi.identity, magnitude=1.0, relative=False)
        >>> len(proxvi.telemetry(proxvi.proximity(optax.sgd(0.1), [constraint, constraint]).init(jnp.ones(2))))
        2
    """

    def is_telemetry(node: Tree) -> bool:
        return isinstance(node, Telemetry | LimitTelemetry)

    return tuple(node for node in jax.tree.leaves(state, is_leaf=is_telemetry) if is_telemetry(node))
