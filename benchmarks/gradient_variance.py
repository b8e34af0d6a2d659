"""How noisy a gradient is: the variance of each estimator on the sigmoid belief network, at the start and trained.

    PROXVI_DATA=... python benchmarks/gradient_variance.py

Every estimator has 5 particles and sees the same 20 digits; the figure is the variance of the gradient, summed over
all parameters, over that of `LeaveOneOutELBO`. `Trace_ELBO` has no score function: of a discrete guide it gives a wrong
gradient, so its variance is printed with how far its mean is off.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from numpyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from records import Row, add_json_option, write_record
from svi_cost import sbn_guide, sbn_model

import proxvi
from proxvi_paper.datasets import binarized_mnist


def moments(elbo, params, batch, draws):
    """Mean gradient and summed variance, by a running sum."""

    @jax.jit
    def run(params, batch):
        def add(carry, key):
            grads = jax.grad(lambda p: elbo.loss(key, p, sbn_model, sbn_guide, batch))(params)
            first, second = carry
            return (optax.tree.add(first, grads), optax.tree.add(second, optax.tree.mul(grads, grads))), None

        zeros = optax.tree.zeros_like(params)
        (first, second), _ = jax.lax.scan(add, (zeros, zeros), jax.random.split(jax.random.key(1), draws))
        mean = optax.tree.scale(1 / draws, first)
        variance = optax.tree.sub(optax.tree.scale(1 / draws, second), optax.tree.mul(mean, mean))
        return mean, optax.tree.sum(variance)

    return run(params, batch)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=2_000)
    add_json_option(parser)
    arguments = parser.parse_args()
    data = jnp.asarray(binarized_mnist().train[:2_000], jnp.float32)
    svi = SVI(sbn_model, sbn_guide, optax.adam(1e-3), proxvi.LeaveOneOutELBO(5))
    start = svi.init(jax.random.key(0), data[:20])

    def step(state, key):
        return svi.update(state, data[jax.random.randint(key, (20,), 0, len(data))])[0], None

    trained, _ = jax.lax.scan(step, start, jax.random.split(jax.random.key(2), arguments.steps))
    estimators = {
        "LeaveOneOutELBO": proxvi.LeaveOneOutELBO(5),
        "TraceGraph_ELBO (score function)": TraceGraph_ELBO(5),
        "Trace_ELBO (biased)": Trace_ELBO(5),
    }
    rows = []
    for when, state in {"at the start": start, f"after {arguments.steps} steps": trained}.items():
        params = svi.get_params(state)
        print(f"\n{when}\n{'':34} {'variance':>10} {'over ours':>10} {'mean is off by':>15}")
        ours, reference = None, None
        for name, elbo in estimators.items():
            mean, variance = moments(elbo, params, data[:20], arguments.draws)
            reference = mean if reference is None else reference
            ours = variance if ours is None else ours
            off = optax.tree.norm(optax.tree.sub(mean, reference)) / optax.tree.norm(reference)
            rows.append(Row(f"{name}, variance {when}", float(variance / ours)))
            print(f"{name:34} {variance:10.4g} {variance / ours:10.2f} {100 * off:14.1f}%")
    write_record(arguments.json, rows)


if __name__ == "__main__":
    main()
