"""Latent Dirichlet allocation of Reuters articles: ten topics, words summed over their topics."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from problems import Problem, reuters

TOPICS, WORDS = 10, 400


def problem(scale: float = 1.0) -> Problem:
    counts = reuters(WORDS)

    def model(counts: jax.Array) -> None:
        articles = counts.shape[0]
        share = dist.Dirichlet(jnp.full(TOPICS, 0.2)).expand([articles]).to_event(1)
        words = dist.Dirichlet(jnp.full(WORDS, 0.1)).expand([TOPICS]).to_event(1)
        mixed = jnp.asarray(numpyro.sample("share", share)) @ jnp.asarray(numpyro.sample("words", words))
        numpyro.factor("counts", jnp.sum(counts * jnp.log(mixed + 1e-30)))

    return Problem(model, (counts,), scale=scale, steps=1_000, rate=0.05, particles=50)
