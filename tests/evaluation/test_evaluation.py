"""Importance sampling: exact likelihoods of models small enough to add up, and errors that are as large as they say."""

import functools
import itertools
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_stats.base.array import array_stats
from jax.sharding import Mesh
from numpyro import handlers, primitives
from numpyro.infer.util import log_density

from proxvi.evaluation import Evaluation, evaluate
from proxvi.evaluation._log_weights import log_weights
from proxvi_paper.models.model_and_guide import ModelAndGuide
from proxvi_paper.models.sbn import belief_network

KEY = jax.random.key(0)
DIGITS = np.array(list(itertools.product([0, 1], repeat=4)), np.uint8)  # all that there are, of 4 pixels
MEAN = np.full(4, 0.3)
ONE = Mesh(np.array(jax.devices()[:1]), "rows")


@pytest.fixture(autouse=True)
def ranks_are_numpyros_business() -> Any:
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache  # the same functions are compiled once
def network(units: tuple[int, ...]) -> tuple[ModelAndGuide, dict[str, Any]]:
    """With parameters that leave the posterior neither flat nor certain."""
    sizes, rng = (4, *units), np.random.default_rng(0)
    params: dict[str, Any] = {"prior": rng.normal(size=sizes[-1])}
    for layer in range(1, len(sizes)):
        low, high = sizes[layer - 1 : layer + 1]
        params |= {
            f"decoder{layer}_weights": rng.normal(size=(high, low)),
            f"decoder{layer}_bias": rng.normal(size=low),
        }
        params |= {
            f"encoder{layer}_weights": rng.normal(size=(low, high)),
            f"encoder{layer}_bias": rng.normal(size=high),
        }
    return belief_network(MEAN, units=units), {
        name: jnp.asarray(0.5 * value, jnp.float32) for name, value in params.items()
    }


def exact(params: dict[str, Any], units: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """ELBO and log likelihood of each digit, by adding up all states of all units, in float64."""

    def bernoulli(logits: Any, value: Any) -> Any:
        return np.sum(-np.logaddexp(0.0, np.where(np.asarray(value) == 1, -1.0, 1.0) * logits), axis=-1)

    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    joint, log_q = [], []
    for state in itertools.product([0.0, 1.0], repeat=sum(units)):
        layers = [DIGITS, *(z[None] for z in np.split(np.array(state), np.cumsum(units)[:-1]))]
        joint.append(bernoulli(p["prior"], layers[-1]))
        log_q.append(np.zeros(len(DIGITS)))
        for i in range(1, len(layers)):
            below = layers[i - 1] - MEAN if i == 1 else layers[i - 1]
            joint[-1] = joint[-1] + bernoulli(
                layers[i] @ p[f"decoder{i}_weights"] + p[f"decoder{i}_bias"], layers[i - 1]
            )
            log_q[-1] = log_q[-1] + bernoulli(below @ p[f"encoder{i}_weights"] + p[f"encoder{i}_bias"], layers[i])
    log_p, log_q = np.array(joint), np.array(log_q)
    np.testing.assert_allclose(np.logaddexp.reduce(log_q, axis=0), 0.0, atol=1e-12)
    return np.sum(np.exp(log_q) * (log_p - log_q), axis=0), np.logaddexp.reduce(log_p, axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("units", [(3,), (3, 2)], ids=["one layer", "two layers"])
def test_truth_lies_within_the_errors_that_are_told(units: tuple[int, ...]) -> None:
    """In all of 100 seeds within 4 errors; and the errors are not too large, either."""
    pair, params = network(units)
    elbos, log_likelihoods = exact(params, units)
    misses = []
    for seed in range(100):
        result = evaluate(jax.random.key(seed), *pair, params, DIGITS, num_samples=2_000, mesh=ONE)
        misses.append(
            [
                (result.elbo - np.mean(elbos)) / result.elbo_monte_carlo_error,
                (result.log_likelihood - np.mean(log_likelihoods)) / result.log_likelihood_monte_carlo_error,
            ]
        )
        assert np.all(result.elbos <= result.log_likelihoods)
        assert np.all((result.effective_sample_sizes >= 1.0) & (result.effective_sample_sizes <= 2_000.0))
    assert np.max(np.abs(misses)) < 4.0
    assert np.all((np.std(misses, axis=0) > 0.8) & (np.std(misses, axis=0) < 1.25))


@pytest.mark.slow
def test_more_samples_come_to_the_truth() -> None:
    pair, params = network((3, 2))
    elbos, log_likelihoods = exact(params, (3, 2))
    result = evaluate(KEY, *pair, params, DIGITS, num_samples=20_000)
    np.testing.assert_allclose(result.elbos, elbos, atol=0.05)
    np.testing.assert_allclose(result.log_likelihoods, log_likelihoods, atol=0.05)
    np.testing.assert_allclose(result.elbo_standard_error, np.std(elbos, ddof=1) / 4.0, rtol=0.02)
    np.testing.assert_allclose(result.log_likelihood_standard_error, np.std(log_likelihoods, ddof=1) / 4.0, rtol=0.02)
    assert result.elbo_monte_carlo_error < 0.01
    assert result.log_likelihood_monte_carlo_error < 0.01


def test_few_samples_are_too_low_by_the_bias_that_is_told() -> None:
    pair, params = network((3,))
    _, log_likelihoods = exact(params, (3,))
    many = evaluate(KEY, *pair, params, np.tile(DIGITS, (500, 1)), num_samples=10, mesh=ONE)
    miss = many.log_likelihood - np.mean(log_likelihoods)
    assert many.log_likelihood_monte_carlo_error < 0.2 * abs(miss)
    np.testing.assert_allclose(many.log_likelihood_bias, miss, rtol=0.3)


def same(one: Evaluation, two: Evaluation) -> None:
    for name, value in one._asdict().items():
        np.testing.assert_allclose(getattr(two, name), value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, 130])
def test_chunks_change_nothing(chunk: int) -> None:
    """Samples of one row in several pieces, which do not come out even; several rows at once, which do not, either."""
    pair, params = network((3,))
    same(*(evaluate(KEY, *pair, params, DIGITS[:13], num_samples=50, chunk=n, mesh=ONE) for n in (500, chunk)))


@pytest.mark.slow
def test_groups_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, params = network((3,))
    one = evaluate(KEY, *pair, params, DIGITS[:13], num_samples=50, mesh=ONE)
    monkeypatch.setattr("proxvi.evaluation.importance_sampling.ON_HOST", 150)  # 3 rows in a group
    same(one, evaluate(KEY, *pair, params, DIGITS[:13], num_samples=50, mesh=ONE, progress=False))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rows"), [((8,), 13), ((8,), 3), ((2, 4), 13)])
def test_eight_devices_give_what_one_does(shape: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, params = network((3,))
    many, parts = jax.make_mesh(shape, ("rows", "else")[: len(shape)]), []

    def spy(*args: Any, **options: Any) -> Any:
        weights = log_weights(*args, **options)

        def look(sharding: Any) -> None:
            indices = sharding.devices_indices_map(weights.shape).values()
            parts.append({index[0].indices(len(weights))[:2] for index in indices})

        jax.debug.inspect_array_sharding(weights, callback=look)
        return weights

    monkeypatch.setattr("proxvi.evaluation.importance_sampling.log_weights", spy)
    same(*(evaluate(KEY, *pair, params, DIGITS[:rows], num_samples=50, mesh=mesh) for mesh in (ONE, many)))
    assert [len(p) for p in parts] == [1, shape[0]]  # each row of devices has rows of its own


def linear_model(x: Any) -> None:
    with numpyro.plate("data", len(x)):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("x", dist.Normal(z @ jnp.asarray(numpyro.param("W")), 0.5).to_event(1), obs=x)


def linear_guide(x: Any) -> None:
    """The posterior is Normal(S W x / σ², S), S = (1 + W Wᵀ / σ²)⁻¹."""
    W, width = (jnp.asarray(numpyro.param(name)) for name in ("W", "width"))
    covariance = jnp.linalg.inv(jnp.eye(2) + 4.0 * W @ W.T) * width**2
    mean = 4.0 * x @ (W.T @ jnp.linalg.inv(jnp.eye(2) + 4.0 * W @ W.T)) + numpyro.param("shift", 0.0)
    with numpyro.plate("data", len(x)):
        numpyro.sample("z", dist.MultivariateNormal(mean, covariance))


def test_a_variable_that_has_changed_since_the_last_call_counts() -> None:
    shift = 0.0

    def model(x: Any) -> None:
        with numpyro.plate("data", len(x)):
            z = jnp.asarray(numpyro.sample("z", dist.Normal(0.0, 1.0)))
            numpyro.sample("x", dist.Normal(z + shift, 1.0), obs=x)

    def guide(x: Any) -> None:
        with numpyro.plate("data", len(x)):
            numpyro.sample("z", dist.Normal(0.5 * (x - shift), 0.5**0.5))  # the posterior: every sample is exact

    def likelihood() -> float:
        return evaluate(KEY, model, guide, {}, np.ones(2), num_samples=2, mesh=ONE).log_likelihood

    for now in (0.0, 3.0):
        shift = now
        np.testing.assert_allclose(likelihood(), dist.Normal(shift, 2**0.5).log_prob(1.0), rtol=1e-5)


LINEAR = {"W": jnp.array([[1.0, -0.5, 2.0], [0.3, 1.0, 0.5]]), "width": 1.0, "shift": 0.0}
X = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)


@pytest.mark.slow
def test_the_posterior_as_guide_leaves_nothing_to_chance() -> None:
    result = evaluate(KEY, linear_model, linear_guide, LINEAR, X, num_samples=100)
    W = np.asarray(LINEAR["W"], np.float64)
    covariance = W.T @ W + 0.25 * np.eye(3)
    square = np.sum(X @ np.linalg.inv(covariance) * X, axis=1)
    truth = -0.5 * (square + np.linalg.slogdet(2 * np.pi * covariance).logabsdet)
    np.testing.assert_allclose(result.log_likelihoods, truth, atol=1e-4)
    np.testing.assert_allclose(result.elbos, truth, atol=1e-4)
    np.testing.assert_allclose(result.effective_sample_sizes, 100.0, rtol=1e-6)
    assert result.elbo_monte_carlo_error < 1e-5
    assert result.log_likelihood_monte_carlo_error < 1e-5
    assert abs(result.log_likelihood_bias) < 1e-8
    np.testing.assert_array_equal(result.khats, -np.inf)
    assert result.khat_above == 0.0
    np.testing.assert_allclose(result.log_likelihood_standard_error, np.std(truth, ddof=1) / 10**0.5, rtol=1e-4)


@pytest.mark.slow
def test_khat_tells_a_bad_guide() -> None:
    """A normal too narrow by the factor c makes weights whose tail has k = 1 − c²."""
    wide, narrow = (
        evaluate(KEY, linear_model, linear_guide, {**LINEAR, "width": width}, X, num_samples=1_000)
        for width in (1.2, 0.1)
    )
    assert wide.khat_above == 0.0
    assert wide.effective_sample_size > 900.0
    assert narrow.khat_above >= 0.8
    assert abs(np.mean(narrow.khats) - 0.99) < 0.2
    assert narrow.effective_sample_size < 50.0


def test_a_guide_that_misses_by_far_has_infinite_khat() -> None:
    """Beside the largest weight all others are 0 in float64."""
    params = {**LINEAR, "shift": 1e4}
    result = evaluate(KEY, linear_model, linear_guide, params, X, num_samples=100)
    np.testing.assert_array_equal(result.khats, np.inf)
    assert result.khat_above == 1.0


def test_heavy_tails_are_told_by_khat_and_not_by_warnings() -> None:
    """Log weights with a spread of hundreds of nats, the limit of float64, overflow as they are fitted."""

    def model(x: Any) -> None:
        with numpyro.plate("data", len(x)):
            z = numpyro.sample("z", dist.Normal())
            numpyro.factor("tail", 400.0 * z)

    def guide(x: Any) -> None:
        with numpyro.plate("data", len(x)):
            numpyro.sample("z", dist.Normal())

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        result = evaluate(KEY, model, guide, {}, np.zeros(20, np.float32), num_samples=5_000)
    assert result.khat_above == 1.0


@pytest.mark.slow
def test_all_results_are_those_of_the_weights_one_by_one() -> None:
    """The weights by NumPyro's own `log_density`, a row and a sample at a time; k̂ by ArviZ, of all of them."""
    params = {**LINEAR, "width": 0.5}
    result = evaluate(KEY, linear_model, linear_guide, params, X, num_samples=200)

    @jax.jit
    def log_weight(row: Any, number: Any, sample: Any) -> Any:
        _, key = jax.random.split(jax.random.fold_in(KEY, number))
        guide = handlers.seed(handlers.substitute(linear_guide, params), jax.random.fold_in(key, sample))
        z = handlers.trace(guide).get_trace(row[None])["z"]["value"]
        log_p, log_q = (log_density(f, (row[None],), {}, {**params, "z": z})[0] for f in (linear_model, linear_guide))
        return log_p - log_q

    w = np.array([[log_weight(row, n, s) for s in range(200)] for n, row in enumerate(X)], np.float64)
    np.testing.assert_allclose(result.elbos, np.mean(w, axis=1), atol=1e-4)
    total, total_of_squares = np.logaddexp.reduce(w, axis=1), np.logaddexp.reduce(2 * w, axis=1)
    np.testing.assert_allclose(result.log_likelihoods, total - np.log(200), atol=1e-4)
    np.testing.assert_allclose(result.effective_sample_sizes, np.exp(2 * total - total_of_squares), rtol=1e-3)
    np.testing.assert_allclose(result.khats, array_stats.psislw(-w)[1], atol=1e-3)
    np.testing.assert_allclose(
        result.elbo_monte_carlo_error, np.sum(np.var(w, axis=1, ddof=1) / 200) ** 0.5 / 10, rtol=1e-3
    )
    e = np.exp(w - np.max(w, axis=1, keepdims=True))
    delta = np.var(e, axis=1, ddof=1) / 200 / np.mean(e, axis=1) ** 2
    np.testing.assert_allclose(result.log_likelihood_monte_carlo_error, np.sum(delta) ** 0.5 / 10, rtol=1e-3)
    np.testing.assert_allclose(result.log_likelihood_bias, -0.5 * np.mean(delta), rtol=1e-3)
    assert result.khat_above == np.mean(result.khats > 0.7)


@pytest.mark.slow
def test_scales_of_training_are_left_out() -> None:
    """A subsampled plate of rows, and a temperature."""

    def model(x: Any) -> None:
        with numpyro.plate("data", 1_000, subsample_size=len(x)):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
            numpyro.sample("x", dist.Normal(z @ jnp.asarray(numpyro.param("W")), 0.5).to_event(1), obs=x)

    params = {**LINEAR, "width": 0.8}
    plain = evaluate(KEY, linear_model, linear_guide, params, X, num_samples=100)
    same(plain, evaluate(KEY, model, handlers.scale(linear_guide, scale=7.0), params, X, num_samples=100))


def test_rows_have_the_parameters_of_their_own_number() -> None:
    """A guide with a mean for each row, which is the posterior's; the model is trained on some rows at a time."""
    x = 10.0 * np.arange(5, dtype=np.float32)

    def model(x: Any) -> None:
        with numpyro.plate("data", 5, subsample_size=len(x)):
            numpyro.sample("x", dist.Normal(numpyro.sample("z", dist.Normal(0.0, 10.0)), 1.0), obs=x)

    def guide(x: Any) -> None:
        means = jnp.asarray(numpyro.param("means", jnp.zeros(5)))
        with numpyro.plate("data", 5, subsample_size=len(x)) as row:
            numpyro.sample("z", dist.Normal(means[row], (100 / 101) ** 0.5))

    result = evaluate(KEY, model, guide, {"means": x * 100 / 101}, x, num_samples=100, chunk=150)
    np.testing.assert_allclose(result.elbos, dist.Normal(0.0, 101**0.5).log_prob(x), rtol=1e-4)


def test_rows_without_khat_are_told_apart() -> None:
    """Of samples that are all one value but for a few, PSIS knows nothing."""

    def model(x: Any) -> None:
        with numpyro.plate("data", len(x)):
            numpyro.sample("x", dist.Normal(10.0 * numpyro.sample("z", dist.Bernoulli(0.5)), 1.0), obs=x)

    def guide(x: Any) -> None:
        with numpyro.plate("data", len(x)):
            numpyro.sample("z", dist.Bernoulli(jnp.where(x > 20.0, 0.5, 0.002)))

    result = evaluate(KEY, model, guide, {}, np.array([9.0, 10.0, 11.0, 30.0], np.float32), num_samples=2_000)
    assert list(np.isnan(result.khats)) == [True, True, True, False]
    assert result.khat_above == 0.0
    assert "0% of rows with k̂ above 0.7 (3 without k̂ not counted)" in str(result)


def test_several_arguments_are_a_tuple() -> None:
    def model(x: Any, y: Any) -> None:
        with numpyro.plate("data", len(x)):
            z = numpyro.sample("z", dist.Normal(x, 1.0))
            numpyro.sample("y", dist.Normal(z, 1.0), obs=y)

    def guide(x: Any, y: Any) -> None:
        with numpyro.plate("data", len(x)):
            numpyro.sample("z", dist.Normal((x + y) / 2.0, 0.5**0.5))

    result = evaluate(KEY, model, guide, {}, (X[:, 0], X[:, 1]), num_samples=10)
    truth = dist.Normal(X[:, 0], 2.0**0.5).log_prob(X[:, 1])
    np.testing.assert_allclose(result.log_likelihoods, truth, atol=1e-5)


def test_samples_that_the_model_rules_out_count_as_nothing() -> None:
    """The prior is the upper half of a normal; the guide does not know."""

    def model(x: Any) -> None:
        with numpyro.plate("data", len(x)):
            z = jnp.asarray(numpyro.sample("z", dist.Normal(0.0, 1.0)))
            numpyro.factor("half", jnp.where(z > 0.0, jnp.log(2.0), -jnp.inf))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x: Any) -> None:
        with numpyro.plate("data", len(x)):
            numpyro.sample("z", dist.Normal(0.0, 1.0))

    result = evaluate(KEY, model, guide, {}, np.zeros(1, np.float32), num_samples=5_000)
    assert result.elbo == -np.inf
    truth = float(dist.Normal(0.0, 2.0**0.5).log_prob(0.0))  # by symmetry that of the whole normal
    assert abs(result.log_likelihood - truth) < 4 * result.log_likelihood_monte_carlo_error < 0.1
    assert np.isnan(result.log_likelihood_standard_error)  # of one row


@pytest.mark.slow
def test_without_arviz_or_with_few_samples_khat_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    few = evaluate(KEY, linear_model, linear_guide, {**LINEAR, "width": 0.5}, X, num_samples=10)
    monkeypatch.setitem(sys.modules, "arviz_stats.base.array", None)
    without = evaluate(KEY, linear_model, linear_guide, {**LINEAR, "width": 0.5}, X, num_samples=100)
    for result in (few, without):
        assert np.all(np.isnan(result.khats))
        assert np.isnan(result.khat_above)
        assert "no k̂" in str(result)


def test_a_summary_is_printed() -> None:
    result = evaluate(KEY, linear_model, linear_guide, {**LINEAR, "width": 0.1}, X, num_samples=100)
    lines = str(result).splitlines()
    assert [line.split()[0] for line in lines] == ["mean", "ELBO", "log", "10"]
    assert f"{result.elbo:.3f}" in lines[1]
    assert f"{result.log_likelihood:.3f}" in lines[2]
    assert f"of 100 samples effective, {result.khat_above:.0%} of rows with k̂ above 0.7" in lines[3]


def shared(x: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("x", dist.Normal(mean, 1.0).expand((3,)).to_event(1), obs=x)


def shared_guide(_: Any) -> None:
    numpyro.sample("mean", dist.Normal(0.0, 1.0))


def some_pixels(x: Any) -> None:
    with numpyro.plate("data", len(x), dim=-2):
        z = jnp.asarray(numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).expand((len(x), 1, 2)).to_event(1)))
        with numpyro.plate("pixels", 3, subsample_size=2, dim=-1) as at:
            numpyro.sample("x", dist.Normal(z[..., 0], 1.0), obs=x[:, at])


def some_pixels_guide(x: Any) -> None:
    with numpyro.plate("data", len(x), dim=-2):
        numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).expand((len(x), 1, 2)).to_event(1))


def batch_norm(x: Any) -> None:
    primitives.mutable("norm", 1.0)
    linear_guide(x)


def more(x: Any) -> None:
    linear_guide(x)
    with numpyro.plate("data", len(x)):
        numpyro.sample("more", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 1}, r"`num_samples` must be an integer of at least 2, got 1; the error is estimated from"),
        ({"num_samples": 2.5}, r"`num_samples` must be an integer .*got 2\.5"),
        ({"num_samples": True}, r"`num_samples` must be an integer .*got True"),
        ({"chunk": 0}, r"`chunk` must be an integer of at least 1, got 0; a smaller one takes less memory"),
        ({"data": X[:0]}, r"`data` must have one leading axis in common.*got lengths \[0\]; write `x\[None\]`"),
        ({"data": (X, X[:5])}, r"`data` must have one leading axis .*got lengths \[5, 10\]"),
        ({"data": np.float32(3.0)}, r"`data` must have one leading axis"),
        ({"params": {"W": LINEAR["W"], "width": 1.0}}, r"`params` must hold all parameters, got none for \['shift'\]"),
        ({"guide": batch_norm}, r"got none for \['norm'\]; pass `\{\*\*result.params, \*\*result.state.mutable_state"),
        ({"guide": lambda x: None}, r"`guide` must sample the latent variables of `model`, got \['z'\] in one"),
        (
            {"guide": more},
            r"`guide` must sample the latent .*got \['more'\] in one of them only; add them to the other",
        ),
        ({"model": shared, "guide": shared_guide}, r"must give each row latent variables of its own, got `mean`"),
        (
            {"model": some_pixels, "guide": some_pixels_guide},
            r"must see all of a row, got the plate `pixels` with 2 of 3",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    import jaxtyping

    arguments = {
        "key": KEY,
        "model": linear_model,
        "guide": linear_guide,
        "params": LINEAR,
        "data": X,
        "num_samples": 10,
        **arguments,
    }
    jaxtyping.config.update("jaxtyping_disable", True)  # beartype would refuse some of them first; users do not have it
    try:
        with pytest.raises(ValueError, match=message):
            evaluate(**arguments)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
