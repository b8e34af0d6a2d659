"""What a constraint costs: step time and FLOPs of a sigmoid belief network, with it over without it.

    python benchmarks/cost.py

The network is written by hand (784–200, batch 20, 5 samples, leave-one-out gradient), so that nothing but the
constraint differs.
"""

import argparse
import os

# One thread, so that the ratio is of work and not of scheduling; must be set before JAX starts.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from records import Row, add_json_option, write_record
from timing import HEADER, compare, flops, line

import proxvi

PIXELS, UNITS, BATCH, SAMPLES = 784, 200, 20, 5


def encode(params, batch):
    return (batch - 0.13) @ params["encoder"]["kernel"] + params["encoder"]["bias"]


def log_bernoulli(logits, value):
    return jnp.sum(value * logits - jax.nn.softplus(logits), axis=-1)


def surrogate(params, batch, key):
    """Its gradient is the leave-one-out estimate of that of −ELBO; the auxiliary value is −ELBO itself."""
    logits = encode(params, batch)
    z = jax.random.bernoulli(key, jax.nn.sigmoid(logits), (SAMPLES, BATCH, UNITS)).astype(jnp.float32)
    log_q = log_bernoulli(logits, z)
    pixels = z @ params["decoder"]["kernel"] + params["decoder"]["bias"]
    elbo = log_bernoulli(params["prior"], z) + log_bernoulli(pixels, batch) - log_q
    others = (jnp.sum(elbo, axis=0) - elbo) / (SAMPLES - 1)
    score = jax.lax.stop_gradient(elbo - others) * log_q
    return -jnp.mean(score + elbo), -jnp.mean(elbo)


def initial_parameters(key):
    keys = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "encoder": {"kernel": glorot(keys[0], (PIXELS, UNITS)), "bias": jnp.zeros(UNITS)},
        "decoder": {"kernel": glorot(keys[1], (UNITS, PIXELS)), "bias": jnp.zeros(PIXELS)},
        "prior": jnp.zeros(UNITS),
    }


def optimizers(steps):
    adam = optax.adam(1e-3, eps=1e-6)

    def constrained(reference):
        return proxvi.proximity(
            adam,
            proxvi.Proximity(
                lambda params, batch: proxvi.entropy(dist.Bernoulli(logits=encode(params, batch)).to_event(1)),
                magnitude=optax.exponential_decay(1.0, steps, 1e-10),
                reference=reference,
            ),
            example={"batch": jax.ShapeDtypeStruct((BATCH, PIXELS), jnp.float32)},
        )

    return {
        "plain Adam": optax.with_extra_args_support(adam),
        "statistic average": constrained(proxvi.statistic_average()),
        "parameter average": constrained(proxvi.parameter_average()),
    }


def make_step(optimizer):
    def step(carry, batch_and_key):
        params, state = carry
        batch, key = batch_and_key
        (_, loss), grads = jax.value_and_grad(surrogate, has_aux=True)(params, batch, key)
        updates, state = optimizer.update(grads, state, params, value=loss, batch=batch)
        return (optax.apply_updates(params, updates), state), loss

    return step


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=200, help="steps of each variant in a round")
    add_json_option(parser)
    arguments = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), arguments.steps)
    batches = jax.random.bernoulli(jax.random.key(1), 0.13, (arguments.steps, BATCH, PIXELS)).astype(jnp.float32)
    params = initial_parameters(jax.random.key(2))
    variants, work = {}, {}
    for name, optimizer in optimizers(10_000).items():
        step, carry = make_step(optimizer), (params, optimizer.init(params))
        work[name] = flops(step, carry, (batches[0], keys[0]))

        def build(step=step, carry=carry):
            run = jax.jit(lambda carry, batches, keys: jax.lax.scan(step, carry, (batches, keys))[0])
            return lambda: run(carry, batches, keys)

        variants[name] = build
    work["plain Adam, again"] = work["plain Adam"]
    rows = []
    print(HEADER)
    for name, (seconds, ratios) in compare(variants, rounds=arguments.rounds, steps=arguments.steps).items():
        rows.append(Row.of_ratios(name, ratios, seconds=seconds, flop_ratio=work[name] / work["plain Adam"]))
        print(line(rows[-1]))
    write_record(arguments.json, rows)


if __name__ == "__main__":
    main()
