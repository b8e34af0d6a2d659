"""ProximitySVI: NumPyro's own SVI where the constraint is silent, the Optax door's updates where it is not."""

from typing import Any

import arviz_base
import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from arviz_stats.base.array import array_stats
from jax.flatten_util import ravel_pytree
from numpyro import primitives
from numpyro.contrib.control_flow import scan
from numpyro.contrib.module import eqx_module, nnx_module
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

import proxvi
from proxvi.svi import with_loss

KEY = jax.random.key(0)
FEATURES = jax.random.normal(KEY, (50, 3))
Y = FEATURES @ jnp.array([1.0, -2.0, 0.5]) + 0.3 * jax.random.normal(jax.random.key(1), (50,))
PIXELS = (jax.random.uniform(KEY, (20, 12)) < 0.3).astype(jnp.float32)


# Many runs here are too short, or their magnitude constant on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")


@pytest.fixture(autouse=True)
def ranks_are_numpyros_business() -> Any:
    with jax.numpy_rank_promotion("allow"):
        yield


def regression(features: Any = FEATURES, y: Any = Y) -> None:
    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(features @ weights, scale).to_event(1), obs=y)


def belief_network(batch: Any) -> None:
    kernel = jnp.asarray(numpyro.param("decoder", 0.1 * jax.random.normal(KEY, (4, 12))))
    with numpyro.plate("data", batch.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(logits=numpyro.param("prior", jnp.full(4, 0.1))).to_event(1))
        numpyro.sample("x", dist.Bernoulli(logits=z @ kernel).to_event(1), obs=batch)


def belief_guide(batch: Any) -> None:
    kernel = numpyro.param("encoder", 0.1 * jax.random.normal(jax.random.key(1), (12, 4)))
    with numpyro.plate("data", batch.shape[0]):
        numpyro.sample("z", dist.Bernoulli(logits=batch @ kernel + 0.05).to_event(1))


def constraint(statistic: Any = proxvi.entropy, magnitude: Any = 1.0, **options: Any) -> proxvi.Proximity:
    return proxvi.Proximity(statistic, magnitude=magnitude, **options)


def same_bits(one: Any, two: Any) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "guide", "loss", "args"),
    [
        (regression, AutoNormal(regression), Trace_ELBO(3), ()),
        (belief_network, belief_guide, proxvi.LeaveOneOutELBO(5), (PIXELS,)),
        (belief_network, belief_guide, proxvi.VimcoELBO(5), (PIXELS,)),
    ],
    ids=["Trace", "LeaveOneOut", "Vimco"],
)
def test_magnitude_zero_is_numpyros_svi_to_the_last_bit(model: Any, guide: Any, loss: Any, args: Any) -> None:
    ours = proxvi.ProximitySVI(model, guide, optax.adam(0.01), loss, constraint(magnitude=0.0))
    theirs = SVI(model, guide, optax.adam(0.01), loss)
    results = [svi.run(KEY, 1_000, *args, progress_bar=False) for svi in (ours, theirs)]
    assert same_bits(results[0].params, results[1].params)
    assert same_bits(results[0].losses, results[1].losses)
    assert same_bits(results[0].state.optim_state, results[1].state.optim_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("average", "particles"),
    [
        (proxvi.parameter_average(0.9), 3),
        (proxvi.statistic_average(0.9), 1),
        pytest.param(proxvi.parameter_average(0.9), 1, marks=pytest.mark.nightly),
        pytest.param(proxvi.statistic_average(0.9), 3, marks=pytest.mark.nightly),
    ],
)
def test_both_doors_give_the_same_updates(average: Any, particles: int) -> None:
    """The same constraint, through ProximitySVI and as a link in the Optax chain of NumPyro's SVI."""
    guide = AutoDiagonalNormal(regression, init_scale=0.5)
    definition: dict[str, Any] = {
        "magnitude": optax.exponential_decay(1.0, 300, 1e-3),
        "reference": average,
        "distance": proxvi.squared,  # no kink, at which rounding would grow
    }
    adam = optax.adam(0.01)

    def entropy(params: Any) -> Any:
        q = dist.Normal(params["auto_loc"], jax.nn.softplus(params["auto_scale"])).to_event(1)
        return proxvi.entropy({"_auto_latent": q})

    one = proxvi.proximity(adam, proxvi.Proximity(entropy, **definition))
    first = SVI(regression, guide, one, Trace_ELBO(particles)).run(KEY, 100, progress_bar=False)
    second = proxvi.ProximitySVI(regression, guide, adam, Trace_ELBO(particles), constraint(**definition)).run(
        KEY, 100, progress_bar=False
    )
    plain = SVI(regression, guide, adam, Trace_ELBO(particles)).run(KEY, 100, progress_bar=False)
    for name in first.params:
        np.testing.assert_allclose(second.params[name], first.params[name], rtol=2e-4, atol=2e-5)
    assert not np.allclose(plain.params["auto_scale"], first.params["auto_scale"], rtol=1e-2)
    (link,), (ours,) = (proxvi.telemetry(r.state) for r in (first, second))
    np.testing.assert_allclose(ours.magnitude, link.magnitude, rtol=1e-4)
    # `proximity` measured its share at step 97, the latest one after a multiple of 16
    short = proxvi.ProximitySVI(regression, guide, adam, Trace_ELBO(particles), constraint(**definition))
    (ours,) = proxvi.telemetry(short.run(KEY, 97, progress_bar=False).state)
    np.testing.assert_allclose(ours.share, link.share, rtol=0.01)


@pytest.mark.slow
def test_losses_are_the_true_negative_elbo() -> None:
    """Also where the penalty is huge."""
    guide = AutoNormal(regression)
    far = constraint(
        lambda q: proxvi.mean_variance(q["weights"]), 1e3, distance=lambda x, y: 1e3 + proxvi.squared(x, y)
    )
    svi = proxvi.ProximitySVI(regression, guide, optax.sgd(0.0), Trace_ELBO(), far)
    plain = SVI(regression, guide, optax.sgd(0.0), Trace_ELBO())
    state, plain_state = svi.init(KEY), plain.init(KEY)
    assert svi.evaluate(state) == plain.evaluate(plain_state)
    np.testing.assert_allclose(svi.update(state)[1], plain.update(plain_state)[1], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "of", [proxvi.kl_to_prior, lambda q, prior: jnp.mean(q["z"].mean - prior["z"].mean)], ids=["KL", "one's own"]
)
def test_constraint_reaches_only_the_guide(of: Any) -> None:
    """With an optimiser that does nothing but add gradients up, the decoder sees the ELBO's gradient alone."""
    statistic = constraint(of, 100.0, relative=False, reference=proxvi.statistic_average(0.5))
    svi = proxvi.ProximitySVI(belief_network, belief_guide, optax.sgd(0.1), proxvi.LeaveOneOutELBO(5), statistic)
    plain = SVI(belief_network, belief_guide, optax.sgd(0.1), proxvi.LeaveOneOutELBO(5))
    ours, theirs = svi.init(KEY, PIXELS), plain.init(KEY, PIXELS)
    ours, _ = svi.update(ours, PIXELS)
    theirs, _ = plain.update(theirs, PIXELS)
    # the second step starts from the same parameters, with a reference that they have left
    ours, _ = svi.update(ours, PIXELS)
    theirs, _ = plain.update(theirs, PIXELS)
    one, two = svi.get_params(ours), plain.get_params(theirs)
    for name in ("decoder", "prior"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-6, atol=1e-7)
    assert not np.allclose(one["encoder"], two["encoder"], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [TraceGraph_ELBO, proxvi.LeaveOneOutELBO])
def test_divergence_of_layers_is_the_mean_over_particles_and_not_that_of_their_mean(loss: Any) -> None:
    def model() -> None:
        numpyro.sample("below", dist.Bernoulli(0.5))
        numpyro.sample("above", dist.Bernoulli(0.5))

    def guide() -> None:
        below = numpyro.sample("below", dist.Bernoulli(0.5))
        weight = jnp.asarray(numpyro.param("weight", 5.0))
        numpyro.sample("above", dist.Bernoulli(logits=weight * (2.0 * below - 1.0)))

    statistic = constraint(proxvi.identity, 1.0, distance=proxvi.kl, reference=proxvi.parameter_average(0.0))
    svi = proxvi.ProximitySVI(model, guide, optax.sgd(0.0), loss(20), statistic)
    state, _ = svi.update(svi.init(KEY))
    held = state.constraints[0]
    before = held.constraint._replace(reference=jax.tree.map(jnp.zeros_like, held.constraint.reference))
    state, _ = svi.update(state._replace(constraints=(held._replace(constraint=before),)))
    expected = np.log(2.0) - proxvi.entropy(dist.Bernoulli(logits=5.0))  # of the unit above, whatever is below
    np.testing.assert_allclose(
        jnp.stack([report.distance for report in proxvi.telemetry(state)]), [expected], rtol=1e-5
    )


@pytest.mark.slow
def test_a_positive_vector_of_an_autoguide_is_held_unit_by_unit() -> None:
    def model() -> None:
        numpyro.sample("scales", dist.LogNormal(0.0, 1.0).expand([3]).to_event(1))

    shapes = []

    def both(q: Any, prior: Any) -> Any:
        found = proxvi.entropy(q["scales"]), proxvi.kl_to_prior(q["scales"], prior["scales"])
        shapes.extend(x.shape for x in found)
        return found

    svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.sgd(0.1), Trace_ELBO(), constraint(both))
    svi.update(svi.init(KEY))
    assert set(shapes) == {(3,)}


@pytest.mark.slow
def test_what_an_optimiser_has_infinite_by_design_is_no_fault() -> None:
    optimizer = optax.chain(optax.adam(0.05), optax.contrib.reduce_on_plateau(accumulation_size=50))
    svi = proxvi.ProximitySVI(regression, AutoNormal(regression), optimizer, Trace_ELBO(), ())
    assert svi.run(KEY, 60, progress_bar=False).state.skipped.total == 0


@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (1_000,)])
def test_whether_all_is_finite_does_not_hang_on_size_or_precision(shape: tuple[int, ...]) -> None:
    from proxvi.svi._nonfinite import is_finite

    assert is_finite(jnp.full(shape, 100.0, jnp.float16))
    assert is_finite(jnp.full(shape, jnp.nan)) == (0 in shape)


@pytest.mark.slow
def test_an_autoguide_that_has_started_is_not_mapped_over_keys_in_silence() -> None:
    svi = proxvi.ProximitySVI(regression, AutoNormal(regression), optax.adam(0.1), Trace_ELBO(), ())
    svi.init(KEY)
    with pytest.warns(UserWarning, match="`guide` must be new where"):
        jax.vmap(svi.init)(jax.random.split(KEY, 2))


@pytest.mark.slow
def test_a_state_before_init_is_refused() -> None:
    state = (svi := make_regression()).init(KEY)
    with pytest.raises(ValueError, match="`svi_state` must come from `init`"):
        make_regression().update(state)
    with_loss(svi, Trace_ELBO(2)).update(state)  # another ELBO goes on from it


def make_regression() -> proxvi.ProximitySVI:
    return proxvi.ProximitySVI(regression, AutoNormal(regression), optax.adam(0.1), Trace_ELBO(), constraint())


GUIDES = {
    "AutoNormal": AutoNormal,
    "AutoDiagonalNormal": AutoDiagonalNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": AutoLowRankMultivariateNormal,
    "AutoIAFNormal": AutoIAFNormal,
}


RARE = tuple(name for name in GUIDES if name != "AutoNormal")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in RARE else ()) for name in GUIDES]
)
def test_autoguides(name: str) -> None:
    """The entropy of each autoguide is found by itself (by Monte Carlo for the flow), held back, and let go."""

    def share(result: Any) -> Any:
        return proxvi.telemetry(result.state)[0].share

    steps = 1_500
    guide = GUIDES[name](regression)
    svi = proxvi.ProximitySVI(
        regression,
        guide,
        optax.adam(0.01, b2=0.99),
        Trace_ELBO(5),
        constraint(magnitude=optax.exponential_decay(1.0, steps, 1e-8)),
    )
    with pytest.warns(UserWarning, match="still makes up"):
        early = svi.run(KEY, 50, progress_bar=False)
    assert share(early) > 0.01
    result = svi.run(KEY, steps - 50, init_state=early.state, progress_bar=False)
    assert share(result) < 0.01
    samples = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(500,))
    np.testing.assert_allclose(samples["weights"].mean(0), [1.0, -2.0, 0.5], atol=0.15)


@pytest.mark.slow
def test_autodelta_says_that_a_point_has_no_entropy() -> None:
    svi = proxvi.ProximitySVI(regression, AutoDelta(regression), optax.adam(0.1), Trace_ELBO(), constraint())
    with pytest.raises(ValueError, match=r"`q` must hold at least one distribution, got {}.*AutoNormal for AutoDelta"):
        svi.run(KEY, 10, progress_bar=False)


@pytest.mark.slow
def test_a_point_has_parameters_to_constrain() -> None:
    held = constraint(lambda q, params: params["weights_auto_loc"], 100.0, relative=False)
    svi = proxvi.ProximitySVI(regression, AutoDelta(regression), optax.adam(0.1), Trace_ELBO(), held)
    with pytest.warns(UserWarning, match="still makes up"):
        svi.run(KEY, 10, progress_bar=False)


@pytest.mark.slow
def test_named_sites_parameters_and_several_constraints() -> None:
    several = [
        constraint(lambda q: proxvi.entropy(q["z"]), 1.0),
        constraint(lambda q, params: proxvi.orthogonal(params["encoder"]), 0.1, relative=False),
    ]
    svi = proxvi.ProximitySVI(belief_network, belief_guide, optax.adam(0.01), proxvi.LeaveOneOutELBO(5), several)
    result = svi.run(KEY, 50, PIXELS, progress_bar=False)
    entropy, orthogonal = proxvi.telemetry(result.state)
    assert orthogonal.magnitude == pytest.approx(0.1)
    assert entropy.distance > 0
    assert orthogonal.distance > 0
    assert 0 < entropy.share < 1


def test_a_statistic_that_asks_for_what_is_not_there_is_told_what_is() -> None:
    wrong = constraint(lambda q: proxvi.entropy(q["latent"]))
    svi = proxvi.ProximitySVI(belief_network, belief_guide, optax.adam(0.01), proxvi.LeaveOneOutELBO(2), wrong)
    with pytest.raises(ValueError, match=r"got the key 'latent'; the guide has the sites \['z'\].*\['encoder'\]"):
        jax.eval_shape(svi.init, KEY, PIXELS)  # to trace is enough


@pytest.mark.nightly
def test_tools_of_numpyro_take_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    guide = AutoNormal(regression)
    for optim in (optax.adam(0.02), numpyro.optim.Adam(0.02)):
        svi = proxvi.ProximitySVI(
            regression, guide, optim, Trace_ELBO(), constraint(magnitude=optax.exponential_decay(1.0, 500, 1e-10))
        )
        result = svi.run(KEY, 500, progress_bar=True, stable_update=True)
        assert "500/500" in capsys.readouterr().err
        assert result.losses.shape == (500,)
        further = svi.run(jax.random.key(1), 500, progress_bar=False, init_state=result.state)
        assert further.state.constraints[0].constraint.step == 1_000
        predictive = Predictive(regression, guide=guide, params=further.params, num_samples=100)
        assert predictive(KEY, FEATURES, None)["y"].shape == (100, 50)
        medians = guide.median(further.params)
        assert isinstance(medians, dict)
        assert medians["weights"].shape == (3,)


@pytest.mark.nightly
def test_arviz_takes_the_result() -> None:
    guide = AutoDiagonalNormal(regression)
    svi = proxvi.ProximitySVI(
        regression,
        guide,
        optax.adam(0.02),
        Trace_ELBO(),
        constraint(magnitude=optax.exponential_decay(1.0, 2_000, 1e-10)),
    )
    result = svi.run(KEY, 2_000, progress_bar=False)
    data = arviz_base.from_numpyro_svi(svi, svi_result=result, model_args=(), num_samples=100)
    assert data.posterior["weights"].shape == (100, 3)
    # Pareto-smoothed importance sampling tells whether the guide may stand in for the posterior. The loss of one
    # particle is minus its log weight.
    keys = jax.random.split(jax.random.key(1), 2_000)
    losses = jax.vmap(lambda key: Trace_ELBO().loss(key, result.params, regression, guide))(keys)
    _, k_hat = array_stats.psislw(-np.asarray(losses, np.float64))
    assert k_hat < 0.7


@pytest.mark.nightly
def test_amortised_guides_of_flax_and_equinox() -> None:
    class Encoder(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = nnx.Linear(12, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.layer(x)

    def flax_guide(batch: Any) -> None:
        encode = nnx_module("encoder", Encoder(nnx.Rngs(0)))
        with numpyro.plate("data", batch.shape[0]):
            numpyro.sample("z", dist.Bernoulli(logits=encode(batch)).to_event(1))

    def equinox_guide(batch: Any) -> None:
        encode = eqx_module("encoder", eqx.nn.Linear(12, 4, key=KEY))
        assert isinstance(encode, eqx.nn.Linear)
        with numpyro.plate("data", batch.shape[0]):
            numpyro.sample("z", dist.Bernoulli(logits=jax.vmap(encode)(batch)).to_event(1))

    for guide in (flax_guide, equinox_guide):
        for average in (proxvi.parameter_average(), proxvi.statistic_average()):
            svi = proxvi.ProximitySVI(
                belief_network, guide, optax.adam(0.01), proxvi.LeaveOneOutELBO(5), constraint(reference=average)
            )
            result = svi.run(KEY, 100, PIXELS, progress_bar=False)
            assert np.all(np.isfinite(result.losses))
            assert 0.01 < proxvi.telemetry(result.state)[0].share < 1


@pytest.mark.slow
def test_jit_and_vmap_over_magnitudes() -> None:
    @jax.jit
    def run(magnitude: Any) -> Any:
        svi = proxvi.ProximitySVI(
            belief_network,
            belief_guide,
            optax.adam(0.01),
            proxvi.LeaveOneOutELBO(5),
            constraint(magnitude=magnitude, distance=proxvi.squared),  # without a kink, where rounding would tell
        )
        return jax.lax.scan(lambda s, _: svi.update(s, PIXELS), svi.init(KEY, PIXELS), length=20)[1]

    magnitudes = jnp.array([0.0, 1.0, 10.0, 100.0])
    together = jax.vmap(run)(magnitudes)
    for losses, magnitude in zip(together, magnitudes, strict=True):
        np.testing.assert_allclose(losses, run(magnitude), rtol=1e-5)
    assert np.all(np.abs(together[1:, -1] - together[0, -1]) > 0.01)


def spoilt_when_told(bad: Any) -> None:
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    numpyro.factor("spoil", jnp.log(jnp.where(bad, -1.0, 1.0)))
    numpyro.sample("x", dist.Normal(loc, 1.0), obs=1.0)


@pytest.mark.slow
def test_a_step_whose_loss_is_not_finite_changes_nothing_and_is_counted() -> None:
    svi = proxvi.ProximitySVI(
        spoilt_when_told, AutoNormal(spoilt_when_told), optax.adam(0.1), Trace_ELBO(), constraint()
    )
    state, _ = svi.stable_update(svi.init(KEY, False), False)
    after, loss = svi.stable_update(state, True)
    assert np.isnan(loss)
    assert same_bits((after.optim_state, after.constraints), (state.optim_state, state.constraints))
    assert after.skipped.total == after.skipped.in_a_row == after.skipped.step == 1
    again, loss = svi.stable_update(after, False)
    assert np.isfinite(loss)
    assert (again.skipped.total, again.skipped.in_a_row) == (1, 0)
    assert again.optim_state[0] == state.optim_state[0] + 1


@pytest.mark.slow
def test_a_step_whose_gradient_alone_is_not_finite_changes_nothing() -> None:
    rooted = constraint(lambda q: jnp.sqrt(0.0 * q["weights"].mean), distance=proxvi.squared)
    svi = proxvi.ProximitySVI(regression, AutoNormal(regression), optax.adam(0.1), Trace_ELBO(), rooted)
    state = svi.init(KEY)
    after, loss = svi.stable_update(state)
    assert np.isfinite(loss)
    assert same_bits((after.optim_state, after.constraints), (state.optim_state, state.constraints))
    assert after.skipped.total == 1
    assert np.any(np.isnan(svi.get_params(svi.update(state)[0])["weights_auto_loc"]))  # what it guards against


@pytest.mark.slow
def test_run_survives_a_few_bad_steps_wherever_they_fall() -> None:
    """An optimiser's gradient turns NaN at some steps; the run ends, finite, and says how many it left out."""

    def sometimes() -> None:
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        key = numpyro.prng_key()
        assert key is not None
        unlucky = jax.random.uniform(key) < 0.02
        numpyro.factor("spoil", jnp.log(jnp.where(unlucky, -1.0, 1.0)))
        numpyro.sample("x", dist.Normal(loc, 1.0), obs=1.0)

    svi = proxvi.ProximitySVI(sometimes, AutoNormal(sometimes), optax.adam(0.01), Trace_ELBO(), constraint())
    result = svi.run(KEY, 2_000, progress_bar=False)
    bad = int(np.isnan(result.losses).sum())
    assert 10 < bad == result.state.skipped.total
    assert np.all(np.isfinite(jax.tree.leaves(result.params)))


@pytest.mark.slow
def test_run_stops_after_too_many_bad_steps_even_if_good_ones_follow() -> None:
    def often() -> None:
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        key = numpyro.prng_key()
        assert key is not None
        unlucky = jax.random.uniform(key) < 0.4
        numpyro.factor("spoil", jnp.log(jnp.where(unlucky, -1.0, 1.0)))
        numpyro.sample("x", dist.Normal(loc, 1.0), obs=1.0)

    svi = proxvi.ProximitySVI(often, AutoNormal(often), optax.adam(0.01), Trace_ELBO(), ())
    svi.max_skipped_in_a_row = 1_000
    losses = svi.run(KEY, 1_000, progress_bar=False).losses
    rows = np.convolve(np.isnan(losses), np.ones(4), "valid") == 4
    first = int(np.argmax(rows))
    assert np.any(np.isfinite(losses[first : 50 * (first // 50 + 1)]))  # good ones follow within the same chunk
    svi.max_skipped_in_a_row = 4
    with pytest.raises(FloatingPointError, match=f"at step {first}, nor any step since: 4 in a row"):
        svi.run(KEY, 1_000, progress_bar=False)


@pytest.mark.slow
def test_run_warns_where_the_constraint_never_lets_go() -> None:
    svi = proxvi.ProximitySVI(regression, AutoNormal(regression), optax.adam(0.01), Trace_ELBO(), constraint())
    with pytest.warns(UserWarning, match=r"constraint on `entropy` still makes up \d+% of the gradient at the end"):
        result = svi.run(KEY, 100, progress_bar=False)
    (report,) = proxvi.telemetry(result.state)
    assert 0.01 < report.share < 1


@pytest.mark.slow
def test_share_is_that_of_the_gradients() -> None:
    """Against gradients taken by hand: of the ELBO by NumPyro, of the constraint by the difference."""
    guide = AutoNormal(regression)
    ours = proxvi.ProximitySVI(regression, guide, optax.sgd(1e-3), Trace_ELBO(), constraint(magnitude=3.0))
    state = ours.init(KEY)
    for _ in range(3):
        state, _ = ours.update(state)
    assert np.isnan(proxvi.telemetry(state)[0].share)
    plain = proxvi.ProximitySVI(regression, guide, optax.sgd(1e-3), Trace_ELBO(), ())
    plain.init(KEY)
    # with gradient descent the step is the gradient, up to its rate
    before, both, elbo = (
        ravel_pytree(ours.optim.get_params(s.optim_state))[0]
        for s in (state, ours.update(state)[0], plain.update(state._replace(constraints=()))[0])
    )
    elbo, both = elbo - before, both - before
    size = jnp.linalg.norm(both - elbo)
    (report,) = proxvi.telemetry(ours.measure_share(state))
    np.testing.assert_allclose(report.share, size / (size + jnp.linalg.norm(elbo)), rtol=1e-3)


@pytest.mark.slow
def test_run_works_within_vmap() -> None:
    svi = proxvi.ProximitySVI(
        regression,
        AutoNormal(regression),
        optax.adam(0.01),
        Trace_ELBO(),
        constraint(magnitude=optax.exponential_decay(1.0, 200, 1e-10)),
    )
    keys = jax.random.split(KEY, 3)
    svi.init(KEY)  # an autoguide looks at the model at its first call, which must not be within `vmap`
    with pytest.warns(UserWarning, match="`guide` must be new"):
        many = jax.vmap(lambda key: svi.run(key, 200, progress_bar=False))(keys)
    assert many.losses.shape == (3, 200)
    assert jnp.shape(proxvi.telemetry(many.state)[0].share) == (3,)
    one = svi.run(keys[1], 200, progress_bar=False)
    np.testing.assert_allclose(many.losses[1], one.losses, rtol=1e-3)


@pytest.mark.slow
def test_run_stops_after_too_many_bad_steps_and_names_step_and_parameter() -> None:
    def model() -> None:
        scale = jnp.asarray(numpyro.param("scale", 1.0))
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(loc, 1.0), obs=1.0)
        # log(scale − 0.9): gradient descent on +log walks down until the logarithm of a negative number
        numpyro.factor("cliff", -5.0 * jnp.log(scale - 0.9))

    svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.sgd(0.01), Trace_ELBO(), constraint())
    with pytest.raises(FloatingPointError, match=r"was not finite at step \d+, nor any step since: \d+ in a row"):
        svi.run(KEY, 2_000, progress_bar=False)

    def bad_gradient() -> None:
        weird = jnp.asarray(numpyro.param("weird", 0.0))
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(loc, 1.0), obs=1.0)
        numpyro.factor("root", jnp.sqrt(weird**2))

    svi = proxvi.ProximitySVI(bad_gradient, AutoNormal(bad_gradient), optax.sgd(0.01), Trace_ELBO(), ())
    with pytest.raises(FloatingPointError, match="the gradient of `weird` was not finite at step 0"):
        svi.run(KEY, 100, progress_bar=False)


@pytest.mark.parametrize(
    ("proximity", "message"),
    [
        ("entropy", "`constraint` must be a SpeedLimit, a Proximity, or a sequence of them, got 'entropy'"),
        (proxvi.entropy, "`constraint` must be a SpeedLimit, a Proximity, or a sequence of them, got"),
        ([proxvi.entropy], "`constraint` must be a SpeedLimit, a Proximity, or a sequence of them, got"),
        (
            proxvi.Proximity(lambda q, batch: q, magnitude=1.0),
            "`statistic` may take `prior`, `params` and `key`.*batch",
        ),
    ],
)
def test_bad_constraints_are_refused_by_name(proximity: Any, message: str) -> None:
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(TypeError, match=message):
            proxvi.ProximitySVI(regression, AutoNormal(regression), optax.adam(0.1), Trace_ELBO(), proximity)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_optimisers_that_run_to_the_end_are_refused() -> None:
    with pytest.raises(TypeError, match="`optim` must take one gradient step at a time, got Minimize"):
        proxvi.ProximitySVI(regression, AutoNormal(regression), numpyro.optim.Minimize(), Trace_ELBO(), constraint())


def subsampled(rows: Any = FEATURES[:, 0]) -> None:
    with numpyro.plate("rows", len(rows), subsample_size=7):
        batch = numpyro.subsample(rows, event_dim=0)
        numpyro.sample("x", dist.Normal(numpyro.sample("z", dist.LogNormal(0.0, 1.0)), 1.0), obs=batch)


def walk(data: Any = FEATURES[:5, 0]) -> None:
    """A guide's `scan` draws within a loop of its own."""
    scan(lambda z, x: (numpyro.sample("z", dist.Normal(z, 1.0)), x), 0.0, data)
    numpyro.sample("late", dist.HalfNormal(1.0))


def walk_with_data(data: Any = FEATURES[:5, 0]) -> None:
    def step(z: Any, x: Any) -> Any:
        z = numpyro.sample("z", dist.Normal(z, 1.0))
        return z, numpyro.sample("x", dist.Normal(z, 1.0), obs=x)

    scan(step, 0.0, data)
    numpyro.sample("late", dist.HalfNormal(2.0))


RISING = optax.linear_schedule(0.3, 1.0, 1_000)
SCHEDULED = {
    "leave-one-out": (belief_network, belief_guide, proxvi.AnnealedELBO(proxvi.LeaveOneOutELBO(5), 2.0), (PIXELS,)),
    "one particle, transformed": (regression, AutoNormal(regression), proxvi.AnnealedELBO(Trace_ELBO(), 2.0), ()),
    "particles, transformed": (
        regression,
        AutoNormal(regression),
        proxvi.WarmUpELBO(TraceMeanField_ELBO(3), RISING),
        (),
    ),
    "one draw for all": (
        regression,
        AutoMultivariateNormal(regression),
        proxvi.WarmUpELBO(Trace_ELBO(2), RISING),
        (),
    ),
    "in turn": (
        regression,
        AutoNormal(regression),
        proxvi.WarmUpELBO(Trace_ELBO(2, vectorize_particles=False), RISING),
        (),
    ),
    "subsampled plate": (subsampled, AutoNormal(subsampled), proxvi.WarmUpELBO(Trace_ELBO(2), RISING), ()),
    "scan": (walk_with_data, walk, proxvi.WarmUpELBO(Trace_ELBO(2), RISING), ()),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "leave-one-out" else pytest.mark.slow) for n in SCHEDULED]
)
def test_the_loss_of_a_schedule_is_that_of_the_true_elbo_with_the_same_draws(name: str) -> None:
    model, guide, loss, args = SCHEDULED[name]
    svi = proxvi.ProximitySVI(model, guide, optax.adam(0.02), loss, constraint())
    state = svi.init(KEY, *args)
    key = jax.random.split(state.rng_key)[1]
    plain = loss.elbo.loss(key, svi.get_params(state), model, guide, *args)
    np.testing.assert_allclose(svi.update(state, *args)[1], plain, rtol=1e-6)


def test_point_masses_at_the_draws_of_a_schedule_keep_their_density() -> None:
    """XLA computes where they lie twice, and the last bits may differ."""

    def model() -> None:
        w: Any = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([50]).to_event(1))
        numpyro.sample("z", dist.Normal(w[0], 1.0))

    def guide() -> None:
        mean = numpyro.param("mean", jnp.linspace(0.1, 0.3, 50))
        w: Any = numpyro.sample("w", dist.Normal(mean, 0.3).to_event(1))
        points = dist.Delta((w / jnp.linalg.norm(w))[:3])
        numpyro.sample("z", dist.MixtureSameFamily(dist.Categorical(logits=jnp.zeros(3)), points))

    loss = proxvi.AnnealedELBO(Trace_ELBO(3), optax.linear_schedule(2.0, 1.0, 1_000))
    svi = proxvi.ProximitySVI(model, guide, optax.adam(0.02), loss, ())

    def step(state: Any, _: Any) -> Any:
        return svi.update(state)

    losses = jax.jit(lambda state: jax.lax.scan(step, state, None, length=50)[1])(svi.init(KEY))
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("constraints", [(), proxvi.Proximity(proxvi.entropy, magnitude=1.0)])
def test_no_traced_value_outlives_its_trace(constraints: Any) -> None:
    """Or JAX's check for leaks would find it when a user looks for one of their own."""
    loss = proxvi.AnnealedELBO(Trace_ELBO(3), optax.linear_schedule(2.0, 1.0, 1_000))
    svi = proxvi.ProximitySVI(regression, AutoNormal(regression), optax.adam(0.02), loss, constraints)
    state = svi.init(KEY)
    with jax.checking_leaks():
        jax.jit(svi.update)(state)


def test_the_true_loss_beside_a_schedule_costs_little() -> None:
    """1.2 times the work of a step without a schedule; it was 1.6 when the guide drew twice."""
    pixels = jnp.tile(PIXELS, (10, 1))  # so many that they cost more than Adam does

    def flops(loss: Any) -> float:
        svi = proxvi.ProximitySVI(belief_network, belief_guide, optax.adam(0.02), loss, ())

        def steps(state: Any) -> Any:
            return jax.lax.scan(lambda state, _: svi.update(state, pixels), state, None, length=10)

        cost: Any = jax.jit(steps).lower(svi.init(KEY, pixels)).compile().cost_analysis()
        return cost["flops"]

    plain = proxvi.LeaveOneOutELBO(5)
    assert flops(proxvi.AnnealedELBO(plain, optax.exponential_decay(1.0, 500, 1e-10))) < 1.3 * flops(plain)


@pytest.mark.slow
def test_annealing_is_tempered_in_training_and_not_in_evaluation() -> None:
    annealed = proxvi.AnnealedELBO(proxvi.LeaveOneOutELBO(5), optax.exponential_decay(1.0, 500, 1e-10))
    svi = proxvi.ProximitySVI(belief_network, belief_guide, optax.adam(0.02), annealed, ())
    plain = proxvi.ProximitySVI(belief_network, belief_guide, optax.adam(0.02), annealed.elbo, ())
    hot, cold = svi.init(KEY, PIXELS), plain.init(KEY, PIXELS)
    assert svi.evaluate(hot, PIXELS) == plain.evaluate(cold, PIXELS)
    assert hot.first_loss == pytest.approx(abs(float(plain.evaluate(cold, PIXELS))))
    (hot_next, hot_loss), (cold_next, cold_loss) = svi.update(hot, PIXELS), plain.update(cold, PIXELS)
    np.testing.assert_allclose(hot_loss, cold_loss, rtol=1e-6)  # what is reported has no temperature
    assert jnp.any(svi.get_params(hot_next)["encoder"] != plain.get_params(cold_next)["encoder"])
    late = svi.run(KEY, 500, PIXELS, progress_bar=False)
    # at the end the temperature is 1: the same step as without it
    state = plain.init(KEY, PIXELS)._replace(optim_state=late.state.optim_state, rng_key=late.state.rng_key)
    ours, theirs = svi.get_params(svi.update(late.state, PIXELS)[0]), plain.get_params(plain.update(state, PIXELS)[0])
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_numpyros_svi_takes_a_constant_temperature() -> None:
    """NumPyro's SVI and ours, which knows the step, then take the same steps."""
    annealed = proxvi.AnnealedELBO(proxvi.LeaveOneOutELBO(5), 2.0, relative=False)
    options = (belief_network, belief_guide, optax.adam(0.02), annealed)
    theirs = SVI(*options).run(KEY, 20, PIXELS, progress_bar=False)
    ours = proxvi.ProximitySVI(*options, ()).run(KEY, 20, PIXELS, progress_bar=False)
    plain = SVI(*options[:3], annealed.elbo).run(KEY, 20, PIXELS, progress_bar=False)
    np.testing.assert_allclose(theirs.losses, ours.losses, rtol=1e-5)
    np.testing.assert_allclose(theirs.params["encoder"], ours.params["encoder"], rtol=1e-4, atol=1e-6)
    assert jnp.any(jnp.abs(theirs.params["encoder"] - plain.params["encoder"]) > 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [2.0, optax.exponential_decay(2.0, 100, 1e-10)], ids=["relative", "schedule"])
def test_numpyros_svi_warns_that_it_does_not_anneal(temperature: Any) -> None:
    annealed = proxvi.AnnealedELBO(proxvi.LeaveOneOutELBO(5), temperature)
    options = (belief_network, belief_guide, optax.adam(0.02))
    with pytest.warns(UserWarning, match="`AnnealedELBO` must be told the step"):
        theirs = SVI(*options, annealed).run(KEY, 5, PIXELS, progress_bar=False)
    plain = SVI(*options, annealed.elbo).run(KEY, 5, PIXELS, progress_bar=False)
    np.testing.assert_array_equal(theirs.losses, plain.losses)


@pytest.mark.slow
def test_forward_mode_for_models_that_have_no_other() -> None:
    def model() -> None:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        halved = jax.lax.while_loop(lambda x: jnp.abs(x) > 8.0, lambda x: x / 2, 2.0 * z)
        numpyro.sample("x", dist.Normal(halved, 1.0), obs=2.0)

    def without_loop() -> None:
        numpyro.sample("x", dist.Normal(2.0 * numpyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=2.0)

    def guide() -> None:
        scale = jnp.exp(jnp.asarray(numpyro.param("log_scale", -1.0)))
        numpyro.sample("z", dist.Normal(numpyro.param("loc", 0.0), scale))

    def fit(forward: bool, model: Any) -> Any:
        svi = proxvi.ProximitySVI(model, guide, optax.adam(0.1), Trace_ELBO(), constraint())
        with pytest.warns(UserWarning, match="still makes up"):
            return svi.run(KEY, 30, progress_bar=False, forward_mode_differentiation=forward)

    forward, backward = fit(True, model), fit(False, without_loop)
    np.testing.assert_allclose(forward.losses, backward.losses, rtol=1e-4)
    np.testing.assert_allclose(*(proxvi.telemetry(r.state)[0].share for r in (forward, backward)), rtol=1e-4)


@pytest.mark.slow
def test_mutable_state_moves_on_and_stays_where_a_step_was_bad() -> None:
    """As the running averages of a batch norm do."""

    def model(x: Any) -> None:
        start: Any = {"batches": jnp.zeros(())}  # NumPyro takes trees, but its type says arrays
        count: Any = primitives.mutable("count", start)
        count["batches"] = count["batches"] + 1.0
        numpyro.factor("x", -jnp.sum((x - numpyro.sample("z", dist.Normal(0.0, 1.0))) ** 2))

    svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.01), Trace_ELBO(), constraint())
    good, bad = jnp.ones(3), jnp.full(3, jnp.nan)
    before = state = svi.init(KEY, good)
    for batch in (good, good, bad):
        state, _ = svi.stable_update(state, batch)
    assert state.mutable_state is not None
    assert before.mutable_state is not None
    assert state.mutable_state["count"]["batches"] == before.mutable_state["count"]["batches"] + 2
    assert state.skipped.total == 1
    assert proxvi.telemetry(state)[0].distance > 0


@pytest.mark.slow
def test_annealing_waits_for_the_first_batch_with_a_finite_loss() -> None:
    """The temperature is in units of the first loss, which must not be infinite for ever."""

    def model(x: Any) -> None:
        numpyro.factor("x", -jnp.sum((x - numpyro.sample("z", dist.Normal(0.0, 1.0))) ** 2))

    def guide(x: Any) -> None:
        del x
        numpyro.sample("z", dist.Normal(numpyro.param("loc", 0.5), 1.0))

    annealed = proxvi.AnnealedELBO(Trace_ELBO(), optax.exponential_decay(1.0, 10, 1e-3))
    svi = proxvi.ProximitySVI(model, guide, optax.sgd(0.01), annealed, ())
    batches = [np.full(3, np.inf if step == 0 else 1.0, np.float32) for step in range(20)]
    result = proxvi.fit(svi, jax.random.key(0), 20, batches)
    assert np.isfinite(result.state.first_loss)
    assert result.state.skipped.total == 2  # the bad batch, and the one that the temperature was found by
    assert np.isfinite(result.params["loc"])


def test_a_statistic_may_take_a_prior_that_it_need_not_have() -> None:
    seen = []

    def statistic(q: Any, prior: Any = None) -> Any:
        seen.append(prior)
        return proxvi.entropy(q)

    def model() -> None:
        numpyro.sample("z", dist.Normal(0.0, 1.0))

    def guide() -> None:
        numpyro.sample("z", dist.Normal(numpyro.param("loc", 0.5), 1.0))

    constraint = proxvi.Proximity(statistic, magnitude=1.0)
    svi = proxvi.ProximitySVI(model, guide, optax.sgd(0.1), Trace_ELBO(), constraint)
    jax.eval_shape(lambda key: svi.update(svi.init(key)), KEY)  # to trace is enough
    assert seen
    assert all(isinstance(prior["z"], dist.Normal) for prior in seen)
