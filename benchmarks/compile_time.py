"""How much longer a step takes to compile: `ProximitySVI` over `numpyro.infer.SVI`, alone and under `vmap`.

    python benchmarks/compile_time.py

The seconds are those of `jax.jit(svi.update).lower(...).compile()`, tracing included, of a fresh function each time.
They are the processor's: those of the clock would count other work on the machine. All variants take turns, and the
median counts. `vmap` is over 8 states.
"""

import argparse
import os
import time
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from records import Row, add_json_option, write_record
from svi_cost import PIXELS, sbn_guide, sbn_model

import proxvi

LANES = 8


def hierarchical(groups, y):
    """Regression with a slope and an intercept for each of 20 groups."""
    location = numpyro.sample("location", dist.Normal(jnp.zeros(2), 10.0).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(jnp.ones(2)).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 20):
        effects = jnp.asarray(numpyro.sample("effects", dist.Normal(location, scale).to_event(1)))
    x = jnp.linspace(0.0, 1.0, len(y))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effects[groups, 0] + effects[groups, 1] * x, noise), obs=y)


def mixture(x):
    """Three clusters with the assignments summed out."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    means = numpyro.sample("means", dist.Normal(jnp.zeros(3), 10.0).to_event(1))
    scales = numpyro.sample("scales", dist.HalfNormal(jnp.ones(3)).to_event(1))
    with numpyro.plate("rows", len(x)):
        clusters = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(means, scales))
        numpyro.sample("x", clusters, obs=x)


def cases():
    """Model, guide, ELBO and data by name."""
    rows = jax.random.normal(jax.random.key(0), (200,))
    digits = jax.random.bernoulli(jax.random.key(1), 0.13, (20, PIXELS)).astype(jnp.float32)
    return {
        "hierarchical": (hierarchical, AutoNormal(hierarchical), Trace_ELBO(), (jnp.arange(200) % 20, rows)),
        "mixture": (mixture, AutoNormal(mixture), Trace_ELBO(), (rows,)),
        "network": (sbn_model, sbn_guide, proxvi.LeaveOneOutELBO(5), (digits,)),
    }


def compile_once(svi, data, *, lanes):
    """Seconds of one compilation from nothing."""
    state = svi.init(jax.random.key(0), *data)
    if lanes:
        state = jax.tree.map(lambda x: jnp.stack([x] * LANES), state)

    def step(state):
        return svi.update(state, *data)

    jax.clear_caches()  # otherwise inner functions that a variant before has traced would be free
    began = time.process_time()
    jax.jit(jax.vmap(step) if lanes else step).lower(state).compile()
    return time.process_time() - began


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=list(cases()), default=list(cases()), help="cases")
    add_json_option(parser)
    arguments = parser.parse_args()
    decay = optax.exponential_decay(1.0, 10_000, 1e-10)
    constraints = {
        "parameter average": proxvi.Proximity(proxvi.entropy, magnitude=decay),
        "statistic average": proxvi.Proximity(proxvi.entropy, magnitude=decay, reference=proxvi.statistic_average()),
        "speed limit": proxvi.SpeedLimit(over=5_000),
    }
    rows = []
    print(f"{'':40} {'CPU s':>8} {'ratio':>6} {'10% to 90%':>14}")
    for name in arguments.only:
        model, guide, loss, data = cases()[name]
        ours = partial(proxvi.ProximitySVI, model, guide, optax.adam(1e-3), loss)
        variants = {"SVI": SVI(model, guide, optax.adam(1e-3), loss)}
        variants |= {title: ours(constraint) for title, constraint in constraints.items()}
        for lanes in (False, True):
            seconds = {title: [] for title in variants}
            for _ in range(arguments.rounds):
                for title, svi in variants.items():
                    seconds[title].append(compile_once(svi, data, lanes=lanes))
            for title, times in seconds.items():
                ratios = np.array(times) / np.array(seconds["SVI"])
                full = f"{name}{', vmap' if lanes else ''}: {title}"
                rows.append(
                    Row.of_ratios(
                        full, ratios, seconds=float(np.median(times)), seconds_of="a compilation, of the processor"
                    )
                )
                low, high = rows[-1].low or 0.0, rows[-1].high or 0.0
                spread = f"{low:.2f} to {high:.2f}"
                print(f"{full:40} {np.median(times):8.2f} {rows[-1].ratio:6.2f} {spread:>14}", flush=True)
    write_record(arguments.json, rows)


if __name__ == "__main__":
    main()
