"""The sigmoid belief network: the densities that the paper writes down, and a Bernoulli that is right everywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.util import log_density

import proxvi
from proxvi_paper.models.bernoulli import Bernoulli, softplus
from proxvi_paper.models.sbn import BAD, GOOD, Start, belief_network

KEY = jax.random.key(0)
X = np.random.default_rng(0).integers(0, 2, (20, 6), dtype=np.uint8)
LOGITS = np.concatenate([np.linspace(-120, 120, 1_001), [-1e-8, 0.0, 1e-8, -1e4, 1e4, -np.inf, np.inf]])


@pytest.fixture(autouse=True)
def ranks_are_numpyros_business() -> Any:
    with jax.numpy_rank_promotion("allow"):
        yield


def sigmoid(x: Any) -> Any:
    return np.exp(-np.logaddexp(0.0, -np.asarray(x, np.float64)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softplus_and_its_slope_are_exact(dtype: Any) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(LOGITS, dtype)
        value, slope = softplus(x), jax.vmap(jax.grad(softplus))(x)
        exact = np.logaddexp(0.0, np.asarray(x, np.float64))
        assert value.dtype == slope.dtype == dtype
        # XLA flushes numbers below the smallest normal one to 0
        tiny = np.finfo(dtype).tiny
        np.testing.assert_allclose(value, exact, rtol=4 * np.finfo(dtype).eps, atol=tiny)
        np.testing.assert_allclose(slope, sigmoid(x), rtol=1e-6 if dtype == np.float32 else 1e-13, atol=tiny)
        assert float(jax.grad(softplus)(jnp.zeros((), dtype))) == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [0, 1, False, True, np.uint8(1), 1.0])
def test_log_density_is_that_of_a_bernoulli(dtype: Any, value: Any) -> None:
    with jax.enable_x64(True):
        logits = jnp.asarray(LOGITS, dtype)
        log_prob = Bernoulli(logits, validate_args=False).log_prob(value)  # which would refuse the infinite ones
        slope = jax.vmap(jax.grad(lambda logit: Bernoulli(logit).log_prob(value)))(logits)
        sign = 1.0 if value else -1.0
        exact = -np.logaddexp(0.0, -sign * np.asarray(logits, np.float64))
        np.testing.assert_allclose(log_prob, exact, rtol=4 * np.finfo(dtype).eps, atol=np.finfo(dtype).tiny)
        np.testing.assert_allclose(slope, sign * sigmoid(-sign * np.asarray(logits, np.float64)), rtol=1e-6, atol=1e-37)


@pytest.mark.slow
def test_a_layer_adds_up_its_units_and_keeps_numpyros_shapes() -> None:
    logits = jax.random.normal(KEY, (20, 50))
    ours, theirs = Bernoulli(logits).to_event(1), dist.Bernoulli(logits=logits).to_event(1)
    x = jnp.asarray(theirs.sample(KEY))
    np.testing.assert_array_equal(ours.sample(KEY), x)
    np.testing.assert_allclose(ours.log_prob(x), theirs.log_prob(x), rtol=1e-5)
    for many in (0, 1, 2, None):
        mine, reference = (d.to_event(many) for d in (Bernoulli(logits), dist.Bernoulli(logits=logits)))
        assert (mine.batch_shape, mine.event_shape) == (reference.batch_shape, reference.event_shape)
    wider = ours.expand((3, 20))
    assert wider.batch_shape == (3, 20)
    np.testing.assert_allclose(wider.log_prob(x), jnp.tile(theirs.log_prob(x), (3, 1)), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(lambda d: d.log_prob(x[0]))(ours), theirs.log_prob(x[:1]), rtol=1e-5)


@pytest.mark.slow
def test_statistics_know_the_bernoulli() -> None:
    logits = jax.random.normal(KEY, (20, 5))
    q, q0 = Bernoulli(logits).to_event(1), dist.Bernoulli(logits=logits).to_event(1)
    p, p0 = Bernoulli(jnp.zeros((20, 5))).to_event(1), dist.Bernoulli(logits=jnp.zeros((20, 5))).to_event(1)
    np.testing.assert_array_equal(proxvi.entropy(q), proxvi.entropy(q0))
    np.testing.assert_array_equal(proxvi.mean_variance(q)[0], proxvi.mean_variance(q0)[0])
    np.testing.assert_array_equal(proxvi.kl_to_prior(q, prior=p), proxvi.kl_to_prior(q0, prior=p0))


def parameters(units: tuple[int, ...], start: Start = GOOD) -> dict[str, Any]:
    svi = proxvi.ProximitySVI(
        *belief_network(X.mean(0), units=units, start=start), optax.adam(1e-3), proxvi.LeaveOneOutELBO(2), ()
    )
    return svi.get_params(svi.init(KEY, X))


def bernoulli(logits: Any, value: Any) -> float:
    """Sum of log densities, in float64."""
    return float(
        np.sum(-np.logaddexp(0.0, np.where(np.asarray(value) == 1, -1.0, 1.0) * np.asarray(logits, np.float64)))
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, bool])
def test_model_and_guide_are_what_the_equations_say(dtype: Any) -> None:
    """Three layers; the log densities are those of one row, the mean over the batch."""
    x = X.astype(dtype)
    network = belief_network(X.mean(0), units=(5, 4, 3))
    p = {name: value + 0.1 for name, value in parameters((5, 4, 3)).items()}
    guide = numpyro.handlers.seed(numpyro.handlers.substitute(network.guide, data=p), KEY)
    z = {k: v["value"] for k, v in numpyro.handlers.trace(guide).get_trace(x).items() if v["type"] == "sample"}
    assert {name: value.shape for name, value in z.items()} == {"z1": (20, 5), "z2": (20, 4), "z3": (20, 3)}

    def logits(name: str, inputs: Any) -> Any:
        return np.asarray(inputs, np.float64) @ np.asarray(p[f"{name}_weights"]) + np.asarray(p[f"{name}_bias"])

    joint = bernoulli(np.tile(p["prior"], (20, 1)), z["z3"]) + bernoulli(logits("decoder3", z["z3"]), z["z2"])
    joint += bernoulli(logits("decoder2", z["z2"]), z["z1"]) + bernoulli(logits("decoder1", z["z1"]), X)
    np.testing.assert_allclose(log_density(network.model, (x,), {}, {**p, **z})[0], joint / 20, rtol=1e-5)
    log_q = bernoulli(logits("encoder1", X - X.mean(0)), z["z1"]) + bernoulli(logits("encoder2", z["z1"]), z["z2"])
    log_q += bernoulli(logits("encoder3", z["z2"]), z["z3"])
    np.testing.assert_allclose(log_density(network.guide, (x,), {}, {**p, **z})[0], log_q / 20, rtol=1e-5)


@pytest.mark.slow
def test_starts_are_the_papers() -> None:
    good, bad = parameters((4, 3)), parameters((4, 3), BAD)
    assert good.keys() == bad.keys()
    np.testing.assert_array_equal(good["prior"], 0.0)
    np.testing.assert_allclose(sigmoid(bad["prior"]), 0.001, rtol=1e-5)
    for layer, shape in ((1, (4, 6)), (2, (3, 4))):
        assert good[f"decoder{layer}_weights"].shape == shape
        bound = np.sqrt(6 / sum(shape))
        assert 0.5 * bound < np.abs(good[f"decoder{layer}_weights"]).max() <= bound
        np.testing.assert_array_equal(bad[f"decoder{layer}_weights"], -100.0)
        assert 0.5 * bound < np.abs(bad[f"encoder{layer}_weights"]).max() <= bound
    for params in (good, bad):
        assert all(not np.any(value) for name, value in params.items() if name.endswith("bias"))


@pytest.mark.slow
def test_one_key_is_one_start() -> None:
    svi = proxvi.ProximitySVI(*belief_network(X.mean(0)), optax.adam(1e-3), proxvi.LeaveOneOutELBO(2), ())
    one, same, other = (svi.get_params(svi.init(jax.random.key(seed), X)) for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["decoder1_weights"], other["decoder1_weights"])
    assert not np.array_equal(one["decoder1_weights"].T[:6], one["encoder1_weights"][:6])


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [proxvi.LeaveOneOutELBO(5), proxvi.VimcoELBO(5)], ids=["LeaveOneOut", "Vimco"])
def test_loss_and_gradient_are_means_over_the_rows(estimator: Any) -> None:
    """Against the same network whose rows are added up, as NumPyro's plates do: everything is a twentieth of it."""
    network, params = belief_network(X.mean(0), units=(4,)), parameters((4,))

    def model(x: Any) -> None:
        with numpyro.plate("data", len(x)):
            z = numpyro.sample("z1", dist.Bernoulli(logits=numpyro.param("prior", jnp.zeros(4))).to_event(1))
            W, b = (jnp.asarray(numpyro.param(name)) for name in ("decoder1_weights", "decoder1_bias"))
            numpyro.sample("x", dist.Bernoulli(logits=z @ W + b).to_event(1), obs=x)

    def guide(x: Any) -> None:
        W, b = numpyro.param("encoder1_weights", None), numpyro.param("encoder1_bias", None)
        with numpyro.plate("data", len(x)):
            numpyro.sample("z1", dist.Bernoulli(logits=(x - X.mean(0)) @ W + b).to_event(1))

    def loss(params: Any, model: Any, guide: Any) -> Any:
        return estimator.loss(KEY, params, model, guide, X.astype(np.float32))

    both = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    mine, gradient = both({k: v + 0.1 for k, v in params.items()}, *network)
    total, gradients = both({k: v + 0.1 for k, v in params.items()}, model, guide)
    np.testing.assert_allclose(mine, total / 20, rtol=1e-5)
    for name, value in gradients.items():
        np.testing.assert_allclose(gradient[name], value / 20, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statistic", "loss"),
    [
        pytest.param(proxvi.entropy, proxvi.LeaveOneOutELBO(5), marks=pytest.mark.nightly),
        pytest.param(proxvi.mean_variance, proxvi.VimcoELBO(5), marks=pytest.mark.nightly),
        pytest.param(proxvi.kl_to_prior, proxvi.LeaveOneOutELBO(5), marks=pytest.mark.nightly),
        (proxvi.entropy, proxvi.AnnealedELBO(proxvi.LeaveOneOutELBO(5), optax.exponential_decay(1.0, 20, 1e-10))),
    ],
    ids=["entropy", "mean-variance, Vimco", "KL", "annealed"],
)
def test_every_estimator_and_statistic_trains_it(statistic: Any, loss: Any) -> None:
    constraint = proxvi.Proximity(
        statistic, magnitude=optax.exponential_decay(1.0, 50, 1e-10), reference=proxvi.statistic_average()
    )
    network = belief_network(X.mean(0), units=(4, 3), start=BAD)
    svi = proxvi.ProximitySVI(*network, optax.adam(0.1, eps=1e-6), loss, constraint)
    result = proxvi.fit(svi, KEY, 200, X, batch_size=5)
    assert np.all(np.isfinite(result.losses))
    assert float(svi.evaluate(result.state, X)) < 0.6 * float(svi.evaluate(svi.init(KEY, X), X))
    reference = jax.tree.leaves(result.state.constraints[0].constraint.reference)
    assert {jnp.shape(leaf) for leaf in reference} == {(4,), (3,)}  # unit by unit, whatever the batch


@pytest.mark.parametrize(
    ("mean", "options", "message"),
    [
        (0.13, {}, r"`mean` must be a vector of finite numbers.*got .*0\.13.*x\.mean\(0\)"),
        (X, {}, "`mean` must be a vector"),
        (np.array([]), {}, "`mean` must be a vector"),
        (np.array([0.1, np.nan]), {}, r"`mean` must be a vector of finite numbers.*nan"),
        (["a"], {}, "`mean` must be a vector of finite numbers"),
        (X.mean(0), {"units": ()}, r"`units` must be positive integers.*got \(\).*\(200,\) is one layer"),
        (X.mean(0), {"units": (5, 0)}, r"`units` must be positive integers.*got \(5, 0\)"),
        (X.mean(0), {"units": (2.5,)}, r"`units` must be positive integers.*2\.5"),
        (X.mean(0), {"start": Start(0.0, jax.nn.initializers.zeros)}, r"`start\.prior` must be .* above 0 and below 1"),
        (X.mean(0), {"start": Start(1.5, jax.nn.initializers.zeros)}, r"`start\.prior`.*got 1\.5; 0\.5 is no"),
    ],
)
def test_bad_arguments_are_refused(mean: Any, options: Any, message: str) -> None:
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)  # beartype would refuse some of them first; users do not have it
    try:
        with pytest.raises(ValueError, match=message):
            belief_network(mean, **options)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("x", [X[0], X[:, :5], X[None]], ids=["a row", "too few pixels", "too many axes"])
def test_other_shapes_of_data_are_refused(x: Any) -> None:
    network = belief_network(X.mean(0), units=(4,))
    for function in network:
        with pytest.raises(ValueError, match=r"`x` must be rows of 6 pixels.*got shape"):
            numpyro.handlers.seed(function, KEY)(x)
