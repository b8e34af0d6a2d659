"""Mitochondrial reads of 81 cells: a binomial mixture of three clones."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

from problems import DATA, Problem


def problem(scale: float = 1.0) -> Problem:
    files = (DATA / f"mitodna_{name}.csv" for name in ("alternative", "depth"))
    alternative, depth = (jnp.asarray(np.loadtxt(file, delimiter=","))[..., None] for file in files)

    def model() -> None:
        w = jnp.asarray(numpyro.sample("w", dist.Dirichlet(jnp.ones(3))))
        p = numpyro.sample("p", dist.Beta(1, 1).expand([alternative.shape[0], 1, 3]).to_event(3))
        p = jnp.clip(jnp.asarray(p), 1e-6, 1 - 1e-6)  # 10⁴ reads a variant: the logarithm of 0 would end the run
        reads = jnp.sum(alternative * jnp.log(p) + (depth - alternative) * jnp.log1p(-p), axis=0)
        numpyro.factor("x", jnp.sum(logsumexp(jnp.log(w) + reads, axis=1)))

    return Problem(model, scale=scale)
