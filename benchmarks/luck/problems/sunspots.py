"""Sunspots of three centuries: three waves."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from problems import Problem, columns, standardized


def problem(scale: float = 1.0) -> Problem:
    y = standardized(columns("sunspots.csv", "SUNACTIVITY")[0])
    t = jnp.arange(len(y))

    def model() -> None:
        period = jnp.asarray(numpyro.sample("period", dist.LogNormal(jnp.log(15.0), 0.6).expand([3]).to_event(1)))
        a = jnp.asarray(numpyro.sample("a", dist.Normal(0, 1).expand([3, 2]).to_event(2)))
        sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1))
        phase = 2 * jnp.pi * t[:, None] / period
        mean = jnp.sum(a[:, 0] * jnp.sin(phase) + a[:, 1] * jnp.cos(phase), axis=1)
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)

    return Problem(model, scale=scale)
