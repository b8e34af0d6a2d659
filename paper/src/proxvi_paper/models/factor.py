"""The Bernoulli factor model of the paper's Figure 1, with its exact ELBO."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array

from proxvi.statistics import entropy

__all__ = [
    "Factor",
    "coordinate_update",
    "elbo",
    "guide",
    "mean_gradient",
    "model",
    "posterior",
    "proximal_coordinate_update",
    "simulate",
    "start",
]

PRIOR = 0.5  # π, the probability that a feature is on
NOISE = 1.0  # σ


class Factor(NamedTuple):
    """What is fitted: the means `μ_k` of the features, and the logits of `λ_ik = q(z_ik = 1)`, a row a feature.

    The points are the last axis because it is the long one, along which the processor vectorises.
    """

    means: Array
    logits: Array


def simulate(key: Array, means: Array, points: int = 100) -> Array:
    """Draw data from the model.

        z_ik ~ Bernoulli(π),   x_i ~ Normal(Σ_k z_ik μ_k, σ²)

    Example:
        >>> simulate(jax.random.key(0), jnp.array([5.0, 5.0])).shape
        (100,)
    """
    feature_key, noise_key = jax.random.split(key)
    features = jax.random.bernoulli(feature_key, PRIOR, (points, means.shape[0]))
    return features @ means + NOISE * jax.random.normal(noise_key, (points,))


def start(means: Array, points: int = 100) -> Factor:
    """These means, with every `λ_ik = 1/2`."""
    return Factor(means, jnp.zeros((means.shape[0], points)))


def model(x: Array, features: int = 2) -> None:
    """The model, for NumPyro; the means are parameters."""
    means: Any = numpyro.param("means", jnp.zeros(features))
    with numpyro.plate("points", x.shape[0]):
        z: Any = numpyro.sample("z", dist.Bernoulli(PRIOR).expand([features]).to_event(1))
        numpyro.sample("x", dist.Normal(z @ means, NOISE), obs=x)


def guide(x: Array, features: int = 2) -> None:
    """The mean-field Bernoulli guide, for NumPyro."""
    logits: Any = numpyro.param("logits", jnp.zeros((features, x.shape[0])))
    with numpyro.plate("points", x.shape[0]):
        numpyro.sample("z", dist.Bernoulli(logits=logits.T).to_event(1))


def posterior(params: Factor) -> dist.Distribution:
    """The approximation `q(z) = Π_ik Bernoulli(z_ik; λ_ik)`. All `z_ik` are event axes: none is averaged as a batch."""
    return dist.Bernoulli(logits=params.logits).to_event(2)


def elbo(params: Factor, x: Array, temperature: Array | float = 1.0) -> Array:
    """The ELBO, exactly; at a temperature other than 1 the annealed one.

        L = Σ_i { log N(x_i; Σ_k λ_ik μ_k, σ²) − Σ_k λ_ik (1 − λ_ik) μ_k² / 2σ² } + E[log p(z)] + T · H(q)

    Example:
        >>> x = jnp.array([0.1, 4.9, 10.2])
        >>> params = Factor(jnp.array([5.0, 5.0]), jnp.array([[-9.0, 9.0, 9.0], [-9.0, -9.0, 9.0]]))
        >>> f"{elbo(params, x):.1f}"
        '-6.9'
    """
    q = dist.Bernoulli(logits=params.logits)
    log_likelihood = dist.Normal(params.means @ q.mean, NOISE).log_prob(x)
    spread = params.means**2 @ q.variance / (2 * NOISE**2)
    log_prior = q.mean * jnp.log(PRIOR) + (1 - q.mean) * jnp.log1p(-PRIOR)
    return jnp.sum(log_likelihood - spread) + jnp.sum(log_prior) + temperature * entropy(posterior(params), total=True)


def mean_gradient(params: Factor, x: Array) -> Array:
    """The gradient of the ELBO with respect to the means; the paper's equation for `∂L/∂μ_k`.

    ∂L/∂μ_k = −1/σ² Σ_i λ_ik (−x_i + μ_k + Σ_{j≠k} λ_ij μ_j)
    """
    on = jax.nn.sigmoid(params.logits)
    others = (params.means @ on)[None] - on * params.means[:, None]
    return -jnp.sum(on * (-x[None] + params.means[:, None] + others), axis=1) / NOISE**2


def coordinate_update(params: Factor, x: Array, k: Array | int) -> Array:
    """The best logits of feature `k` with all else fixed; the paper's update of `λ_ik`.

        logit λ_ik = logit π + μ_k (x_i − Σ_{j≠k} λ_ij μ_j − μ_k / 2) / σ²

    which is the paper's `λ_ik ∝ exp E_{−z_ik}[log p(x_i, z_i)]`, normalised.
    """
    on = jax.nn.sigmoid(params.logits)
    mean = params.means[k]
    others = params.means @ on - on[k] * mean
    return jnp.log(PRIOR) - jnp.log1p(-PRIOR) + mean * (x - others - mean / 2) / NOISE**2


def proximal_coordinate_update(
    params: Factor, x: Array, k: Array | int, reference: Array, magnitude: Array | float
) -> Array:
    """The best logits of feature `k` that also stay close to a reference.

    The constraint is `KL(q_ik ‖ q̃_ik)` to a Bernoulli with logit `r`, with magnitude κ. As a function of one
    `λ = λ_ik`, with `a` the logit of `coordinate_update`, and H the entropy,

        L = λ a + H(λ) + const,     KL(λ ‖ σ(r)) = −H(λ) − λ r + const,

    so `L − κ KL = λ (a + κ r) + (1 + κ) H(λ) + const`, and since `H'(λ) = −logit λ` it is largest at

        logit λ = (a + κ r) / (1 + κ):

    the logits move only part of the way. κ = 0 is plain coordinate ascent; a large κ keeps the reference.
    """
    return (coordinate_update(params, x, k) + magnitude * reference) / (1 + magnitude)
