"""The factor model against sampling, enumeration and finite algebra."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import proxvi
from proxvi_paper.models import factor
from proxvi_paper.models.factor import Factor

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X = jnp.asarray(rng.integers(0, 2, (20, 2)).sum(1) + factor.NOISE * rng.normal(size=20), jnp.float32)
PARAMS = Factor(jnp.array([0.8, -0.5]), jnp.asarray(rng.normal(size=(2, 20)), jnp.float32))
elbo = jax.jit(factor.elbo)


def enumerated_elbo(params: Factor, x: jax.Array, temperature: float = 1.0) -> float:
    on, total = np.asarray(jax.nn.sigmoid(params.logits), np.float64), 0.0
    for z in itertools.product([0, 1], repeat=2):
        q = np.prod(np.where(np.array(z)[:, None], on, 1 - on), axis=0)
        log_p = dist.Normal(np.dot(z, np.asarray(params.means)), factor.NOISE).log_prob(x) + 2 * np.log(0.5)
        total += np.sum(q * (np.asarray(log_p, np.float64) - temperature * np.log(q)))
    return total


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 7.0])
def test_the_elbo_is_exact(temperature: float) -> None:
    expected = enumerated_elbo(PARAMS, X, temperature)
    np.testing.assert_allclose(factor.elbo(PARAMS, X, temperature), expected, rtol=1e-5)


@pytest.mark.slow
def test_the_numpyro_pair_has_the_same_elbo() -> None:
    estimate = proxvi.LeaveOneOutELBO(20_000)
    sampled = -estimate.loss(KEY, PARAMS._asdict(), factor.model, factor.guide, X)
    np.testing.assert_allclose(sampled, factor.elbo(PARAMS, X), rtol=5e-3)


@pytest.mark.slow
def test_the_gradient_of_the_means_is_the_papers() -> None:
    gradient = jax.grad(factor.elbo)(PARAMS, X).means
    np.testing.assert_allclose(factor.mean_gradient(PARAMS, X), gradient, rtol=1e-4)


@pytest.mark.parametrize("k", [0, 1])
def test_a_coordinate_update_is_where_the_gradient_is_zero(k: int) -> None:
    updated = PARAMS._replace(logits=PARAMS.logits.at[k].set(factor.coordinate_update(PARAMS, X, k)))
    gradient = jax.grad(lambda on: elbo(updated._replace(logits=jax.scipy.special.logit(on)), X))
    slopes = jax.jit(gradient)(jax.nn.sigmoid(updated.logits))
    np.testing.assert_allclose(slopes[k], 0.0, atol=1e-5)
    assert elbo(updated, X) > elbo(PARAMS, X)


@pytest.mark.parametrize("magnitude", [0.0, 0.3, 20.0])
def test_a_proximal_coordinate_update_maximises_the_constrained_elbo(magnitude: float) -> None:
    reference = jax.random.normal(jax.random.key(2), (20,))
    updated = factor.proximal_coordinate_update(PARAMS, X, 0, reference, magnitude)

    @jax.jit
    def objective(logits: jax.Array) -> jax.Array:
        on, near = jax.nn.sigmoid(logits), jax.nn.sigmoid(reference)
        distance = on * (logits - reference) + jnp.log1p(-on) - jnp.log1p(-near)
        return factor.elbo(PARAMS._replace(logits=PARAMS.logits.at[0].set(logits)), X) - magnitude * distance.sum()

    best = objective(updated)
    for step in (-0.3, -0.03, 0.03, 0.3):
        assert objective(updated + step) < best
    if magnitude == 0.0:
        np.testing.assert_array_equal(updated, factor.coordinate_update(PARAMS, X, 0))


def test_data_have_the_moments_of_the_model() -> None:
    x = factor.simulate(KEY, jnp.array([3.0, 10.0]), points=100_000)
    np.testing.assert_allclose(x.mean(), 6.5, atol=0.1)
    np.testing.assert_allclose(x.var(), 1.0 + 0.25 * (9.0 + 100.0), rtol=0.02)
