"""`kl_to_prior` finds the priors of every kind of guide."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO, autoguide

import proxvi

pytestmark = pytest.mark.slow  # thousands of particles

COVARIANCE = jnp.array([[1.0, 0.6, 0.0], [0.6, 1.0, 0.2], [0.0, 0.2, 2.0]])


def correlated() -> None:
    w = jnp.asarray(numpyro.sample("w", dist.MultivariateNormal(jnp.ones(3), COVARIANCE)))
    numpyro.sample("y", dist.Normal(jnp.sum(w), 1.0), obs=1.0)


def positive() -> None:
    scale = jnp.asarray(numpyro.sample("scale", dist.LogNormal(0.3, 0.7)))
    mean = jnp.asarray(numpyro.sample("mean", dist.Normal(1.0, 2.0)))
    numpyro.sample("y", dist.Normal(mean, scale), obs=1.0)


def mean_statistic(model: Any, guide: Any, particles: int = 2_000) -> Any:
    """The statistic at the start, averaged over many samples, and its gradient by the constraint's."""
    seen: dict[str, Any] = {}

    def look(q: Any, prior: Any) -> Any:
        seen["value"] = proxvi.kl_to_prior(q, prior)
        return seen["value"]

    held = proxvi.Proximity(look, magnitude=1.0, relative=False, distance=lambda _, now: jax.tree.leaves(now)[0].sum())
    svi = proxvi.ProximitySVI(model, guide, optax.sgd(0.1), Trace_ELBO(particles), held)
    state = svi.init(jax.random.key(0))
    start = svi.get_params(state)
    state, _ = svi.update(state)
    return start, float(proxvi.telemetry(state)[0].distance)


@pytest.mark.parametrize("kind", [autoguide.AutoNormal, autoguide.AutoDiagonalNormal, autoguide.AutoMultivariateNormal])
def test_divergence_from_a_correlated_prior_is_the_closed_form(kind: Any) -> None:
    start, value = mean_statistic(correlated, kind(correlated, init_scale=0.5))
    loc = start["w_auto_loc"] if kind is autoguide.AutoNormal else start["auto_loc"]
    q = dist.MultivariateNormal(loc, 0.25 * jnp.eye(3))
    exact = dist.kl_divergence(q, dist.MultivariateNormal(jnp.ones(3), COVARIANCE))
    np.testing.assert_allclose(value, exact, rtol=0.05)


def test_divergence_allows_for_the_change_of_variables() -> None:
    start, value = mean_statistic(positive, autoguide.AutoDiagonalNormal(positive, init_scale=0.5))
    # In the order of the unconstrained vector, that of the model: log scale, then mean.
    priors = dist.Normal(jnp.array([0.3, 1.0]), jnp.array([0.7, 2.0]))
    exact = jnp.sum(dist.kl_divergence(dist.Normal(start["auto_loc"], 0.5), priors))
    np.testing.assert_allclose(value, exact, rtol=0.05)


def test_auxiliary_sites_have_no_prior_and_are_left_out() -> None:
    def guide() -> None:
        u = numpyro.sample("u", dist.Normal(numpyro.param("shift", jnp.zeros(())), 1.0), infer={"is_auxiliary": True})
        numpyro.sample("w", dist.MultivariateNormal(jnp.full(3, jnp.asarray(u)), jnp.eye(3)))

    _, value = mean_statistic(correlated, guide, particles=4_000)
    # E over u ~ N(0, 1) of KL(N(u 1, I) ‖ N(1, Σ))
    inverse = jnp.linalg.inv(COVARIANCE)
    at_zero = dist.kl_divergence(
        dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3)), dist.MultivariateNormal(jnp.ones(3), COVARIANCE)
    )
    np.testing.assert_allclose(value, at_zero + 0.5 * jnp.sum(inverse), rtol=0.1)
