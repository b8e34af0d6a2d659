"""Statistics against NumPyro, against enumeration and against Monte Carlo, and what happens to their axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.distributions import transforms

import proxvi
from proxvi import _distributions

KEY = jax.random.key(0)
probs = jnp.linspace(0.1, 0.9, 60).reshape(20, 3)


def test_batch_axes_are_averaged_and_latent_axes_kept() -> None:
    q = dist.Bernoulli(probs).to_event(1)
    entropy = proxvi.entropy(q)
    assert (entropy.shape, entropy.dtype) == ((3,), jnp.float32)
    np.testing.assert_allclose(entropy, dist.Bernoulli(probs).entropy().mean(0), rtol=1e-6)
    np.testing.assert_allclose(proxvi.entropy(q, total=True), q.entropy().mean(), rtol=1e-6)
    mean, variance = proxvi.mean_variance(q)
    np.testing.assert_allclose(mean, probs.mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance, (probs * (1 - probs)).mean(0), rtol=1e-6)
    assert proxvi.kl_to_prior(q, dist.Bernoulli(0.5)).shape == (3,)


@pytest.mark.slow
def test_a_global_latent_without_batch_keeps_every_axis() -> None:
    q = dist.Normal(jnp.zeros((4, 5)), 1.0).to_event(2)
    assert proxvi.entropy(q).shape == (4, 5)
    assert proxvi.entropy(dist.MultivariateNormal(jnp.zeros((7, 3)), jnp.eye(3))).shape == ()
    assert proxvi.mean_variance(dist.MultivariateNormal(jnp.zeros((7, 3)), jnp.eye(3)))[0].shape == (3,)


@pytest.mark.slow
def test_padding_that_is_masked_changes_nothing() -> None:
    padded = jnp.concatenate([probs, jnp.full((5, 3), 0.5)])
    mask = jnp.arange(25) < 20
    whole, part = dist.Bernoulli(probs).to_event(1), dist.Bernoulli(padded).to_event(1).mask(mask)
    inside = dist.Bernoulli(padded).mask(jnp.broadcast_to(mask[:, None], (25, 3))).to_event(1)
    for q in (part, inside):
        np.testing.assert_allclose(proxvi.entropy(q), proxvi.entropy(whole), rtol=1e-6)
        np.testing.assert_allclose(proxvi.kl(q, q), 0.0, atol=1e-6)
        prior = dist.Bernoulli(0.3)
        np.testing.assert_allclose(proxvi.kl_to_prior(q, prior), proxvi.kl_to_prior(whole, prior), rtol=1e-6)
    assert np.all(proxvi.entropy(dist.MaskedDistribution(whole, False)) == 0)


def test_expanded_and_nested_wrappers() -> None:
    unit = dist.Normal(jnp.arange(3.0), 2.0)
    q = dist.Independent(dist.ExpandedDistribution(unit, (20, 3)), 1).mask(jnp.arange(20) < 5)
    np.testing.assert_allclose(proxvi.entropy(q), unit.entropy(), rtol=1e-6)
    np.testing.assert_allclose(proxvi.mean_variance(q)[0], jnp.arange(3.0), rtol=1e-6)
    wrapped = dist.ExpandedDistribution(unit.to_event(1), (20,))
    np.testing.assert_allclose(proxvi.entropy(wrapped), unit.entropy(), rtol=1e-6)


def test_trees_keep_their_structure_and_total_sums_them() -> None:
    q = {"w": dist.Normal(0.0, jnp.array([1.0, 2.0])).to_event(1), "z": [dist.Bernoulli(0.3)]}
    entropy = proxvi.entropy(q)
    assert jax.tree.map(jnp.shape, entropy) == {"w": (2,), "z": [()]}
    np.testing.assert_allclose(proxvi.entropy(q, total=True), jnp.sum(entropy["w"]) + entropy["z"][0], rtol=1e-6)
    prior = {"w": dist.Normal(0.0, 1.0), "z": [dist.Bernoulli(0.5)]}
    assert jax.tree.map(jnp.shape, proxvi.kl_to_prior(q, prior)) == {"w": (2,), "z": [()]}


BERNOULLI_PAIRS = [(0.3, 0.6), (0.5, 0.5), (0.999, 0.01), (0.5, 0.001)]


@pytest.mark.parametrize(("p", "r"), BERNOULLI_PAIRS)
def test_bernoulli_divergence_is_the_sum_over_its_support(p: float, r: float) -> None:
    with jax.enable_x64(True):
        expected = p * np.log(p / r) + (1 - p) * np.log((1 - p) / (1 - r))
        logits = jnp.log(jnp.array([p, r]) / (1 - jnp.array([p, r])))
        for q, prior in (
            (dist.Bernoulli(probs=p), dist.Bernoulli(probs=r)),
            (dist.Bernoulli(logits=logits[0]), dist.Bernoulli(logits=logits[1])),
            (dist.Bernoulli(logits=logits[0]), dist.Bernoulli(probs=r)),
        ):
            np.testing.assert_allclose(proxvi.kl_to_prior(q, prior), expected, atol=1e-12)
        slope = jax.grad(lambda x: proxvi.kl_to_prior(dist.Bernoulli(logits=x), dist.Bernoulli(logits=logits[1])))
        np.testing.assert_allclose(slope(logits[0]), p * (1 - p) * (logits[0] - logits[1]), atol=1e-12)


CLOSED: dict[str, Callable[[Any], dist.Distribution]] = {
    "affine": lambda x: dist.TransformedDistribution(
        dist.Gamma(jnp.exp(x), 1.0), transforms.AffineTransform(1.0, -3.0)
    ),
    "exponential": lambda x: dist.TransformedDistribution(dist.Normal(x, 0.5), transforms.ExpTransform()),
    "affine, then exponential, then affine": lambda x: dist.TransformedDistribution(
        dist.Logistic(x, 0.3),
        [
            transforms.AffineTransform(1.0, jnp.exp(x)),
            transforms.ExpTransform(),
            transforms.AffineTransform(0.0, 2.0),
        ],
    ),
    "correlated": lambda x: dist.TransformedDistribution(
        dist.Normal(jnp.zeros(2), jnp.exp(x)).to_event(1),
        transforms.LowerCholeskyAffine(jnp.zeros(2), jnp.array([[2.0, 0.0], [1.0, 0.5]])),
    ),
    "lognormal": lambda x: dist.LogNormal(x, 0.4),
    "binomial": lambda x: dist.Binomial(5, logits=x + 0.1),
    "gamma": lambda x: dist.Gamma(2.0, jnp.exp(x)),
    "beta": lambda x: dist.Beta(jnp.exp(x), 2.0),
    "student": lambda x: dist.StudentT(5.0, x, jnp.exp(x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOSED)
def test_closed_entropy_agrees_with_monte_carlo_in_value_and_slope(name: str) -> None:
    build, samples = CLOSED[name], 100_000

    def estimate(x: jax.Array) -> jax.Array:
        d = build(x)
        return _distributions.expectation(d, lambda _, log_q: -log_q, KEY, samples, "entropy")

    x = jnp.array(0.3)
    value, slope = jax.value_and_grad(lambda x: proxvi.entropy(build(x)))(x)
    expected, expected_slope = jax.jit(jax.value_and_grad(estimate))(x)
    # the log density varies by a few nats at most: 5 standard errors over 10⁵ draws
    np.testing.assert_allclose(value, expected, atol=0.03)
    np.testing.assert_allclose(slope, expected_slope, atol=0.05)


def poisson_entropy(log_rate: jax.Array) -> jax.Array:
    z = jnp.arange(80.0)
    log_p = jax.vmap(dist.Poisson(jnp.exp(log_rate)).log_prob)(z)
    return -jnp.sum(jnp.exp(log_p) * log_p)


@pytest.mark.slow
def test_monte_carlo_entropy_without_reparameterisation_is_unbiased_in_value_and_slope() -> None:
    """A Poisson has no closed entropy and no differentiable samples: the slope must come from the score function."""
    x = jnp.array(1.0)
    expected, expected_slope = jax.value_and_grad(poisson_entropy)(x)

    def estimate(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda x: proxvi.entropy(dist.Poisson(jnp.exp(x)), key=key))(x)

    values, slopes = jax.jit(jax.vmap(estimate))(jax.random.split(KEY, 20_000))
    for draws, truth in ((values, expected), (slopes, expected_slope)):
        error = float(jnp.std(draws)) / np.sqrt(draws.size)
        assert abs(float(jnp.mean(draws)) - float(truth)) < 4 * error
    assert expected_slope > 20 * float(jnp.std(slopes)) / np.sqrt(slopes.size)  # the test can tell it from 0


@pytest.mark.slow
def test_monte_carlo_moments_of_a_flow() -> None:
    flow = dist.TransformedDistribution(dist.Normal(jnp.zeros(2), 1.0), transforms.SigmoidTransform()).to_event(1)
    mean, variance = proxvi.mean_variance(flow, key=KEY, num_samples=20_000)
    np.testing.assert_allclose(mean, 0.5, atol=0.01)
    np.testing.assert_allclose(variance, 0.0434, atol=0.002)


def test_affine_moments_are_closed() -> None:
    d = dist.TransformedDistribution(dist.Gamma(2.0, 1.0), transforms.AffineTransform(1.0, -3.0))
    mean, variance = proxvi.mean_variance(d)
    np.testing.assert_allclose((mean, variance), (-5.0, 18.0), rtol=1e-6)


def test_gram_matrix_is_on_the_smaller_side() -> None:
    orthogonal = jax.nn.initializers.orthogonal()(KEY, (784, 200))
    for matrix in (orthogonal, orthogonal.T):
        (gram,) = proxvi.orthogonal(matrix)
        np.testing.assert_allclose(gram, jnp.eye(200), atol=1e-5)
    stacked = proxvi.orthogonal({"layers": jnp.ones((3, 4, 2)), "bias": jnp.ones(2)})
    assert [gram.shape for gram in stacked] == [(3, 2, 2)]


@pytest.mark.slow
def test_every_leaf_has_its_own_noise() -> None:
    q = {"a": dist.Poisson(3.0), "b": dist.Poisson(3.0)}
    entropy = proxvi.entropy(q, key=KEY)
    assert entropy["a"] != entropy["b"]


@pytest.mark.parametrize("logit", [-1e4, -100.0, -20.0, -17.0, -1.0, 0.0, 1.0, 20.0, 1e4])
def test_bernoulli_entropy_and_slope_are_exact_for_every_logit(logit: float) -> None:
    """The bad start of the paper has weights of −100: logits far below where `exp(−logit)` overflows."""
    value, slope = jax.value_and_grad(lambda x: proxvi.entropy(dist.Bernoulli(logits=x)))(jnp.array(logit))
    size = abs(logit)
    odds = np.exp(-size)
    expected = np.log1p(odds) + size * odds / (1 + odds)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(slope, -logit * odds / (1 + odds) ** 2, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("logit", [-np.inf, -200.0, 200.0, np.inf])
def test_a_bernoulli_that_is_certain_has_no_entropy_and_no_slope(logit: float) -> None:
    def entropy(x: jax.Array) -> jax.Array:
        return proxvi.entropy(dist.Bernoulli(logits=x))

    def divergence(x: jax.Array) -> jax.Array:
        return proxvi.kl_to_prior(dist.Bernoulli(logits=x), prior=dist.Bernoulli(logits=0.5))

    surprise = jax.nn.softplus(-0.5 * np.sign(logit))  # −log of the probability of its only value
    for function, expected in ((entropy, 0.0), (divergence, surprise)):
        value, slope = jax.jit(jax.value_and_grad(function))(jnp.array(logit))
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        assert slope == 0.0


@pytest.mark.parametrize("prior", [-np.inf, np.inf])
@pytest.mark.parametrize("logit", [-np.inf, -200.0, -16.0, 0.3, 16.0, 200.0, np.inf])
def test_a_prior_that_is_certain_allows_its_value_only(logit: float, prior: float) -> None:
    @jax.jit  # where NumPyro does not refuse infinite logits
    def divergence(q: jax.Array, p: jax.Array) -> jax.Array:
        return proxvi.kl_to_prior(dist.Bernoulli(logits=q), prior=dist.Bernoulli(logits=p))

    assert divergence(jnp.array(logit), jnp.array(prior)) == (
        0.0 if abs(logit) >= 200.0 and np.sign(logit) == np.sign(prior) else np.inf
    )


def test_categorical_entropy_with_an_impossible_class() -> None:
    value, slope = jax.jit(jax.value_and_grad(lambda x: proxvi.entropy(dist.Categorical(logits=x))))(
        jnp.array([0.0, 0.0, -jnp.inf])
    )
    np.testing.assert_allclose(value, np.log(2.0), rtol=1e-6)
    np.testing.assert_allclose(slope, 0.0, atol=1e-6)


@pytest.mark.slow
def test_slopes_at_a_logit_of_zero() -> None:
    """Zeros are the usual initialisation, and NumPyro's log densities have a kink there."""
    assert jax.grad(lambda x: proxvi.entropy(dist.Binomial(5, logits=x)))(0.0) == pytest.approx(0.0, abs=1e-5)
    prior = dist.Binomial(5, 0.3)
    at, near = (jax.grad(lambda x: proxvi.kl_to_prior(dist.Binomial(5, logits=x), prior))(x) for x in (0.0, 1e-3))
    np.testing.assert_allclose(at, near, rtol=0.01)


def test_expanded_distribution_against_a_prior_of_the_full_shape() -> None:
    prior = dist.Normal(jnp.arange(3.0), 1.0).to_event(1)
    one = dist.Normal(0.0, 1.0).expand([3]).to_event(1)
    np.testing.assert_allclose(proxvi.kl_to_prior(one, prior), 0.5 * jnp.arange(3.0) ** 2, rtol=1e-6)
    batch = dist.Normal(jnp.zeros(3), 1.0).expand((20, 3)).to_event(1)
    wide = dist.Normal(jnp.broadcast_to(jnp.arange(3.0), (20, 3)), 1.0).to_event(1)
    with jax.numpy_rank_promotion("allow"):  # the ranks are NumPyro's to promote
        np.testing.assert_allclose(proxvi.kl_to_prior(batch, wide), 0.5 * jnp.arange(3.0) ** 2, rtol=1e-6)


@pytest.mark.slow
def test_monte_carlo_entropy_of_a_saturated_flow_has_a_finite_slope() -> None:
    """The flow must not be inverted at its own samples."""

    def flow(scale: Any) -> dist.Distribution:
        base = dist.Normal(jnp.zeros(3), scale).to_event(1)
        return dist.TransformedDistribution(base, transforms.StickBreakingTransform())

    with jax.numpy_rank_promotion("allow"):
        value, slope = jax.value_and_grad(lambda s: proxvi.entropy(flow(s), key=KEY, num_samples=2_000))(10.0)
    np.testing.assert_allclose(value, -22.8, atol=1.0)
    np.testing.assert_allclose(slope, -2.88, atol=0.2)


def test_monte_carlo_variance_is_unbiased_for_few_samples() -> None:
    q = dist.TransformedDistribution(dist.Normal(0.0, 1.0), transforms.SigmoidTransform())
    keys = jax.random.split(KEY, 20_000)
    variances = jax.jit(jax.vmap(lambda key: proxvi.mean_variance(q, key=key, num_samples=2)[1]))(keys)
    assert abs(jnp.mean(variances) - 0.0434) < 4 * jnp.std(variances) / np.sqrt(20_000)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_monte_carlo_variance_without_reparameterisation_is_unbiased_in_value_and_slope(count: int) -> None:
    x = jnp.array(1.5)

    def exact(x: jax.Array) -> jax.Array:
        angles = jnp.linspace(-jnp.pi, jnp.pi, 20_001)
        p = jax.nn.softmax(x * jnp.cos(angles))
        return jnp.sum(p * jnp.exp(angles) ** 2) - jnp.sum(p * jnp.exp(angles)) ** 2

    def estimate(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        def variance(x: jax.Array) -> jax.Array:
            q = dist.TransformedDistribution(dist.VonMises(0.0, x), transforms.ExpTransform())
            return proxvi.mean_variance(q, key=key, num_samples=count)[1]

        return jax.value_and_grad(variance)(x)

    expected = jax.value_and_grad(exact)(x)
    for draws, truth in zip(jax.jit(jax.vmap(estimate))(jax.random.split(KEY, 50_000)), expected, strict=True):
        error = float(jnp.std(draws)) / np.sqrt(draws.size)
        assert abs(float(jnp.mean(draws)) - float(truth)) < 4 * error < 0.1 * abs(float(truth))


def test_folding_is_no_bijection() -> None:
    """Both sides of 0 become one, so that these two are the same."""
    one, other = (dist.FoldedDistribution(dist.Normal(loc, 1.0)) for loc in (-1.0, 1.0))
    np.testing.assert_allclose(jax.jit(lambda key: proxvi.kl_to_prior(one, other, key=key))(KEY), 0.0, atol=1e-5)
    with pytest.raises(NotImplementedError, match="`kl` needs a closed form, got FoldedDistribution"):
        proxvi.kl(one, other)


@pytest.mark.slow
def test_binomials_of_unequal_or_traced_counts_are_sampled() -> None:
    counts = jnp.array([3, 5])
    q = dist.Binomial(counts, logits=jnp.zeros(2)).to_event(1)
    exact = jnp.stack([proxvi.entropy(dist.Binomial(int(n), logits=0.0)) for n in counts])
    np.testing.assert_allclose(proxvi.entropy(q, key=KEY, num_samples=20_000), exact, atol=0.02)
    traced = jax.jit(lambda n: proxvi.entropy(dist.Binomial(n, logits=0.0), key=KEY, num_samples=20_000))(3)
    np.testing.assert_allclose(traced, exact[0], atol=0.02)
