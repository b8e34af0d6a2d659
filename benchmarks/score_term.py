"""Does the score term matter? Entropy PVI on a belief network of three layers, with it and without.

    PROXVI_DATA=... python benchmarks/score_term.py

The entropy of an upper layer depends on the sampled layer below, so its gradient has a score term for the parameters
below (`E[f ∇ log q]`). Samples carry no gradient, so automatic differentiation alone leaves it out. A small network
is trained both ways from the paper's two starts. The table has the ELBO of validation digits at the end, mean and
standard deviation over seeds, and the time of a step over that without the term.
"""

import argparse
import os
from dataclasses import replace

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from records import Row, add_json_option, write_record
from timing import compare, flops

import proxvi
from proxvi_paper.datasets import binarized_mnist
from proxvi_paper.models.sbn import BAD, GOOD, belief_network

ROWS = 2_000
STARTS = {"good": GOOD, "bad": BAD}


def inference(mean, start, units, steps, *, score):
    """Entropy PVI as in table 2, at another size; without `score` the gradient is the one that lacks the term."""
    decay = optax.exponential_decay(1.0, steps, 1e-10)
    constraint = proxvi.Proximity(proxvi.entropy, magnitude=decay, reference=proxvi.statistic_average())
    network = belief_network(mean, units=units, start=start)
    svi = proxvi.ProximitySVI(*network, optax.adam(1e-3, eps=1e-6), proxvi.LeaveOneOutELBO(5), constraint)
    initialise = svi.init

    def init(*args, **kwargs):
        state = initialise(*args, **kwargs)
        if not score:
            svi._initialised = replace(svi._objective, has_sampled_parents=False)
        return state

    svi.init = init
    return svi


def train(svi, train_rows, valid_rows, steps, key):
    """The ELBO of the validation digits after `steps` steps."""
    init_key, batch_key, final_key = jax.random.split(key, 3)

    def step(state, t):
        index = jax.random.randint(jax.random.fold_in(batch_key, t), (20,), 0, ROWS)
        return svi.update(state, train_rows[index])[0], None

    state = svi.init(init_key, train_rows[:20])
    state, _ = jax.lax.scan(step, state, jnp.arange(steps))
    elbo = proxvi.LeaveOneOutELBO(100, vectorize_particles=False)
    return -elbo.loss(final_key, svi.get_params(state), svi.model, svi.guide, valid_rows)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--units", type=int, default=30, help="in each of the three layers")
    parser.add_argument("--rounds", type=int, default=20, help="of the timing")
    add_json_option(parser)
    arguments = parser.parse_args()
    digits = binarized_mnist()
    rows, valid = (jnp.asarray(part, jnp.float32) for part in (digits.train[:ROWS], digits.valid[:500]))
    units, keys = (arguments.units,) * 3, jax.random.split(jax.random.key(0), arguments.seeds)
    table = []
    print(f"{'start':8} {'score term':12} {'ELBO':>9} {'sd':>6}")
    for name, start in STARTS.items():
        ended = {}
        for score in (False, True):
            svi = inference(digits.train.mean(0), start, units, arguments.steps, score=score)
            found = jax.jit(
                lambda keys, svi=svi: jax.lax.map(lambda k: train(svi, rows, valid, arguments.steps, k), keys)
            )
            ended[score] = np.asarray(found(keys))
            spread = np.std(ended[score], ddof=1) if arguments.seeds > 1 else 0.0
            print(f"{name:8} {'with' if score else 'without':12} {ended[score].mean():9.2f} {spread:6.2f}", flush=True)
        gained = ended[True] - ended[False]
        table.append(
            Row(f"{name}: nats gained by the term", float(gained.mean()), float(gained.min()), float(gained.max()))
        )
        print(f"{name:8} {'gained':12} {gained.mean():9.2f}   (of each seed: {np.round(gained, 2)})", flush=True)

    variants, work = {}, {}
    for score in (False, True):
        svi = inference(digits.train.mean(0), GOOD, (200,) * 3, 10_000, score=score)
        state, batch, title = svi.init(jax.random.key(0), rows[:20]), rows[:20], "with" if score else "without"

        def build(update=svi.update, state=state, batch=batch):
            run = jax.jit(lambda s, b: jax.lax.scan(lambda s, _: (update(s, b)[0], None), s, length=20)[0])
            return lambda: run(state, batch)

        variants[title], work[title] = build, flops(svi.update, state, batch)
    for title, (seconds, ratios) in compare(variants, rounds=arguments.rounds, steps=20).items():
        more = work.get(title, work["without"]) / work["without"]
        table.append(Row.of_ratios(f"step of 200-200-200, {title}", ratios, seconds=seconds, flop_ratio=more))
        print(f"step of 200-200-200, {title:15} {1e3 * seconds:8.2f} ms {np.median(ratios):7.3f} {more:7.3f} FLOPs")
    write_record(arguments.json, table)


if __name__ == "__main__":
    main()
