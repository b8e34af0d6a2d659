"""Other people's loops with a constrained optimiser: each library's own code runs the steps."""

from typing import Any

import blackjax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal

import proxvi

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def ranks_are_the_peers_business() -> Any:
    with jax.numpy_rank_promotion("allow"):
        yield


def with_and_without(constraint: proxvi.Proximity, rate: float, **options: Any) -> tuple[Any, Any]:
    # A short memory: with b2 = 0.999 Adam would still divide by the early, strong constraint when these short runs end.
    adam = optax.adam(rate, b2=0.99)
    return optax.with_extra_args_support(adam), proxvi.proximity(adam, constraint, **options)


def test_blackjax_meanfield_vi() -> None:
    """A Gaussian target: the constraint slows the entropy, and both fits end at the target."""
    loc, scale, steps = jnp.array([3.0, -2.0]), jnp.array([0.5, 2.0]), 3_000

    def entropy(params: Any) -> Any:
        _, rho = params
        return proxvi.entropy(dist.Normal(0.0, jnp.exp(rho)).to_event(1))

    magnitude = optax.exponential_decay(300.0, steps, 1e-10)
    constraint = proxvi.Proximity(entropy, magnitude=magnitude, relative=False)

    def run(optimizer: Any) -> tuple[Any, Any]:
        algorithm = blackjax.meanfield_vi(lambda z: jnp.sum(dist.Normal(loc, scale).log_prob(z)), optimizer, 50)

        @jax.jit
        def fit() -> Any:
            def step(state: Any, key: Any) -> tuple[Any, Any]:
                state, _ = algorithm.step(key, state)
                return state, state.rho

            return jax.lax.scan(step, algorithm.init(jnp.zeros(2)), jax.random.split(KEY, steps))

        return fit()

    (free, free_rho), (held, held_rho) = (run(o) for o in with_and_without(constraint, 0.01))
    start = -2.0
    assert np.all(np.abs(held_rho[100] - start) < 0.8 * np.abs(free_rho[100] - start))
    for state in (free, held):
        np.testing.assert_allclose(state.mu, loc, atol=0.05)
        np.testing.assert_allclose(jnp.exp(state.rho), scale, rtol=0.05)


@pytest.mark.slow
def test_equinox_autoencoder_with_a_statistic_of_the_batch() -> None:
    """A linear variational autoencoder, whose optimum is that of probabilistic PCA from every start."""
    steps, latents, pixels = 4_000, 2, 8
    keys = jax.random.split(KEY, 4)
    mixing = jax.random.normal(keys[0], (latents, pixels))
    data = jax.random.normal(keys[1], (500, latents)) @ mixing + 0.5 * jax.random.normal(keys[2], (500, pixels))

    class Autoencoder(eqx.Module):
        mean: eqx.nn.Linear
        log_scale: jax.Array
        decoder: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key)
            self.mean = eqx.nn.Linear(pixels, latents, key=keys[0])
            self.log_scale = jnp.zeros(latents)
            self.decoder = eqx.nn.Linear(latents, pixels, key=keys[1])

        def q(self, batch: Any) -> dist.Distribution:
            return dist.Normal(jax.vmap(self.mean)(batch), jnp.exp(self.log_scale)).to_event(1)

    def negative_elbo(model: Autoencoder, batch: Any, key: Any) -> Any:
        q = model.q(batch)
        log_likelihood = dist.Normal(jax.vmap(model.decoder)(jnp.asarray(q.rsample(key))), 0.5).log_prob(batch).sum(-1)
        return jnp.mean(dist.kl_divergence(q, dist.Normal(jnp.zeros(latents), 1.0).to_event(1)) - log_likelihood)

    model, static = eqx.partition(Autoencoder(keys[3]), eqx.is_inexact_array)
    constraint = proxvi.Proximity(
        lambda params, batch: proxvi.entropy(eqx.combine(params, static).q(batch)),
        magnitude=optax.exponential_decay(10.0, steps, 1e-10),
        reference=proxvi.statistic_average(),
    )
    example = {"batch": jax.ShapeDtypeStruct((50, pixels), jnp.float32)}

    def run(optimizer: Any) -> tuple[Any, Any]:
        @jax.jit
        def fit() -> Any:
            def step(carry: Any, key: Any) -> tuple[Any, Any]:
                params, state = carry
                batch = data[jax.random.randint(key, (50,), 0, 500)]
                loss, grads = jax.value_and_grad(
                    lambda p: negative_elbo(eqx.combine(p, static), batch, jax.random.fold_in(key, 1))
                )(params)
                updates, state = optimizer.update(grads, state, params, value=loss, batch=batch)
                params = eqx.apply_updates(params, updates)
                return (params, state), params.log_scale

            (params, _), trace = jax.lax.scan(step, (model, optimizer.init(model)), jax.random.split(KEY, steps))
            final = jax.vmap(lambda key: negative_elbo(eqx.combine(params, static), data, key))
            return jnp.mean(final(jax.random.split(KEY, 200))), trace

        return fit()

    (free, free_trace), (held, held_trace) = (run(o) for o in with_and_without(constraint, 0.005, example=example))
    assert np.all(np.abs(held_trace[100]) < 0.8 * np.abs(free_trace[100]))
    # The evidence of probabilistic PCA bounds both: −log N(x; mean, WᵀW + 0.25 I) at its optimum
    covariance = np.cov(np.asarray(data).T, bias=True)
    values, vectors = np.linalg.eigh(covariance)
    best = vectors @ np.diag(np.where(np.arange(pixels) >= pixels - latents, values, 0.25)) @ vectors.T
    sign, log_determinant = np.linalg.slogdet(2 * np.pi * best)
    evidence = 0.5 * (log_determinant + np.trace(np.linalg.solve(best, covariance)))
    for loss in (free, held):
        assert sign > 0
        np.testing.assert_allclose(loss, evidence, atol=0.05)


@pytest.mark.nightly
def test_numpyro_svi_given_a_constrained_optimiser() -> None:
    """A conjugate regression through NumPyro's own SVI, which hands the optimiser only `value=`."""
    steps = 3_000
    features = jax.random.normal(KEY, (200, 3))
    y = features @ jnp.array([1.0, -2.0, 0.5]) + 0.3 * jax.random.normal(jax.random.key(1), (200,))

    def model() -> None:
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(features @ weights, 0.3).to_event(1), obs=y)

    guide = AutoDiagonalNormal(model, init_scale=1.0)

    def entropy(params: Any) -> Any:
        # NumPyro's parameters are unconstrained: the scale is the softplus of what the optimiser sees.
        return proxvi.entropy(dist.Normal(0.0, jax.nn.softplus(params["auto_scale"])).to_event(1))

    constraint = proxvi.Proximity(entropy, magnitude=optax.exponential_decay(1.0, steps, 1e-10))

    def run(optimizer: Any) -> tuple[Any, Any]:
        svi = SVI(model, guide, optimizer, Trace_ELBO(10))
        early = svi.run(KEY, 100, progress_bar=False)
        late = svi.run(KEY, steps, progress_bar=False)
        return early.params["auto_scale"], late.params

    (free_early, free), (held_early, held) = (run(o) for o in with_and_without(constraint, 0.01))
    assert np.all(np.abs(held_early - 1.0) < 0.8 * np.abs(free_early - 1.0))
    precision = np.eye(3) + np.asarray(features.T @ features) / 0.3**2
    exact = np.linalg.solve(precision, np.asarray(features.T @ y) / 0.3**2)
    for params in (free, held):
        np.testing.assert_allclose(params["auto_loc"], exact, atol=0.01)
        np.testing.assert_allclose(params["auto_scale"], 1 / np.sqrt(np.diag(precision)), rtol=0.1)
