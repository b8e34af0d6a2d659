"""Optimisation of an exact ELBO, for the experiments that need no sampling."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

__all__ = ["descend", "scan"]

ON_THE_WAY = 200  # ELBOs kept of each trace


def descend(
    elbo: Callable[[Any, Any], Array],
    optimizer: optax.GradientTransformation,
    params: Any,
    steps: int,
    temperature: Callable[[Array], Any] | None = None,
) -> tuple[Any, Array]:
    """Any optimiser on an ELBO.

    Args:
        elbo: a function of the parameters and of the temperature; 1 is the true one.
        optimizer: a `proxvi.proximity` chain, for example.
        params: to start from.
        steps: how many.
        temperature: at a step, for annealing.

    Returns:
        The final parameters, and the true ELBOs on the way with that of the result at the end.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def step(carry: Any, t: Array) -> tuple[Any, None]:
        params, state = carry
        heat = 1.0 if temperature is None else temperature(t)
        loss, gradient = jax.value_and_grad(lambda p: -elbo(p, heat))(params)
        updates, state = optimizer.update(gradient, state, params, value=loss)
        return (optax.apply_updates(params, updates), state), None

    return scan(step, (params, optimizer.init(params)), lambda params: elbo(params, 1.0), steps)


def scan(step: Any, carry: Any, elbo: Callable[[Any], Array], steps: int) -> tuple[Any, Array]:
    """Run `step` of a carry whose first entry are the parameters; returns as `descend` does."""
    every = max(1, steps // ON_THE_WAY)

    def stretch(carry: Any, t: Array) -> tuple[Any, Array]:
        return jax.lax.scan(step, carry, t + jnp.arange(every))[0], elbo(carry[0])

    carry, elbos = jax.lax.scan(stretch, carry, jnp.arange(0, steps - every + 1, every))
    carry, _ = jax.lax.scan(step, carry, jnp.arange(steps - steps % every, steps))
    return carry[0], jnp.append(elbos, elbo(carry[0]))
