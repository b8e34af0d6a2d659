"""How fast a held-out likelihood is estimated: `evaluate` over a loop written by hand, and minutes for all of MNIST's.

taskset -c 1 python benchmarks/evaluation_speed.py
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from records import Row, add_json_option, write_record
from sbn_speed import PIXELS, UNITS, log_bernoulli
from timing import HEADER, compare, line

import proxvi
from proxvi.evaluation import evaluate
from proxvi_paper.models.sbn import belief_network

PAPER = 10_000 * 5_000  # digits × samples
FLOPS = 2 * UNITS * PIXELS  # of the product that takes a sample to its pixels; all else is less than 1% of it


def by_hand(params, digits, samples, chunk):
    """The loop that one would write for this one network: a digit at a time, its samples in chunks."""

    @jax.jit
    def of_digit(params, key, x):
        logits = (x - 0.13) @ params["encoder1_weights"] + params["encoder1_bias"]

        def some(merged, key):
            z = jax.random.bernoulli(key, jax.nn.sigmoid(logits), (chunk, UNITS)).astype(jnp.float32)
            pixels = z @ params["decoder1_weights"] + params["decoder1_bias"]
            log_p = log_bernoulli(jnp.broadcast_to(params["prior"], z.shape), z) + log_bernoulli(pixels, x)
            w = log_p - log_bernoulli(jnp.broadcast_to(logits, z.shape), z)
            return (jnp.logaddexp(merged[0], jax.nn.logsumexp(w)), merged[1] + jnp.sum(w)), None

        start = (jnp.array(-jnp.inf), jnp.array(0.0))
        (log_sum, total), _ = jax.lax.scan(some, start, jax.random.split(key, samples // chunk))
        return log_sum - jnp.log(samples), total / samples

    def run():
        found = [of_digit(params, jax.random.key(number), x) for number, x in enumerate(digits)]
        return np.mean(np.array(found), axis=0)

    return run


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--digits", type=int, default=40)
    parser.add_argument("--samples", type=int, default=5_000)
    parser.add_argument("--chunks", type=int, nargs="*", default=[250, 1_000], help="sizes of `chunk` to try")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--copies", type=int, default=2, help="how often the loop by hand is compiled")
    add_json_option(parser)
    arguments = parser.parse_args()
    digits = np.asarray(jax.random.bernoulli(jax.random.key(1), 0.13, (arguments.digits, PIXELS)), np.float32)
    network = belief_network(np.full(PIXELS, 0.13))
    svi = proxvi.ProximitySVI(*network, optax.adam(1e-3), proxvi.LeaveOneOutELBO(2), ())
    params = svi.get_params(svi.init(jax.random.key(0), digits))

    def ours(chunk):
        key = jax.random.key(0)
        return lambda: evaluate(key, *network, params, digits, num_samples=arguments.samples, chunk=chunk).elbo

    pairs = arguments.digits * arguments.samples
    variants = {"by hand": lambda: by_hand(params, digits, arguments.samples, min(250, arguments.samples))}
    variants |= {f"evaluate, chunk={chunk:,}": lambda chunk=chunk: ours(chunk) for chunk in arguments.chunks}
    results = compare(variants, rounds=arguments.rounds, steps=pairs // 1_000, copies=arguments.copies)
    print(HEADER.replace("  FLOPs", "").replace("ms a step", " µs a pair"), f"{'GFLOP/s':>8} {'minutes':>8}")
    rows = []
    for name, (seconds, ratios) in results.items():
        rate, minutes = FLOPS / seconds * 1e3 / 1e9, seconds / 1e3 * PAPER / 60
        rows.append(Row.of_ratios(name, ratios, seconds=seconds, seconds_of="1,000 pairs of a digit and a sample"))
        print(line(rows[-1]).rstrip(), f"{rate:8.1f} {minutes:8.1f}")
    print("a pair: of a digit and a sample; minutes: for 10,000 digits with 5,000 samples each on this core")
    write_record(arguments.json, rows)


if __name__ == "__main__":
    main()
