"""Door 1: the constraint as a link in an Optax chain (Algorithm 2 of the paper)."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax import Array

from proxvi._arguments import Arguments, check_call, check_parameters
from proxvi.constraints import (
    SHARE_EVERY,
    ConstraintState,
    Proximity,
    Reference,
    Telemetry,
    add,
    parameter_average,
    share,
)
from proxvi.distances import inverse_huber

__all__ = ["ProximityState", "proximity", "telemetry"]

_PAPER_REFERENCE = parameter_average()


class ProximityState(NamedTuple):
    """State of `proximity`.

    Attributes:
        constraint: what the next step needs.
        telemetry: what the latest step did.
    """

    constraint: ConstraintState
    telemetry: Telemetry


def proximity(
    statistic: Callable[..., Any],
    *,
    magnitude: Any,
    distance: Callable[[Any, Any], Array] = inverse_huber,
    reference: Reference = _PAPER_REFERENCE,
    relative: bool = True,
    example: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Keep a statistic close to its past: fast proximity variational inference (Algorithm 2), as a link in a chain.

        g ← ∇(−ELBO)(λ_t) + k_t · ∇_λ d(f(λ̃_t), f(λ_t))

    Put it before the optimiser. It needs the parameters, and with `relative` the loss:
    `optimizer.update(grads, state, params, value=loss)`. Several constraints are several links.

    Args:
        statistic: `f`, a function of the parameters and of whatever else its arguments name: an argument called
            `batch` is taken from `update(..., batch=batch)`. One with a default other than None keeps it.
        magnitude: `k`, a number or an Optax schedule of the step. `optax.exponential_decay(1.0, T, 1e-10)` is the
            paper's `γ^{t/T}` with `γ = 1e-10`. A constant never lets go.
        distance: `d`, a function of the reference's statistic and the current one.
        reference: `λ̃`, what is averaged and how long.
        relative: whether `magnitude` is in units of the first loss seen, `|ELBO_0|`, as in the paper.
        example: the further arguments of `statistic` by name, as arrays or `jax.ShapeDtypeStruct`. `statistic_average`
            needs them, because Optax's `init` sees only the parameters.

    Returns:
        The transformation. `telemetry(state)` reads off its state what it did.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro.distributions as dist, optax, proxvi
        >>> optimizer = optax.chain(
        ...     proxvi.proximity(
        ...         lambda params: proxvi.entropy(dist.Bernoulli(logits=params).to_event(1)),
        ...         magnitude=optax.exponential_decay(1.0, 1_000, 1e-10),
        ...     ),
        ...     optax.adam(0.1),
        ... )
        >>> params = jnp.zeros(3)
        >>> state = optimizer.init(params)
        >>> loss, grads = jax.value_and_grad(lambda p: jnp.sum((p - 2.0) ** 2))(params)
        >>> updates, state = optimizer.update(grads, state, params, value=loss)
        >>> print(proxvi.telemetry(state)[0].magnitude)
        12.0
    """
    constraint = Proximity(statistic, magnitude=magnitude, distance=distance, reference=reference, relative=relative)
    arguments = Arguments.of(statistic, example)

    def init(params: Any) -> ProximityState:
        check_parameters(params)
        return ProximityState(
            constraint.init(params, lambda: arguments.describe(statistic, params)),
            Telemetry.unmeasured(),
        )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, ProximityState]:
        check_call(updates, params, extra, relative=relative)
        at = arguments.bind(statistic, params, extra)
        magnitude, first_loss = constraint.strength(state.constraint, extra.get("value"))
        (apart, reference), slope = jax.value_and_grad(
            lambda p: constraint.measure(state.constraint, p, at(p), at), has_aux=True
        )(params)
        after = constraint.advance(state.constraint, first_loss, reference)
        measured = jax.lax.cond(
            state.constraint.step % SHARE_EVERY == 0,
            lambda: share(updates, magnitude, slope),
            lambda: state.telemetry.share,
        )
        report = Telemetry(apart, magnitude, measured)
        return add(updates, magnitude, slope), ProximityState(after, report)

    return optax.GradientTransformationExtraArgs(init, update)


def telemetry(state: Any) -> tuple[Telemetry, ...]:
    """Read what each constraint did at the latest step off the state of an optimiser, without computing anything.

    Args:
        state: the state of an Optax optimiser, or any tree that holds it.

    Returns:
        One `Telemetry` for each constraint, in the order of the chain; none if there is no constraint.

    Example:
        >>> import jax.numpy as jnp, optax, proxvi
        >>> link = proxvi.proximity(proxvi.identity, magnitude=1.0, relative=False)
        >>> len(proxvi.telemetry(optax.chain(link, link, optax.sgd(0.1)).init(jnp.ones(2))))
        2
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Telemetry))
    return tuple(node for node in nodes if isinstance(node, Telemetry))
