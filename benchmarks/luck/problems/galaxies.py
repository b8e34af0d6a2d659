"""Speeds of 82 galaxies: a mixture of six normal distributions."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

from problems import Problem, columns, standardized


def problem(scale: float = 1.0) -> Problem:
    x = standardized(columns("galaxies.csv", "dat")[0])

    def model() -> None:
        w = jnp.asarray(numpyro.sample("w", dist.Dirichlet(jnp.ones(6))))
        mu = numpyro.sample("mu", dist.Normal(0, 2).expand([6]).to_event(1))
        s = numpyro.sample("s", dist.LogNormal(-1, 0.5).expand([6]).to_event(1))
        numpyro.factor("x", jnp.sum(logsumexp(jnp.log(w) + dist.Normal(mu, s).log_prob(x[:, None]), axis=1)))

    return Problem(model, scale=scale)
