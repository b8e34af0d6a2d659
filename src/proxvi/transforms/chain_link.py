"""The constraint as a link in an Optax chain (Algorithm 2 of the paper)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from proxvi._arguments import Arguments, check_call, check_parameters
from proxvi._typing import Distance, ParamTree, Statistic, Tree
from proxvi.constraints import (
    ConstraintState,
    Proximity,
    Reference,
    Telemetry,
    add,
    parameter_average,
    share_of_gradient,
)
from proxvi.distances import inverse_huber

__all__ = ["ProximityState", "proximity", "telemetry"]

SHARE_EVERY = 16  # at every step the two norms would be a tenth of the time of a sigmoid belief network's step
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
    statistic: Statistic,
    *,
    magnitude: optax.ScalarOrSchedule,
    distance: Distance = inverse_huber,
    reference: Reference = _PAPER_REFERENCE,
    relative: bool = True,
    example: Mapping[str, Tree] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Keep a statistic close to its past: fast proximity variational inference (Algorithm 2), as a link in a chain.

        g ← ∇(−ELBO)(λ_t) + k_t · ∇_λ d(f(λ̃_t), f(λ_t))

    Put it before the optimiser. It needs the parameters, and with `relative` the loss:
    `optimizer.update(grads, state, params, value=loss)`. For several constraints use several links.

    Args:
        statistic: `f`, a function of the parameters. Its other arguments are taken by name from `update`: an argument
            called `batch` from `update(..., batch=batch)`. An argument with a default other than None keeps it.
        magnitude: as for `Proximity`.
        distance: as for `Proximity`.
        reference: as for `Proximity`.
        relative: as for `Proximity`.
        example: the further arguments of `statistic` by name, as arrays or `jax.ShapeDtypeStruct`. `statistic_average`
            needs them, because Optax's `init` sees only the parameters.

    Returns:
        The transformation. `telemetry(state)` reads from its state what it did.

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

    def init(params: ParamTree) -> ProximityState:
        check_parameters(params)
        return ProximityState(
            constraint.init(params, lambda: arguments.describe(statistic, params)),
            Telemetry.unmeasured(),
        )

    def update(
        updates: ParamTree, state: Any, params: ParamTree = None, **extra: Any
    ) -> tuple[ParamTree, ProximityState]:
        check_call(updates, params, extra, relative=relative)
        at = arguments.bind(statistic, params, extra)

        def distance_at(p: ParamTree) -> tuple[Any, Any]:
            step = constraint.step(state.constraint, p, at(p), at, extra.get("value"))
            return step.distance, (step.magnitude, step.state)

        (distance, (magnitude, after)), slope = jax.value_and_grad(distance_at, has_aux=True)(params)
        share = jax.lax.cond(
            state.constraint.step % SHARE_EVERY == 0,
            lambda: share_of_gradient(updates, magnitude, slope),
            lambda: state.telemetry.share,
        )
        return add(updates, magnitude, slope), ProximityState(after, Telemetry(distance, magnitude, share))

    return optax.GradientTransformationExtraArgs(init, update)


def telemetry(state: Tree) -> tuple[Telemetry, ...]:
    """Read from the state of an optimiser what each constraint did at the latest step. Nothing is computed.

    Args:
        state: the state of an Optax optimiser, or any tree that holds it.

    Returns:
        One `Telemetry` for each constraint, in the order of the chain.

    Example:
        >>> import jax.numpy as jnp, optax, proxvi
        >>> link = proxvi.proximity(proxvi.identity, magnitude=1.0, relative=False)
        >>> len(proxvi.telemetry(optax.chain(link, link, optax.sgd(0.1)).init(jnp.ones(2))))
        2
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Telemetry))
    return tuple(node for node in nodes if isinstance(node, Telemetry))
