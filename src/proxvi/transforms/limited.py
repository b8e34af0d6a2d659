"""A speed limit as an Optax link that comes after the optimiser."""

from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax import Array

from proxvi._arguments import Arguments, check_call, check_parameters
from proxvi._typing import ParamTree, Statistic, Tree
from proxvi.constraints import LimitTelemetry, SpeedLimit
from proxvi.transforms.constrained import ProximityState

__all__ = ["speed_limit"]


def speed_limit(
    statistic: Statistic,
    over: int | float | Array,
    *,
    range: int | float | None = None,  # noqa: A002 (the word for it)
    example: Mapping[str, Tree] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Let a statistic fall only slowly: an Optax link that comes after the optimiser.

        find the update nearest to the optimiser's   with   f_i(λ + u) − f_i(λ) ≥ −R_i / over   for every unit i

    Args:
        statistic: `f`, a function of the parameters, and of what else it names and `update` is given.
        over: the number of steps over which the whole range may be lost; after 2 `over` steps the limit ends. A third
            of the steps of the run is a good choice, and 0 is no limit.
        range: `R`, as in `SpeedLimit`; entropies know their own.
        example: the further arguments of the statistic by name, as arrays or `jax.ShapeDtypeStruct`.

    Returns:
        The link. `telemetry(state)` reads from its state what it did.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro.distributions as dist, optax, proxvi
        >>> def entropy(params):
        ...     return proxvi.entropy(dist.Bernoulli(logits=params).to_event(1))
        >>> optimizer = optax.chain(optax.adam(0.1), proxvi.speed_limit(entropy, over=500))
        >>> params = jnp.zeros(3)
        >>> state = optimizer.init(params)
        >>> @jax.jit
        ... def step(params, state):
        ...     updates, state = optimizer.update(jnp.ones(3), state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> for _ in range(100):
        ...     params, state = step(params, state)
        >>> print((entropy(params) > 0.5).all())  # Adam alone is at -10, with an entropy of 0
        True
    """
    if over is None:
        raise ValueError(
            "`over` must be a number of steps, got None; a third of the steps of the run is a good choice, and a link "
            "does not know how many these are."
        )
    limit = SpeedLimit(statistic, over, range)
    arguments = Arguments.of(statistic, example)

    def init(params: ParamTree) -> ProximityState:
        check_parameters(params)
        return ProximityState(limit.init(lambda: arguments.describe(statistic, params)), LimitTelemetry.unmeasured())

    def update(updates: ParamTree, state: Any, params: ParamTree = None, **extra: Any) -> tuple[ParamTree, Any]:
        check_call(updates, params, extra, relative=False)
        if limit.is_off:
            return updates, state
        at = arguments.bind(statistic, params, extra)
        value, slope = jax.vjp(at, params)
        ranges = limit.ranges(lambda: at(params))
        limited, after, done = limit.limit(
            state.constraint, updates, lambda: updates, value, lambda weights: slope(weights)[0], ranges
        )
        return limited, ProximityState(after, done)

    return optax.GradientTransformationExtraArgs(init, update)
