"""A race in a process of its own, to be killed: `python killed_race.py FOLDER` prints the winner and its bits."""

import hashlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi

Y = jnp.sin(1.3 * jnp.arange(60))


def wave(y: Any) -> None:
    frequency = jnp.asarray(numpyro.sample("frequency", dist.Uniform(0.0, 3.0)))
    numpyro.sample("y", dist.Normal(jnp.sin(frequency * jnp.arange(60)), 0.3).to_event(1), obs=y)


if __name__ == "__main__":
    svi = SVI(wave, AutoNormal(wave), optax.adam(0.01), Trace_ELBO())
    print("racing", flush=True)
    result = proxvi.race(
        svi,
        jax.random.key(0),
        400_000,
        Y,
        checkpointing=proxvi.Checkpointing(sys.argv[1], every=0.0),
        progress_bar=False,
    )
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(result.params))).hexdigest()
    print(f"start {result.start}, ELBO {result.elbo}, {digest}", flush=True)
