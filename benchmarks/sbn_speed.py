"""How fast the sigmoid belief network trains: `ProximitySVI` over a loop written by hand, and hours for a whole run.

taskset -c 1 python benchmarks/sbn_speed.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from timing import scan, training_speeds

import proxvi
from proxvi_paper.models import sbn
from proxvi_paper.models.bernoulli import softplus

PIXELS, UNITS, BATCH, PARTICLES = 784, 200, 20, 5
ITERATIONS = 4_000_000  # of the paper's runs
ADAM = optax.adam(1e-3, eps=1e-6)


def log_bernoulli(logits, value):
    each = -softplus(jnp.where(value == 1, -logits, logits))
    return each @ jnp.ones(each.shape[-1])


def negative_elbo(params, batch, key):
    """Its gradient is the leave-one-out estimate; the auxiliary value is −ELBO itself."""
    logits = (batch - 0.13) @ params["encoder"] + params["unit_bias"]
    z = jax.random.bernoulli(key, jax.nn.sigmoid(logits), (PARTICLES, BATCH, UNITS)).astype(jnp.float32)
    log_q = log_bernoulli(jnp.broadcast_to(logits, z.shape), z)
    pixels = z @ params["decoder"] + params["pixel_bias"]
    log_p = log_bernoulli(jnp.broadcast_to(params["prior"], z.shape), z) + log_bernoulli(pixels, batch)
    elbo = log_p - log_q
    signal = jax.lax.stop_gradient(elbo - (jnp.sum(elbo, axis=0) - elbo) / (PARTICLES - 1))
    return -jnp.mean(signal * log_q + log_p), -jnp.mean(elbo)


def bare(steps, batch):
    """The loop that one would write without any library but Optax."""
    keys, glorot = jax.random.split(jax.random.key(0)), jax.nn.initializers.glorot_uniform()
    params = {
        "encoder": glorot(keys[0], (PIXELS, UNITS)),
        "unit_bias": jnp.zeros(UNITS),
        "decoder": glorot(keys[1], (UNITS, PIXELS)),
        "pixel_bias": jnp.zeros(PIXELS),
        "prior": jnp.zeros(UNITS),
    }

    def step(carry, batch):
        params, state, key = carry
        key, now = jax.random.split(key)
        (_, loss), grads = jax.value_and_grad(negative_elbo, has_aux=True)(params, batch, now)
        updates, state = ADAM.update(grads, state)
        return (optax.apply_updates(params, updates), state, key), loss

    return scan(step, (params, ADAM.init(params), jax.random.key(0)), steps, batch)


def inference(steps, batch, constraint=(), units=(UNITS,)):
    network = sbn.belief_network(jnp.full(PIXELS, 0.13), units=units)
    svi = proxvi.ProximitySVI(*network, ADAM, proxvi.LeaveOneOutELBO(PARTICLES), constraint)
    return scan(svi.update, svi.init(jax.random.key(0), batch), steps, batch)


def numpyros(steps, batch):
    """The same with NumPyro's own Bernoulli."""
    ours = sbn.Bernoulli
    sbn.Bernoulli = lambda logits: dist.Bernoulli(logits=logits)
    try:
        return inference(steps, batch)
    finally:
        sbn.Bernoulli = ours


def main():
    batch = jax.random.bernoulli(jax.random.key(1), 0.13, (BATCH, PIXELS)).astype(jnp.float32)
    entropy = proxvi.Proximity(
        proxvi.entropy,
        magnitude=optax.exponential_decay(1.0, ITERATIONS, 1e-10),
        reference=proxvi.statistic_average(),
    )
    makers = {
        "bare JAX": bare,
        "ProximitySVI, no constraint": inference,
        "ProximitySVI, entropy": lambda *args: inference(*args, constraint=entropy),
        "NumPyro's Bernoulli": numpyros,
        "3 layers, no constraint": lambda *args: inference(*args, units=(UNITS,) * 3),
    }
    training_speeds((__doc__ or "").splitlines()[0], makers, batch, ITERATIONS)
    print("by the README of their code, the authors took about half a day a run on a Tesla P100")


if __name__ == "__main__":
    main()
