"""A control: the effect of coaching in eight schools (Rubin 1981), a hierarchical model."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from problems import Problem

EFFECT = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERROR = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def problem(scale: float = 1.0) -> Problem:
    def model() -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 5))
        spread = numpyro.sample("spread", dist.HalfCauchy(5))
        with numpyro.plate("schools", 8):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("effect", dist.Normal(mean + spread * z, ERROR), obs=EFFECT)

    return Problem(model, scale=scale, steps=6_000, control=True)
