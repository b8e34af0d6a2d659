"""What `ProximitySVI.update` costs over `numpyro.infer.SVI.update`, on a sigmoid belief network and an autoencoder.

taskset -c 1 python benchmarks/svi_cost.py
"""

import argparse
import os
from functools import partial
from typing import Any, cast

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from records import Row, add_json_option, write_record
from timing import HEADER, compare, flops, line

import proxvi

PIXELS, UNITS = 784, 200


def glorot(key, shape):
    return jax.nn.initializers.glorot_uniform()(jax.random.key(key), shape)


def sbn_model(batch):
    prior = numpyro.param("prior", jnp.zeros(UNITS))
    kernel: Any = numpyro.param("decoder", glorot(0, (UNITS, PIXELS)))
    bias: Any = numpyro.param("pixel_bias", jnp.zeros(PIXELS))
    with numpyro.plate("data", batch.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(logits=prior).to_event(1))
        numpyro.sample("x", dist.Bernoulli(logits=z @ kernel + bias).to_event(1), obs=batch)


def sbn_guide(batch):
    kernel, bias = numpyro.param("encoder", glorot(1, (PIXELS, UNITS))), numpyro.param("unit_bias", jnp.zeros(UNITS))
    with numpyro.plate("data", batch.shape[0]):
        numpyro.sample("z", dist.Bernoulli(logits=(batch - 0.13) @ kernel + bias).to_event(1))


def dense(name, key, inputs, outputs):
    kernel = jnp.asarray(numpyro.param(f"{name}_kernel", glorot(key, (inputs, outputs))))
    bias = jnp.asarray(numpyro.param(f"{name}_bias", jnp.zeros(outputs)))
    return lambda x: x @ kernel + bias


def vae_model(batch):
    first, second = dense("decoder1", 0, 100, UNITS), dense("decoder2", 1, UNITS, UNITS)
    pixels = dense("decoder3", 2, UNITS, PIXELS)
    with numpyro.plate("data", batch.shape[0]):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(100), 1.0).to_event(1))
        logits = pixels(jax.nn.relu(second(jax.nn.relu(first(z)))))
        numpyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=batch)


def vae_guide(batch):
    first, second = dense("encoder1", 3, PIXELS, UNITS), dense("encoder2", 4, UNITS, UNITS)
    loc, scale = dense("loc", 5, UNITS, 100), dense("scale", 6, UNITS, 100)
    with numpyro.plate("data", batch.shape[0]):
        hidden = jax.nn.relu(second(jax.nn.relu(first(batch))))
        numpyro.sample("z", dist.Normal(loc(hidden), jax.nn.softplus(scale(hidden))).to_event(1))


def constraint(reference=None):
    return proxvi.Proximity(
        proxvi.entropy,
        magnitude=optax.exponential_decay(1.0, 10_000, 1e-10),
        reference=reference or proxvi.statistic_average(),
    )


CASES = {
    "SBN, leave-one-out": (sbn_model, sbn_guide, proxvi.LeaveOneOutELBO(5), 20),
    "SBN, VIMCO": (sbn_model, sbn_guide, proxvi.VimcoELBO(5), 20),
    "SBN, TraceGraph": (sbn_model, sbn_guide, TraceGraph_ELBO(5), 20),
    "VAE, leave-one-out": (vae_model, vae_guide, proxvi.LeaveOneOutELBO(2), 128),
    "VAE, Trace": (vae_model, vae_guide, Trace_ELBO(), 128),
    "VAE, TraceMeanField": (vae_model, vae_guide, TraceMeanField_ELBO(), 128),
}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40, help="steps of each variant in a round")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="cases")
    add_json_option(parser)
    arguments = parser.parse_args()
    rows = []
    print(HEADER)
    for case in arguments.only:
        model, guide, loss, size = CASES[case]
        batch = jax.random.bernoulli(jax.random.key(1), 0.13, (size, PIXELS)).astype(jnp.float32)
        adam = optax.adam(1e-3, eps=1e-6)
        variants, work = {}, {}
        ours = partial(proxvi.ProximitySVI, model, guide, adam, loss)
        inferences = {
            "SVI": SVI(model, guide, adam, loss),
            "ProximitySVI": ours(constraint()),
            "speed limit, kept": ours(proxvi.SpeedLimit(over=1e9, range=1e18)),  # 1e9 nats may go in a step
            "speed limit, active": ours(proxvi.SpeedLimit(over=1e9)),  # nothing may go
        }
        for name, svi in inferences.items():
            state, update = svi.init(jax.random.key(0), batch), cast(Any, svi.update)

            def build(update=update, state=state, batch=batch):
                def run(state, batch):
                    return jax.lax.scan(lambda s, _: update(s, batch), state, length=arguments.steps)[0]

                compiled = jax.jit(run)
                return lambda: compiled(state, batch)

            variants[name] = build
            work[name] = flops(update, state, batch)
        work["SVI, again"] = work["SVI"]
        for name, (seconds, ratios) in compare(variants, rounds=arguments.rounds, steps=arguments.steps).items():
            more = work[name] / work["SVI"]
            rows.append(Row.of_ratios(f"{case}: {name}", ratios, seconds=seconds, flop_ratio=more))
            print(line(rows[-1]), flush=True)
    write_record(arguments.json, rows)


if __name__ == "__main__":
    main()
