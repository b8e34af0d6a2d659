"""ProdLDA of Reuters articles: ten topics as a product of experts, with an inference network."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from problems import Problem, reuters

TOPICS, WORDS, UNITS = 10, 400, 50


def problem(scale: float = 1.0) -> Problem:
    train = reuters(WORDS)
    glorot = jax.nn.initializers.glorot_normal()
    common = jnp.log(train.mean(0))

    def weights(name: str, shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(numpyro.param(name, lambda key: scale * glorot(key, shape)))

    def model(counts: jax.Array) -> None:
        topics = weights("topics", (TOPICS, WORDS))
        with numpyro.plate("articles", counts.shape[0]):
            z = jnp.asarray(numpyro.sample("z", dist.Normal(0, 1).expand([TOPICS]).to_event(1)))
            logits = jax.nn.softmax(z, axis=-1) @ topics + common
            numpyro.factor("counts", jnp.sum(counts * jax.nn.log_softmax(logits), axis=-1))

    def guide(counts: jax.Array) -> None:
        hidden = jax.nn.softplus(jnp.log1p(counts) @ weights("inner", (WORDS, UNITS)))
        mean = hidden @ weights("mean", (UNITS, TOPICS))
        scale_ = jnp.exp(hidden @ weights("log_scale", (UNITS, TOPICS)))
        with numpyro.plate("articles", counts.shape[0]):
            numpyro.sample("z", dist.Normal(mean, scale_).to_event(1))

    return Problem(model, (train,), guide, steps=3_000, rate=0.01, batch_size=64, particles=100)
