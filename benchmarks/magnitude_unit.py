"""The unit of a magnitude: two candidates at the starts of the paper's problems, and how exact it must be.

    PROXVI_DATA=... python benchmarks/magnitude_unit.py

The paper's unit is the size of the first loss. The other candidate is the ratio of the lengths of two gradients, that
of the loss over that of the statistic; no constant in the loss changes it. Both are averaged over the first ten steps
of plain Adam. Of each problem the table has the median over seeds and the largest value over the smallest. "no slope"
means that the statistic's gradient is 0: an entropy is flat at its maximum, where figure 1 starts.

Then figure 1's model is fitted with magnitudes of many sizes, to see how wrong a unit may be.
"""

import argparse
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO
from records import Row, add_json_option, write_record

import proxvi
from proxvi_paper.datasets import binarized_mnist
from proxvi_paper.experiments import figure_1
from proxvi_paper.experiments.descent import descend
from proxvi_paper.models import factor
from proxvi_paper.models.sbn import BAD, GOOD, belief_network
from proxvi_paper.models.vae import autoencoder

STEPS = 10  # of which a unit is the mean
FACTORS = [10.0**power for power in range(-5, 4)]


def ratio(loss_gradient, statistic_gradient):
    """Length of the loss's gradient over that of the statistic's, of the parameters on which the statistic depends."""
    pairs = list(zip(jax.tree.leaves(loss_gradient), jax.tree.leaves(statistic_gradient), strict=True))
    depends = [(a, b, jnp.any(b != 0)) for a, b in pairs]
    return jnp.sqrt(sum(jnp.where(d, jnp.sum(a**2), 0.0) for a, _, d in depends)) / optax.tree.norm(
        [b for _, b, _ in depends]
    )


def factor_units(mean, x):
    """Both units on figure 1's model, from one start."""
    optimizer = optax.adam(0.1, b2=0.99)
    params = factor.start(mean)

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(lambda p: -factor.elbo(p, x))(params)
        slope = jax.grad(lambda p: proxvi.entropy(factor.posterior(p), total=True))(params)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), (jnp.abs(loss), ratio(grads, slope))

    return jax.lax.scan(step, (params, optimizer.init(params)), length=STEPS)[1]


def digit_units(networks, loss, batch_size, data, key):
    """Both units on a model of digits, from one seed."""
    model, guide = networks
    svi = SVI(model, guide, optax.adam(1e-3), loss)
    key, batch_key = jax.random.split(key)
    batches = data[jax.random.randint(batch_key, (STEPS, batch_size), 0, len(data))]

    def total_entropy(params, key, batch):
        fitted = handlers.substitute(handlers.seed(guide, key), data=params)
        sites = handlers.trace(fitted).get_trace(batch).values()
        return sum(jnp.mean(proxvi.entropy(s["fn"], total=True)) for s in sites if s["type"] == "sample")

    def step(state, batch):
        params, key = svi.get_params(state), state.rng_key
        value, grads = jax.value_and_grad(lambda p: loss.loss(key, p, model, guide, batch))(params)
        slope = jax.grad(total_entropy)(params, key, batch)
        return svi.update(state, batch)[0], (jnp.abs(value), ratio(grads, slope))

    return jax.lax.scan(step, svi.init(key, batches[0]), batches)[1]


def share_free(trial, scale):
    """The share of figure 1's starts that is not trapped, with `scale` times the paper's magnitude."""
    x, means = figure_1.data_sets(trial), figure_1.ring(trial.starts)
    decay = optax.exponential_decay(scale, trial.steps, trial.gamma)
    constraint = proxvi.Proximity(lambda p: proxvi.entropy(factor.posterior(p)), magnitude=decay)
    optimizer = proxvi.proximity(optax.adam(trial.learning_rate, b2=0.99), constraint)

    def fit(x, mean):
        params, elbos = descend(lambda p, heat: factor.elbo(p, x, heat), optimizer, factor.start(mean), trial.steps)
        return params.means, elbos[-1]

    ended, elbos = jax.jit(jax.vmap(jax.vmap(fit, (None, 0)), (0, None)))(x, means)
    return figure_1.judge(elbos, ended, figure_1.from_the_truth(replace(trial, method="VI")))


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--starts", type=int, default=20, help="of figure 1, for each of two data sets")
    parser.add_argument("--steps", type=int, default=10_000, help="of figure 1")
    add_json_option(parser)
    arguments = parser.parse_args()
    digits = binarized_mnist()
    data, mean = jnp.asarray(digits.train[:2_000], jnp.float32), digits.train.mean(0)
    elbo, keys = proxvi.LeaveOneOutELBO(5), jax.random.split(jax.random.key(0), arguments.seeds)
    ring = figure_1.ring(arguments.seeds + (arguments.seeds % 8 == 0))  # of a multiple of 8 two are on a saddle point
    x = factor.simulate(jax.random.key(0), figure_1.TRUTH)
    network = partial(belief_network, mean)
    cases = {
        "figure 1": lambda: jax.vmap(lambda start: factor_units(start, x))(ring),
        "table 1, good": lambda: jax.lax.map(partial(digit_units, network(start=GOOD), elbo, 20, data), keys),
        "table 1, bad": lambda: jax.lax.map(partial(digit_units, network(start=BAD), elbo, 20, data), keys),
        "table 2, good": lambda: jax.lax.map(
            partial(digit_units, network(start=GOOD, units=(200,) * 3), elbo, 20, data), keys
        ),
        "table 3": lambda: jax.lax.map(
            partial(digit_units, autoencoder(jax.random.key(1)), TraceMeanField_ELBO(), 128, data), keys
        ),
    }
    rows = []
    print(f"{'':16} {'first loss':>12} {'max/min':>8} {'gradients':>12} {'max/min':>8}")
    for name, measure in cases.items():
        losses, ratios = (np.asarray(values).mean(axis=1) for values in jax.jit(measure)())
        printed = ""
        for unit, values in {"first loss": losses, "gradients": ratios}.items():
            if not np.all(np.isfinite(values)):
                printed += f" {'no slope':>12} {'':8}"
                continue
            rows.append(Row(f"{name}: {unit}, largest over smallest", float(values.max() / values.min())))
            printed += f" {np.median(values):12.4g} {rows[-1].ratio:8.2f}"
        print(f"{name:16}{printed}", flush=True)
    print(f"\n{'magnitude':>10} {'not trapped':>12} {'median gap':>11} {'worst gap':>10}   (figure 1)")
    trial = figure_1.Trial("PVI, entropy", data_sets=2, starts=arguments.starts, steps=arguments.steps)
    for scale in FACTORS:
        found = share_free(trial, scale)
        rows.append(Row(f"figure 1, magnitude {scale:g}: not trapped", found["free"]))
        print(f"{scale:10g} {found['free']:12.0%} {found['median_gap']:11.2f} {found['worst_gap']:10.2f}", flush=True)
    write_record(arguments.json, rows)


if __name__ == "__main__":
    main()
