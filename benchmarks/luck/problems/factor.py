"""The Bernoulli factor model of the paper's figure 1: two features, whose means start far away."""

from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import proxvi
from problems import Problem

POINTS, FEATURES = 100, 2


def problem(scale: float = 1.0) -> Problem:
    on_key, noise_key = jax.random.split(jax.random.key(0))
    on = jax.random.bernoulli(on_key, shape=(POINTS, FEATURES))
    x = on @ jnp.full(FEATURES, 5.0) + jax.random.normal(noise_key, (POINTS,))

    def ring(key: jax.Array) -> jax.Array:
        angle = 2 * jnp.pi * jax.random.uniform(key)
        return 100 * scale * jnp.stack([jnp.cos(angle), jnp.sin(angle)])

    def model(x: jax.Array) -> None:
        means = jnp.asarray(numpyro.param("means", ring))
        with numpyro.plate("points", POINTS):
            z = jnp.asarray(numpyro.sample("z", dist.Bernoulli(0.5).expand([FEATURES]).to_event(1)), jnp.float32)
            numpyro.sample("x", dist.Normal(z @ means, 1.0), obs=x)

    def guide(x: jax.Array) -> None:
        del x
        logits = numpyro.param("logits", jnp.zeros((POINTS, FEATURES)))
        with numpyro.plate("points", POINTS):
            numpyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))

    def by_point(q: Any) -> Any:  # every assignment has a logit of its own, so each is a unit, not one of a batch
        return proxvi.entropy(q["z"].to_event(1))

    return Problem(model, (x,), guide, rate=0.1, loss=proxvi.LeaveOneOutELBO(5), statistic=by_point)
