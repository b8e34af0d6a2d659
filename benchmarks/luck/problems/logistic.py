"""A control: logistic regression of tumours, which has one optimum."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from problems import Problem, columns, standardized


def problem(scale: float = 1.0) -> Problem:
    *features, benign = columns("breast_cancer.csv")
    x, y = standardized(np.stack(features, axis=1)), jnp.asarray(benign)

    def model(x: jax.Array, y: jax.Array) -> None:
        slope = jnp.asarray(numpyro.sample("slope", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1)))
        intercept = numpyro.sample("intercept", dist.Normal(0, 2))
        numpyro.sample("y", dist.Bernoulli(logits=x @ slope + intercept), obs=y)

    return Problem(model, (x[:455], y[:455]), scale=scale, steps=6_000, control=True)
