"""A variational autoencoder of ten latents on handwritten digits."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from problems import Problem, digits

LATENTS, UNITS = 10, 64


def problem(scale: float = 1.0) -> Problem:
    train = digits()
    pixels = train.shape[1]
    glorot = jax.nn.initializers.glorot_normal()

    def layer(name: str, x: jax.Array, size: int) -> jax.Array:
        weights = jnp.asarray(numpyro.param(name, lambda key: scale * glorot(key, (x.shape[-1], size))))
        return x @ weights + jnp.asarray(numpyro.param(f"{name}_bias", jnp.zeros(size)))

    def model(x: jax.Array) -> None:
        with numpyro.plate("digits", x.shape[0]):
            z = jnp.asarray(numpyro.sample("z", dist.Normal(0, 1).expand([LATENTS]).to_event(1)))
            logits = layer("pixels", jax.nn.relu(layer("decoder", z, UNITS)), pixels)
            numpyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=x)

    def guide(x: jax.Array) -> None:
        hidden = jax.nn.relu(layer("encoder", x, UNITS))
        mean, deviation = layer("mean", hidden, LATENTS), jnp.exp(layer("log_scale", hidden, LATENTS))
        with numpyro.plate("digits", x.shape[0]):
            numpyro.sample("z", dist.Normal(mean, deviation).to_event(1))

    return Problem(
        model,
        (train,),
        guide,
        steps=5_000,
        rate=0.003,
        batch_size=50,
        particles=100,
    )
