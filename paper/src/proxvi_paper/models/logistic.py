"""Bayesian logistic regression with a mean-field normal approximation: the paper's control case, with one mode."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from proxvi_paper.models.bernoulli import softplus

__all__ = ["Weights", "elbo", "posterior", "prior"]

NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
NODE_WEIGHTS = NODE_WEIGHTS / NODE_WEIGHTS.sum()


class Weights(NamedTuple):
    """What is fitted: mean and log standard deviation of each weight."""

    mean: Array
    log_scale: Array


def posterior(params: Weights) -> dist.Distribution:
    """The approximation `q(w) = Π_j Normal(m_j, s_j²)`."""
    return dist.Normal(params.mean, jnp.exp(params.log_scale)).to_event(1)


def prior(params: Weights) -> dist.Distribution:
    """`p(w) = Normal(0, I)`, of as many weights."""
    return dist.Normal(jnp.zeros_like(params.mean), 1.0).to_event(1)


def elbo(params: Weights, x: Array, y: Array, temperature: Array | float = 1.0) -> Array:
    """The ELBO, exactly up to quadrature; at a temperature other than 1 the annealed one.

        L = Σ_i E[log σ((2y_i − 1) a_i)] + E[log p(w)] + T · H(q),   a_i ~ Normal(x_i · m, x_i² · s²)

    A linear predictor of normal weights is normal. So each expectation is an integral in one dimension, which we
    compute by Gauss-Hermite quadrature with 64 nodes.

    Args:
        params: the approximation.
        x: rows of features.
        y: their labels, 0 or 1.
        temperature: of the entropy.

    Returns:
        The ELBO of all data.

    Example:
        >>> x, y = jnp.array([[1.0], [-1.0]]), jnp.array([1, 0])
        >>> at_prior = Weights(jnp.zeros(1), jnp.zeros(1))
        >>> f"{elbo(at_prior, x, y):.4f}"
        '-1.6121'
    """
    scale = jnp.exp(params.log_scale)
    variance = x**2 @ scale**2
    known = variance == 0.0  # a row of zeros, where the square root has no gradient
    mean, spread = x @ params.mean, jnp.where(known, 0.0, jnp.sqrt(jnp.where(known, 1.0, variance)))
    at = (2.0 * y - 1.0)[:, None] * (mean[:, None] + spread[:, None] * jnp.asarray(NODES, mean.dtype)[None])
    log_likelihood = -jnp.sum(softplus(-at) @ jnp.asarray(NODE_WEIGHTS, mean.dtype))
    log_prior = -0.5 * jnp.sum(params.mean**2 + scale**2 + jnp.log(2 * jnp.pi))
    return log_likelihood + log_prior + temperature * posterior(params).entropy()
