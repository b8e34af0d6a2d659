"""Whether `fit` keeps its memory: resident size after 10^5 and after 10^6 tiny steps, and how often it compiled.

python benchmarks/memory.py
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from records import Row, add_json_option, write_record

import proxvi


def resident():
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(steps=1_000_000):
    """Return the ratio of the resident size at the end to that after a tenth of the steps, and the traces since."""
    traces, seen = 0, {}

    def model(x):
        nonlocal traces
        traces += 1
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", 100, subsample_size=x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    def callback(step, _):
        seen[step] = (resident(), traces)

    svi = SVI(model, AutoNormal(model), optax.adam(0.01), Trace_ELBO())
    every = steps // 100
    reporting = proxvi.Reporting(every=every, callback=callback)
    proxvi.fit(svi, jax.random.key(0), steps, jnp.zeros(100), batch_size=10, reporting=reporting)
    (early, before), (late, after) = seen[steps // 10], seen[steps]
    print(f"resident after {steps // 10:,} steps {early / 2**20:.0f} MiB, after {steps:,} {late / 2**20:.0f} MiB")
    print(f"ratio {late / early:.4f}; traces of the model in between: {after - before}")
    return late / early, after - before


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    add_json_option(parser)
    arguments = parser.parse_args()
    write_record(arguments.json, [Row("resident size, end over start", main(arguments.steps)[0])])
