"""How fast the variational autoencoder trains: `ProximitySVI` over a loop by hand, and the orthogonal constraint.

taskset -c 1 python benchmarks/vae_speed.py
"""

import os
from itertools import pairwise

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import optax
from numpyro.infer import TraceMeanField_ELBO
from timing import scan, training_speeds

import proxvi
from proxvi_paper.models.bernoulli import softplus
from proxvi_paper.models.vae import autoencoder, encoder_weights

PIXELS, HIDDEN, LATENTS, BATCH = 784, 200, 100, 128
ITERATIONS = 50_000  # of the paper's runs
ADAM = optax.adam(1e-3)


def network(layers, x):
    for weights, bias in layers[:-1]:
        x = jax.nn.relu(x @ weights + bias)
    weights, bias = layers[-1]
    return x @ weights + bias


def negative_elbo(params, batch, key):
    mean, scale = jnp.split(network(params["encoder"], batch), 2, axis=-1)
    scale = softplus(scale)
    z = mean + scale * jax.random.normal(key, mean.shape)
    logits = network(params["decoder"], z)
    log_likelihood = -jnp.sum(softplus(jnp.where(batch == 1, -logits, logits)), axis=-1)
    divergence = jnp.sum(0.5 * (scale**2 + mean**2 - 1.0) - jnp.log(scale), axis=-1)
    return jnp.mean(divergence - log_likelihood)


def bare(steps, batch):
    """The loop that one would write without any library but Optax."""
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def layers(sizes, weights):
        return [(weights(next(keys), (m, n)), jnp.zeros(n)) for m, n in pairwise(sizes)]

    params = {
        "encoder": layers((PIXELS, HIDDEN, HIDDEN, 2 * LATENTS), jax.nn.initializers.orthogonal()),
        "decoder": layers((LATENTS, HIDDEN, HIDDEN, PIXELS), jax.nn.initializers.glorot_uniform()),
    }

    def step(carry, batch):
        params, state, key = carry
        key, now = jax.random.split(key)
        loss, grads = jax.value_and_grad(negative_elbo)(params, batch, now)
        updates, state = ADAM.update(grads, state)
        return (optax.apply_updates(params, updates), state, key), loss

    return scan(step, (params, ADAM.init(params), jax.random.key(0)), steps, batch)


def inference(steps, batch, constraint=()):
    networks = autoencoder(jax.random.key(0), pixels=PIXELS, latents=LATENTS, hidden=(HIDDEN, HIDDEN))
    svi = proxvi.ProximitySVI(*networks, ADAM, TraceMeanField_ELBO(), constraint)
    return scan(svi.update, svi.init(jax.random.key(0), batch), steps, batch)


def main():
    batch = jax.random.bernoulli(jax.random.key(1), 0.13, (BATCH, PIXELS)).astype(jnp.float32)
    orthogonal = proxvi.Proximity(
        lambda q, params: proxvi.orthogonal(encoder_weights(params)),
        magnitude=1e-3,
        relative=False,
        reference=proxvi.statistic_average(),
    )
    makers = {
        "bare JAX": bare,
        "ProximitySVI, no constraint": inference,
        "ProximitySVI, orthogonal": lambda *args: inference(*args, constraint=orthogonal),
    }
    training_speeds((__doc__ or "").splitlines()[0], makers, batch, ITERATIONS)


if __name__ == "__main__":
    main()
