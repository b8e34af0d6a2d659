"""Acceleration of a helmet after a crash: a line with four kinks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from problems import Problem, columns, standardized, unit_interval


def segmented(x: jax.Array, y: jax.Array, kinks: int) -> Callable[[], None]:
    """A regression by a line whose slope changes at unknown places."""

    def model() -> None:
        at = jnp.asarray(numpyro.sample("at", dist.Uniform(0, 1).expand([kinks]).to_event(1)))
        b = jnp.asarray(numpyro.sample("b", dist.Normal(0, 2).expand([kinks + 2]).to_event(1)))
        sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1))
        bends = jnp.sum(b[2:] * jax.nn.relu(x[:, None] - at), axis=1)
        numpyro.sample("y", dist.Normal(b[0] + b[1] * x + 5 * bends, sigma), obs=y)

    return model


def problem(scale: float = 1.0) -> Problem:
    times, acceleration = columns("mcycle.csv", "times", "accel")
    return Problem(segmented(unit_interval(times), standardized(acceleration), kinks=4), scale=scale)
