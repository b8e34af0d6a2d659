"""Sunspots of three centuries: a hidden Markov model of four states that emit counts."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

from problems import Problem, columns

STATES = 4


def problem(scale: float = 1.0) -> Problem:
    y = jnp.asarray(np.round(columns("sunspots.csv", "SUNACTIVITY")[0]))

    def model() -> None:
        stay = jnp.ones((STATES, STATES)) + 2 * jnp.eye(STATES)
        transition = jnp.asarray(numpyro.sample("transition", dist.Dirichlet(stay).to_event(1)))
        rate = numpyro.sample("rate", dist.LogNormal(3.0, 1.5).expand([STATES]).to_event(1))
        emitted = dist.NegativeBinomial2(rate, 10.0).log_prob(y[:, None])

        def product(a: jax.Array, b: jax.Array) -> jax.Array:  # of matrices, in logarithms
            return logsumexp(a[..., :, :, None] + b[..., None, :, :], axis=-2)

        steps = jnp.log(transition) + emitted[1:, None, :]
        all_steps = jax.lax.associative_scan(product, steps)[-1]  # the forward algorithm, in few vectorised operations
        numpyro.factor("y", logsumexp(emitted[0][:, None] - jnp.log(STATES) + all_steps))

    return Problem(model, scale=scale, steps=2_000)
