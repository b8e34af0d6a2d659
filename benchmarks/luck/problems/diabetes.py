"""Progress of diabetes in 442 patients: a Bayesian neural network of 20 units."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from problems import Problem, columns, standardized

UNITS = 20


def problem(scale: float = 1.0) -> Problem:
    *features, progression = columns("diabetes.csv")
    x, y = standardized(np.stack(features, axis=1)), standardized(progression)

    def model(x: jax.Array, y: jax.Array) -> None:
        inner = jnp.asarray(numpyro.sample("inner", dist.Normal(0, 1).expand([x.shape[1], UNITS]).to_event(2)))
        offset = jnp.asarray(numpyro.sample("offset", dist.Normal(0, 1).expand([UNITS]).to_event(1)))
        outer = jnp.asarray(numpyro.sample("outer", dist.Normal(0, 1 / UNITS**0.5).expand([UNITS]).to_event(1)))
        sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1))
        numpyro.sample("y", dist.Normal(jnp.tanh(x @ inner + offset) @ outer, sigma), obs=y)

    return Problem(model, (x[:354], y[:354]), scale=scale, steps=5_000)
