"""`kl_to_prior` finds the priors of every kind of guide."""

from dataclasses import replace
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


def total(_: Any, now: Any) -> Any:
    return sum((jnp.sum(x) for x in jax.tree.leaves(now)), start=jnp.zeros(()))


HELD = proxvi.Proximity(proxvi.kl_to_prior, magnitude=1.0, relative=False, distance=total)


def mean_statistic(model: Any, guide: Any, particles: int = 2_000) -> Any:
    """The parameters at the start, and the statistic there, averaged over many samples."""
    svi = proxvi.ProximitySVI(model, guide, optax.sgd(0.1), Trace_ELBO(particles), HELD)
    state = svi.init(jax.random.key(0))
    start = svi.get_params(state)
    state, _ = svi.update(state)
    return start, float(proxvi.telemetry(state)[0].distance)


def slopes(model: Any, guide: Any, particles: int = 2_000) -> Any:
    """What the constraint adds to the gradient of the parameters."""
    after = []
    # A schedule, which may be 0: then all slopes have to go.
    for constraint in (replace(HELD, magnitude=optax.constant_schedule(1.0)), ()):
        svi = proxvi.ProximitySVI(model, guide, optax.sgd(1.0), Trace_ELBO(particles), constraint)
        after.append(svi.optim.get_params(svi.update(svi.init(jax.random.key(0)))[0].optim_state))
    return jax.tree.map(lambda held, free: free - held, *after)


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


def chain() -> None:
    shift = jnp.asarray(numpyro.param("shift", jnp.zeros(())))
    w = jnp.asarray(numpyro.sample("w", dist.Normal(0.0, 1.0)))
    z = jnp.asarray(numpyro.sample("z", dist.Normal(w + shift, 0.5)))
    numpyro.sample("y", dist.Normal(z, 1.0), obs=1.0)


@pytest.mark.parametrize("kind", [autoguide.AutoNormal, autoguide.AutoMultivariateNormal])
def test_the_prior_of_a_site_moves_with_the_sample_of_its_parent_but_not_with_the_model(kind: Any) -> None:
    at = numpyro.infer.init_to_value(values={"w": 1.0, "z": 2.0})
    slope = slopes(chain, kind(chain, init_scale=0.1, init_loc_fn=at))
    found = slope["auto_loc"] if "auto_loc" in slope else jnp.stack([slope["w_auto_loc"], slope["z_auto_loc"]])
    # KL = w² / 2 + (z − w)² / (2 · 0.25) + constants
    np.testing.assert_allclose(found, [1.0 - 4.0, 4.0], atol=0.1)
    np.testing.assert_allclose(slope["shift"], 0.0, atol=1e-4)


@pytest.mark.parametrize("prior", ["one by one", "together"])
def test_latents_of_rows_are_averaged_whatever_the_events_of_their_prior(prior: str) -> None:
    def model() -> None:
        with numpyro.plate("rows", 10):
            p = dist.Normal(jnp.zeros((10, 2)), 1.0).to_event(1)
            p = p if prior == "one by one" else dist.MultivariateNormal(jnp.zeros((10, 2)), jnp.eye(2))
            z = jnp.asarray(numpyro.sample("z", p))
            numpyro.sample("x", dist.Normal(jnp.sum(z, axis=-1), 1.0), obs=jnp.zeros(10))

    def guide() -> None:
        loc = numpyro.param("loc", jnp.ones((10, 2)))
        with numpyro.plate("rows", 10):
            numpyro.sample("z", dist.Normal(loc, 1.0).to_event(1))

    _, value = mean_statistic(model, guide)
    np.testing.assert_allclose(value, 1.0, atol=0.05)  # two units, half of 1² each
    np.testing.assert_allclose(slopes(model, guide)["loc"], 0.1, atol=0.02)


def test_one_of_several_samples_of_the_guide_stands_for_all() -> None:
    def model() -> None:
        w = jnp.asarray(numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2))))
        numpyro.sample("y", dist.Normal(jnp.sum(w), 1.0), obs=1.0)

    def guide() -> None:
        loc = jnp.broadcast_to(jnp.asarray(numpyro.param("loc", jnp.full(2, 2.0))), (8, 2))
        numpyro.sample("w", dist.Normal(loc, 0.1).to_event(1))

    svi = proxvi.ProximitySVI(model, guide, optax.sgd(0.1), Trace_ELBO(multi_sample_guide=True), HELD)
    state, _ = svi.update(svi.init(jax.random.key(0)))
    exact = jnp.sum(dist.kl_divergence(dist.Normal(jnp.full(2, 2.0), 0.1), dist.Normal(jnp.zeros(2), 1.0)))
    np.testing.assert_allclose(proxvi.telemetry(state)[0].distance, exact, atol=1.0)
