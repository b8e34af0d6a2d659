"""A sigmoid belief network of 30 units on handwritten digits."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import proxvi
from problems import Problem, digits

UNITS = 30


def problem(scale: float = 1.0) -> Problem:
    train = digits()
    pixels, mean = train.shape[1], train.mean(0)
    glorot = jax.nn.initializers.glorot_normal()

    def weights(name: str, shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(numpyro.param(name, lambda key: scale * glorot(key, shape)))

    def model(x: jax.Array) -> None:
        prior = numpyro.param("prior", jnp.zeros(UNITS))
        with numpyro.plate("digits", x.shape[0]):
            z = jnp.asarray(numpyro.sample("z", dist.Bernoulli(logits=prior).to_event(1)), jnp.float32)
            logits = z @ weights("weights", (UNITS, pixels)) + jnp.asarray(numpyro.param("bias", jnp.zeros(pixels)))
            numpyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=x)

    def guide(x: jax.Array) -> None:
        logits = (x - mean) @ weights("encoder", (pixels, UNITS)) + jnp.asarray(
            numpyro.param("encoder_bias", jnp.zeros(UNITS))
        )
        with numpyro.plate("digits", x.shape[0]):
            numpyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))

    return Problem(
        model,
        (train,),
        guide,
        steps=4_000,
        rate=0.01,
        batch_size=50,
        loss=proxvi.LeaveOneOutELBO(5),
        particles=50,
    )
