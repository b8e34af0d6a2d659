"""Many starts in one program, and the report of how much they matter."""

import dataclasses
import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.sharding import Mesh
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import proxvi
from proxvi import Luck, plots
from proxvi.starts import diagnosis
from proxvi.starts._labels import Labels, find_labels, match
from proxvi.starts._lanes import Lanes

HILLS = jnp.linspace(-3.0, 3.0, 10)
KEY = jax.random.key(0)


def climb(start: Any) -> tuple[Any, jax.Array]:
    def step(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        def elbo(x: jax.Array) -> jax.Array:
            return jnp.maximum(-((x - 1) ** 2), -((x + 1) ** 2) - 1)

        x = x + 0.1 * jax.grad(elbo)(x)
        return x, elbo(x)

    x, trace = jax.lax.scan(step, start, length=100)
    return {"x": x}, trace


def report_of(elbos: Any, **settings: Any) -> Luck:
    elbos = np.asarray(elbos, float)
    return Luck(elbos, np.tile(elbos[:, None], (1, 100)), None, **settings)


@pytest.mark.slow
def test_one_program_gives_what_a_loop_gives() -> None:
    together = proxvi.luck(climb, starts=HILLS)
    for i, start in enumerate(HILLS):
        params, trace = climb(start)
        np.testing.assert_allclose(together.params["x"][i], params["x"], rtol=1e-6)
        np.testing.assert_allclose(together.traces[i], trace, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(together.elbos, together.traces[:, -1])
    averaged = proxvi.luck(climb, starts=HILLS, average_last=5)
    np.testing.assert_allclose(averaged.elbos, together.traces[:, -5:].mean(1), rtol=1e-6)


@functools.cache
def on_one_device() -> Luck:
    mesh = Mesh(np.array(jax.devices()[:1]), "starts")
    return proxvi.luck(climb, starts=HILLS, mesh=mesh, tolerance=0.1)


@pytest.mark.parametrize("count", [3, 8])
def test_starts_are_spread_over_devices(count: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:count]), "starts")
    spread = proxvi.luck(climb, starts=HILLS, mesh=mesh)  # 10 starts: 3 and 8 do not divide them
    assert spread.elbos.shape == (10,)
    np.testing.assert_allclose(spread.elbos, on_one_device().elbos, rtol=1e-6, atol=1e-7)


def test_a_trace_that_is_too_short_is_refused_before_the_work() -> None:
    worked = []

    def optimise(start: jax.Array) -> tuple[Any, jax.Array]:
        jax.debug.callback(worked.append, start)
        return climb(start)

    with pytest.raises(ValueError, match="`average_last` must be at most the"):
        proxvi.luck(optimise, starts=HILLS, average_last=100_000)
    jax.effects_barrier()
    assert not worked


def test_the_function_is_traced_once() -> None:
    traced = []

    def optimise(start: jax.Array) -> tuple[Any, jax.Array]:
        traced.append(1)
        return climb(start)

    proxvi.luck(optimise, starts=jnp.linspace(-3.0, 3.0, 200))
    assert len(traced) == 1


def two_answers(x: jax.Array) -> None:
    """Only the square of `a` is seen; a wrong sign is another answer with the same ELBO."""
    a = jnp.asarray(numpyro.sample("a", dist.Normal(0.0, 3.0)))
    with numpyro.plate("data", 40, subsample_size=x.shape[0]):
        numpyro.sample("x", dist.Normal(a**2, 0.5), obs=x)


def svi_of_two_answers() -> SVI:
    return SVI(two_answers, AutoNormal(two_answers), optax.adam(0.05), Trace_ELBO())


ROWS = jnp.full(40, 4.0)


@pytest.fixture(scope="module")
def of_an_svi() -> Luck:
    return proxvi.luck(svi_of_two_answers(), KEY, 600, ROWS, starts=8, particles=200, progress_bar=False)


def test_an_svi_that_has_no_luck_says_so_and_shows_that_the_answers_differ(of_an_svi: Luck) -> None:
    assert of_an_svi.verdict.startswith("No luck: all 8 starts end within 2 nats of the best")
    means = np.asarray(of_an_svi.params["a_auto_loc"])
    np.testing.assert_allclose(np.abs(means), 2.0, atol=0.1)
    assert {-1.0, 1.0} == set(np.sign(means))
    best = int(np.argmax(of_an_svi.elbos))
    other = np.sign(means) != np.sign(means[best])
    assert np.all(of_an_svi.distances["a"][other] > 20)
    assert np.all(of_an_svi.distances["a"][~other] < 3)


def test_the_elbo_of_a_start_is_that_of_numpyro(of_an_svi: Luck) -> None:
    params = jax.tree.map(lambda x: x[3], of_an_svi.params)
    guide = AutoNormal(two_answers)
    SVI(two_answers, guide, optax.adam(0.05), Trace_ELBO()).init(KEY, ROWS)
    loss: Any = Trace_ELBO(num_particles=2_000).loss(jax.random.key(5), params, two_answers, guide, ROWS)
    assert of_an_svi.errors is not None
    assert abs(of_an_svi.elbos[3] + float(loss)) < 5 * of_an_svi.errors[3] + 0.1


@pytest.mark.slow
def test_a_guide_that_was_used_before_starts_anew() -> None:
    svi = svi_of_two_answers()
    svi.run(KEY, 10, ROWS, progress_bar=False)
    report = proxvi.luck(svi, KEY, 5, ROWS, starts=6, particles=2, progress_bar=False)
    assert len(np.unique(np.asarray(report.params["a_auto_loc"]))) == 6


AUTO = AutoNormal(two_answers)


def calls_an_autoguide(x: jax.Array) -> Any:
    """The autoguide remembers where it was first called, whatever the key."""
    return AUTO(x)


def begins_at_zero(x: jax.Array) -> None:
    del x
    numpyro.sample("a", dist.Normal(numpyro.param("loc", 0.0), 0.1))


@pytest.mark.slow
@pytest.mark.parametrize("guide", [calls_an_autoguide, begins_at_zero])
def test_starts_that_begin_at_one_point_are_not_called_no_luck(guide: Any) -> None:
    svi = SVI(two_answers, guide, optax.adam(0.05), Trace_ELBO())
    with pytest.warns(UserWarning, match="`inference` must begin at another point for each key, got 4 starts"):
        verdict = proxvi.luck(svi, KEY, 20, ROWS, starts=4, particles=2, progress_bar=False).verdict
    assert verdict.startswith("All 4 starts begin at one point, so only the luck of the noise is measured")
    assert "pass an autoguide itself" in verdict
    assert "numpyro.param(name, lambda key: ...)" in verdict
    assert "enough" not in verdict


@pytest.mark.slow
def test_batches_are_taken() -> None:
    seen = set()

    def model(x: jax.Array) -> None:
        seen.add(x.shape[0])
        two_answers(x)

    svi = SVI(model, AutoNormal(model), optax.adam(0.05), Trace_ELBO())
    report = proxvi.luck(svi, KEY, 600, ROWS, starts=4, batch_size=10, particles=50, progress_bar=False)
    # In a step, a look at a batch of one row more to find which sites are of the rows, and for the final ELBO.
    assert seen == {10, 11, 40}
    np.testing.assert_allclose(np.abs(report.params["a_auto_loc"]), 2.0, atol=0.2)


def test_a_constraint_may_hold_an_array() -> None:
    held = proxvi.Proximity(proxvi.entropy, magnitude=jnp.array(1.0))  # which has no hash
    svi = proxvi.ProximitySVI(two_answers, AutoNormal(two_answers), optax.adam(0.05), Trace_ELBO(), held)
    states = Lanes(svi, KEY, (ROWS,), None, 2).start(jax.random.split(KEY, 2), 10)
    assert len(states.constraints) == 1


def test_an_svi_with_methods_of_its_own_is_refused() -> None:
    class Mine(SVI):
        def update(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("never called")

    mine = Mine(two_answers, AutoNormal(two_answers), optax.adam(0.05), Trace_ELBO())
    for function in (proxvi.luck, proxvi.race):
        with pytest.raises(TypeError, match="got Mine, whose own 'update' would not be called"):
            function(mine, KEY, 1_000, ROWS, progress_bar=False)


def test_a_subclass_that_replaces_no_method_is_taken() -> None:
    class Named(SVI):
        def __init__(self, *args: Any, name: str) -> None:
            super().__init__(*args)
            self.name = name

    svi = Named(two_answers, AutoNormal(two_answers), optax.adam(0.05), Trace_ELBO(), name="mine")
    assert len(Lanes(svi, KEY, (ROWS,), None, 2).start(jax.random.split(KEY, 2), 10).rng_key) == 2


def test_reports_can_be_compared_and_counted() -> None:
    one, other = report_of([-1.0, -2.0]), report_of([-1.0, -2.0])
    assert one != other  # a report is equal to itself only
    assert len({one, other}) == 2


@pytest.mark.parametrize("kind", ["calibrated", "factor", "shared", "rows"])
def test_a_batch_stands_for_all_rows_only_where_the_model_says_nothing_else(kind: str) -> None:
    def model(x: jax.Array) -> None:
        size = 1_000 if kind == "calibrated" else x.shape[0]
        mean = jnp.zeros(()) if kind in ("rows", "factor") else jnp.asarray(numpyro.sample("m", dist.Normal(0.0, 1.0)))
        likelihood = dist.Normal(mean, 1.0)
        if kind == "factor":
            numpyro.factor("x", likelihood.log_prob(x) * 1_000 / x.shape[0])
        else:
            with numpyro.plate("rows", size, subsample_size=x.shape[0]):
                numpyro.sample("x", likelihood, obs=x)
        if kind == "calibrated":
            numpyro.sample("calibration", dist.Normal(mean, jnp.ones(10)).to_event(1), obs=jnp.zeros(10))

    svi = SVI(model, AutoNormal(model), optax.adam(0.01), Trace_ELBO())
    if kind in ("rows", "factor"):
        svi = SVI(model, lambda _: numpyro.param("unused", jnp.zeros(())), optax.adam(0.01), Trace_ELBO())
    lanes = Lanes(svi, KEY, (jnp.zeros(1_000),), 10, 2)
    lanes.start(jax.random.split(KEY, 2), 10)
    assert lanes._weight == (100.0 if kind == "rows" else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_the_trace_of_batches_is_that_of_all_rows(weighted: bool) -> None:
    """The loss of an autoencoder is that of its batch: 40 nats of luck would seem to be 10."""

    def model(x: jax.Array) -> None:
        rows = 40 if weighted else x.shape[0]
        with numpyro.plate("rows", rows, subsample_size=x.shape[0]):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x: jax.Array) -> None:
        slope = jnp.asarray(numpyro.param("slope", lambda key: jax.random.normal(key)))
        with numpyro.plate("rows", 40 if weighted else x.shape[0], subsample_size=x.shape[0]):
            numpyro.sample("z", dist.Normal(slope * x, 0.7))

    svi = SVI(model, guide, optax.adam(0.02), Trace_ELBO())
    report = proxvi.luck(svi, KEY, 600, ROWS, starts=4, batch_size=10, particles=200, progress_bar=False)
    np.testing.assert_allclose(report.traces[:, -10:].mean(1), report.elbos, rtol=0.05)


@pytest.mark.slow
def test_clusters_in_another_order_are_the_same_answer() -> None:
    x = jnp.array([-9.0, -3.0, 3.0, 9.0])[jnp.arange(60) % 4] + jax.random.normal(KEY, (60,))

    def model(x: jax.Array) -> None:
        means = numpyro.sample("means", dist.Normal(jnp.zeros(4), 10.0).to_event(1))
        numpyro.factor("x", jax.nn.logsumexp(-0.5 * (x[:, None] - jnp.asarray(means)[None]) ** 2, axis=1).sum())

    svi = SVI(model, AutoNormal(model, init_scale=0.01), optax.adam(0.1), Trace_ELBO())
    report = proxvi.luck(svi, KEY, 300, x, starts=8, particles=20, progress_bar=False)
    good = report.elbos > report.best - 2.0
    orders = np.argsort(np.asarray(report.params["means_auto_loc"])[good], axis=1)
    assert len(np.unique(orders, axis=0)) > 1
    assert np.all(report.distances["means"][good] < 3.0)
    assert "The components of `means` were matched first" in str(report)
    assert not np.all(good)
    assert np.all(report.distances["means"][~good] > 3.0)


@pytest.mark.slow
def test_discrete_latents_that_are_certain_in_every_start_have_a_distance() -> None:
    def model(x: jax.Array) -> None:
        with numpyro.plate("rows", 3):
            z = numpyro.sample("z", dist.Bernoulli(0.5))
            numpyro.sample("x", dist.Normal(10.0 * jnp.asarray(z), 0.5), obs=x)

    def guide(x: jax.Array) -> None:
        del x
        logits = numpyro.param("logits", lambda key: 50.0 * jnp.sign(jax.random.normal(key, (3,))))
        with numpyro.plate("rows", 3):
            numpyro.sample("z", dist.Bernoulli(logits=logits))

    svi = SVI(model, guide, optax.adam(0.01), proxvi.LeaveOneOutELBO(4))
    report = proxvi.luck(svi, KEY, 5, jnp.full(3, 5.0), starts=4, particles=2, progress_bar=False)
    signs = np.sign(report.params["logits"])
    other = np.any(signs != signs[np.argmin(report.distances["z"])], axis=1)
    assert other.any()
    np.testing.assert_allclose(report.distances["z"], np.where(other, np.sqrt(200), 0.0), rtol=1e-5)


def test_only_labels_that_the_model_can_permute_are_matched() -> None:
    generator = np.random.default_rng(0)
    values = {
        "rates": generator.normal(size=4),
        "moves": generator.normal(size=(4, 4)),
        "slopes": generator.normal(size=3),
    }
    weights = generator.normal(size=3)

    def of_a_markov_model(z: dict[str, np.ndarray]) -> float:
        return float(np.sum(np.exp(z["rates"])[:, None] * z["moves"] * z["rates"]) + np.sum(z["slopes"] * weights))

    elsewhere = {name: generator.normal(size=value.shape) for name, value in values.items()}
    (labels,) = find_labels([values, elsewhere], of_a_markov_model)
    assert labels.axes == {"rates": (0,), "moves": (0, 1)}  # the states, and not the slopes

    order = np.array([2, 0, 3, 1])
    starts = {name: np.stack([values[name], labels.permute(values, order)[name]]) for name in values}
    spread = {name: np.full_like(found, 0.1) for name, found in starts.items()}
    means, _ = match(labels, starts, spread, best=0)
    for name, found in means.items():
        np.testing.assert_array_equal(found[1], values[name])


def test_the_verdict_tells_what_the_others_lose() -> None:
    verdict = report_of([0.0] * 10 + [-3.0, -4.0] + [-119.0] * 3 + [-2_880.0]).verdict
    assert "10 of 16 starts end within 2 nats of the best" in verdict
    assert "; the other 6 lose 3 to 2,880 nats." in verdict
    chained = report_of([0.0] * 9 + [-1.5] + [-3.0, -4.0] + [-119.0] * 3 + [-2_880.0]).verdict
    assert "; 2 more in its basin lose up to 4; the other 4 lose 119 to 2,880 nats." in chained
    assert "; another one loses 50 nats." in report_of([0.0] * 9 + [-50.0]).verdict
    assert "1 of 4 starts ends" in report_of([0.0] + [-50.0] * 3).verdict
    assert "; the other 3 lose 50 nats." in report_of([0.0] + [-50.0] * 3).verdict
    assert "; 7 ended without a finite ELBO." in report_of([0.0] + [np.nan] * 7).verdict


def test_slopes_that_happen_to_be_equal_are_no_labels() -> None:
    """At the optimum the density hardly changes if two equal slopes trade places; elsewhere it does."""
    covariates = np.random.default_rng(0).normal(size=(200_000, 2))
    y = covariates.sum(1)

    def of_a_regression(z: dict[str, np.ndarray]) -> float:
        return float(-0.5 * np.sum((y - covariates @ z["slopes"]) ** 2) - 280_000.0)

    optimum, elsewhere = {"slopes": np.array([1.0, 1.002])}, {"slopes": np.array([0.3, -1.2])}
    assert find_labels([optimum, optimum], of_a_regression)
    assert not find_labels([optimum, elsewhere], of_a_regression)


def test_a_site_without_width_does_not_spoil_the_matching_of_others() -> None:
    generator, order = np.random.default_rng(0), np.array([2, 0, 3, 1])
    labels = Labels(4, {"means": (0,), "fixed": (0,)})
    values = {"means": generator.normal(size=4).astype(np.float32), "fixed": np.arange(4, dtype=np.float32)}
    starts = {name: np.stack([values[name], value]) for name, value in labels.permute(values, order).items()}
    spread = {"means": np.full((2, 4), 0.1, np.float32), "fixed": np.zeros((2, 4), np.float32)}
    means, _ = match(labels, starts, spread, best=0)
    np.testing.assert_array_equal(means["means"][1], values["means"])


def test_the_table_says_which_basins_still_climb_and_the_notes_what_equal_starts_differ_in() -> None:
    traces = np.zeros((8, 100))
    traces[:2] = np.linspace(-50.0, 0.0, 100)
    elbos = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -50.0, -50.0])
    text = str(Luck(elbos, traces, None, distances={"z": np.array([0.0, 0.1, 9.0, 0.2, 8.0, 0.1, 40.0, 0.0])}))
    assert "still climb" in text
    assert "2 starts still climb at the end, so the shares are not final" in text
    assert "2 of 6 starts that end equally well have another answer than the best (up to 9 sd in `z`)" in text
    assert [line.split()[-3] for line in text.splitlines()[2:4]] == ["9", "40"]


def test_one_start_is_not_spoken_of_as_many() -> None:
    traces = np.zeros((32, 100))
    traces[-1] = np.linspace(-50.0, 0.0, 100)
    elbos = np.concatenate([np.zeros(21), -50.0 * np.arange(1.0, 12.0)])
    report = Luck(elbos, traces, None, floor=-525.0)
    for text in (str(report), report._repr_html_()):
        assert "and 2 more basins with 2 starts" in text
        assert "1 start still climbs at the end" in text
        assert "1 start ends below the null model, -525.00: it has found nothing" in text
    assert "and 1 more basin with 1 start" in str(Luck(elbos[:-1], traces[:-1], None)).splitlines()


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_network_with_batch_norm_and_a_guide_without_width_get_their_report() -> None:
    flax = pytest.importorskip("flax.linen")

    class Decoder(flax.Module):
        @flax.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return flax.BatchNorm(use_running_average=False)(flax.Dense(2)(x))

    def model(x: jax.Array) -> None:
        decoder = flax_module("decoder", Decoder(), mutable=["batch_stats"], input_shape=(1, 2))
        assert decoder is not None
        with numpyro.plate("rows", 6):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("x", dist.Normal(decoder(z), 1.0).to_event(2), obs=x)

    for guide in (AutoNormal(model), AutoDelta(model)):
        svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
        with jax.numpy_rank_promotion("allow"):  # Flax adds its biases so
            report = proxvi.luck(svi, KEY, 20, jnp.zeros((6, 2)), starts=2, particles=2, progress_bar=False)
        assert report.matched == ()
        assert set(report.distances) == ({"z"} if isinstance(guide, AutoNormal) else set())


def test_the_answers_of_a_guide_with_batch_norm_are_compared() -> None:
    flax = pytest.importorskip("flax.linen")

    class Encoder(flax.Module):
        @flax.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return flax.BatchNorm(use_running_average=False)(flax.Dense(2)(x))

    def model(x: jax.Array) -> None:
        with numpyro.plate("rows", 6):
            z = jnp.asarray(numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1)))
            numpyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=x)

    def guide(x: jax.Array) -> None:
        encoder = flax_module("encoder", Encoder(), mutable=["batch_stats"], input_shape=(1, 2))
        assert encoder is not None
        with numpyro.plate("rows", 6):
            numpyro.sample("z", dist.Normal(encoder(x), 0.1).to_event(1))

    svi, x = SVI(model, guide, optax.adam(0.01), Trace_ELBO()), jax.random.normal(KEY, (6, 2))
    with jax.numpy_rank_promotion("allow"):  # Flax adds its biases so
        report = proxvi.luck(svi, KEY, 20, x, starts=2, particles=2, progress_bar=False)
    assert set(report.distances) == {"z"}


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 8])
def test_devices_do_not_change_a_bit_of_an_svi(of_an_svi: Luck, count: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:count]), "starts")
    spread = proxvi.luck(svi_of_two_answers(), KEY, 600, ROWS, starts=8, particles=200, mesh=mesh, progress_bar=False)
    np.testing.assert_array_equal(spread.elbos, of_an_svi.elbos)
    np.testing.assert_array_equal(spread.traces, of_an_svi.traces)


def test_the_report_counts_and_groups() -> None:
    report = report_of([-10.0, -300.0, -10.5, -12.9, np.inf, -11.8, -301.0])
    assert report.best == -10.0
    assert report.share == pytest.approx(3 / 7)  # −12.9 is not within 2 of the best, and infinity is none
    assert [basin.starts.tolist() for basin in report.basins] == [[0, 2, 5, 3], [1, 6]]
    text = str(report)
    assert "3 of 7 starts end within 2 nats of the best" in text
    assert "; 1 ended without a finite ELBO." in text
    assert "<td>-300.00</td>" in report._repr_html_()
    assert json.loads(json.dumps(report.to_dict()))["elbos"][4] is None


def test_numbers_of_numpy_become_json_and_count_starts() -> None:
    report = report_of([0.0] * 3)
    for name in ("tolerance", "best_known", "floor"):
        object.__setattr__(report, name, np.float32(1.0))  # the tests check types: otherwise it would be refused here
    assert json.loads(json.dumps(report.to_dict()))["best_known"] == 1.0
    count: Any = np.int64(4)
    assert len(proxvi.luck(lambda start: (start, jnp.zeros(3)), KEY, starts=count).elbos) == 4


def test_the_interval_covers_the_true_share_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(1_000):
        good = generator.random(32) < 0.3
        low, high = report_of(np.where(good | (np.arange(32) == 0), 0.0, -50.0)).interval
        covered += low <= 0.3 + 0.7 / 32 <= high  # one start is good for certain
    assert covered > 920


def test_a_run_that_is_too_short_is_told_so() -> None:
    rising = np.linspace(-100.0, 0.0, 100) + np.zeros((5, 1))
    report = Luck(rising[:, -1] - np.arange(5) * 20.0, rising, None)
    assert "5 of 5 starts still climb at the end, by 10.1 nats in the last tenth of the run" in report.verdict
    assert "differ by up to 80: nothing can be said about luck yet. Run longer, or give" in report.verdict
    assert Luck(rising[:, -1] - np.arange(5) * 200.0, rising, None).verdict.endswith("Run longer.")


def test_starts_that_climb_together_have_no_luck_so_far() -> None:
    """As with a learning rate that decays: the ELBO rises to the end, and all starts agree."""
    rising = np.linspace(-100.0, 0.0, 100) + np.zeros((5, 1))
    assert Luck(rising[:, -1], rising, None).verdict == (
        "No luck so far: all 5 starts end within 2 nats of the best. But 5 of them still climb at the end: run longer "
        "to be sure."
    )


@pytest.mark.parametrize("windows", [2, 5, 9, 10, 19])
def test_a_short_trace_that_rises_is_too_short_to_tell(windows: int) -> None:
    rising = np.linspace(-1_000.0, 0.0, windows) + np.zeros((8, 1))
    verdict = Luck(rising[:, -1], rising, None).verdict
    assert verdict.startswith("No luck so far: all 8 starts end within 2 nats of the best (at least 68%")
    assert f"But {windows} ELBOs of each are too short a trace to tell whether they still climb" in verdict
    level = np.zeros((8, windows))
    assert Luck(level[:, -1], level, None).verdict.endswith("One run is enough.")


@pytest.mark.parametrize("windows", [5, 19])
def test_short_traces_that_rise_are_no_reason_to_race(windows: int) -> None:
    rising = np.linspace(-1_000.0, 0.0, windows) - 20.0 * np.arange(8)[:, None]
    assert Luck(rising[:, -1], rising, None).verdict == (
        f"8 starts differ by up to 140, but {windows} ELBOs of each are too short a trace to tell whether they still "
        "climb: run longer, or return more of them."
    )


def test_the_noise_of_hopeless_starts_does_not_matter() -> None:
    elbos, errors = np.array([0.0] * 20 + [-1e5] * 12), np.array([0.01] * 20 + [300.0] * 12)
    assert "standard errors" not in str(report_of(elbos, errors=errors))
    errors[0] = 1.5
    assert "standard errors up to 1.5 nats: raise `particles`, or `tolerance` to 3 at least" in str(
        report_of(elbos, errors=errors)
    )


def test_a_report_as_json_has_everything_but_parameters_and_traces() -> None:
    distances = {"z": np.array([0.0, np.inf])}
    kept = report_of([0.0, -5.0], errors=np.ones(2), distances=distances, begin_alike=True).to_dict()
    assert {field.name for field in dataclasses.fields(Luck)} - kept.keys() == {"params", "traces"}
    assert json.loads(json.dumps(kept))["distances"] == {"z": [0.0, None]}


def test_one_elbo_of_each_start_is_enough_but_three_starts_are_too_few() -> None:
    assert Luck(np.zeros(8), np.zeros((8, 1)), None).verdict.endswith("One run is enough.")
    assert report_of([0.0] * 4).verdict.endswith("One run is enough.")
    assert report_of([0.0] * 3).verdict.endswith("(at least 44% of all starts). 3 starts are too few to tell.")


def test_starts_that_wander_about_one_optimum_need_no_race() -> None:
    verdict = report_of(np.linspace(-5.0, 0.0, 32)).verdict
    assert "All share a basin: let the learning rate decay" in verdict
    assert "race" not in verdict


def test_a_chain_of_optima_or_of_answers_is_raced() -> None:
    wide = report_of(np.linspace(-60.0, 0.0, 48)).verdict
    assert "share a basin" not in wide
    assert "Race them" in wide
    elsewhere = report_of(np.linspace(-5.0, 0.0, 32), distances={"a": np.linspace(80.0, 0.0, 32)}).verdict
    assert "share a basin" not in elsewhere
    assert "Race them" in elsewhere


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_taken_for_a_climb(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(size=(40, 100)) * 5.0
    assert Luck(noise[:, -1], noise, None).climbing.sum() <= 1


def test_a_better_optimum_that_is_known_and_a_null_model_are_compared_with() -> None:
    report = report_of([-30.0] * 100, best_known=-10.0, floor=-20.0)
    assert report.verdict.startswith("None of 100 starts ends within 2 nats of the best known ELBO, -10.00")
    assert "100 starts end below the null model" in str(report)


def test_what_cannot_be_reported_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`elbos` must have a finite entry, got none in 3"):
        report_of([np.nan] * 3)
    with pytest.raises(ValueError, match=r"`tolerance` must be a finite number above 0, got 0"):
        report_of([0.0] * 3, tolerance=0.0)
    with pytest.raises(ValueError, match=r"`starts` must have one leading axis in common.*\[2, 3\]"):
        proxvi.luck(climb, starts=(jnp.zeros(2), jnp.zeros(3)))
    with pytest.raises(ValueError, match=r"`average_last` must be an integer of at least 1, got 0"):
        proxvi.luck(climb, starts=HILLS, average_last=0)
    with pytest.raises(ValueError, match=r"`average_last` must be at most the 1 ELBOs that `inference` returns, got 2"):
        proxvi.luck(lambda start: (start, start[None]), starts=HILLS, average_last=2)
    with pytest.raises(ValueError, match=r"`inference` must return its ELBOs as one vector, got 0 axes"):
        proxvi.luck(lambda start: (start, start), starts=HILLS)
    for name, value in {"batch_size": 10, "stop_within": 2.0, "executor": ThreadPoolExecutor(1)}.items():
        with pytest.raises(ValueError, match=f"`{name}` must be None with a function of a start, got"):
            proxvi.luck(climb, starts=HILLS, **{name: value})
    with pytest.raises(ValueError, match=r"`key` must be given where `starts` is a number"):
        proxvi.luck(climb)
    with pytest.raises(ValueError, match=r"`starts` must be an integer of at least 2, got 1"):
        proxvi.luck(climb, KEY, starts=1)
    with pytest.raises(ValueError, match=r"`key` and `num_steps` must be given with an SVI"):
        proxvi.luck(svi_of_two_answers(), KEY)
    with pytest.raises(ValueError, match=r"`starts` must be an integer of at least 2, got 1"):
        proxvi.luck(svi_of_two_answers(), KEY, 10, ROWS, starts=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tolerance": 0.0}, "`tolerance` must be a finite number above 0, got 0.0"),
        ({"best_known": np.inf}, "`best_known` must be a finite number, got inf; leave it out"),
        ({"floor": np.nan}, "`floor` must be a finite number, got nan; leave it out"),
    ],
)
def test_wrong_numbers_are_refused_before_the_work(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lanes, "advance", lambda *_: pytest.fail("the work began"))
    with pytest.raises(ValueError, match=message):
        proxvi.luck(svi_of_two_answers(), KEY, 10, ROWS, starts=2, progress_bar=False, **arguments)


def test_a_model_of_batches_that_cannot_take_all_rows_is_refused_before_the_work() -> None:
    def model(x: jax.Array) -> None:
        a = numpyro.sample("a", dist.Normal(0.0, 3.0))
        with numpyro.plate("rows", 40, subsample_size=10):
            numpyro.sample("x", dist.Normal(a, 0.5), obs=x)

    lanes = Lanes(SVI(model, AutoNormal(model), optax.adam(0.05), Trace_ELBO()), KEY, (ROWS,), 10, 2)
    with pytest.raises(ValueError, match=r"`batch_size` must be None .* 40 rows.*subsample_size=x.shape\[0\]"):
        lanes.start(jax.random.split(KEY, 2), 10)


@pytest.mark.slow
def test_a_guide_without_parameters_gets_its_report() -> None:
    def guide(x: jax.Array) -> None:
        del x
        numpyro.sample("a", dist.Normal(2.0, 0.1))

    svi = SVI(two_answers, guide, optax.adam(0.05), Trace_ELBO())
    report = proxvi.luck(svi, KEY, 5, ROWS, starts=4, particles=2, progress_bar=False)
    assert report.verdict.startswith("No luck")
    np.testing.assert_array_equal(report.distances["a"], np.zeros(4))


@pytest.mark.slow
def test_starts_are_not_lost_where_their_answers_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("too little")

    monkeypatch.setattr(diagnosis, "_differences", fails)
    with pytest.warns(UserWarning, match="could not compare the answers of the starts: MemoryError"):
        report = proxvi.luck(svi_of_two_answers(), KEY, 5, ROWS, starts=4, particles=2, progress_bar=False)
    assert np.all(np.isfinite(report.elbos))
    assert report.distances == {}


def test_moments_take_the_memory_of_a_few_draws_and_not_of_all() -> None:
    def draw(key: jax.Array) -> dict[str, jax.Array]:
        return {"z": jax.random.normal(key, (10_000,)) * 2.0 + 5.0}

    keys = jax.random.split(KEY, 200)
    program = jax.jit(lambda keys: diagnosis.moments(draw, keys)).lower(keys).compile()
    needed = program.memory_analysis()
    assert needed is not None
    assert needed.temp_size_in_bytes < 20 * 10_000 * 4
    draws = jax.vmap(draw)(keys)["z"]
    mean, deviation = program(keys)
    np.testing.assert_allclose(mean["z"], draws.mean(0), rtol=1e-5)
    np.testing.assert_allclose(deviation["z"], draws.std(0), rtol=1e-4)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    plots.luck({"two hills": on_one_device()}, tmp_path / "starts.png")
    assert (tmp_path / "starts.png").stat().st_size > 10_000


def test_a_picture_leaves_the_backend_of_matplotlib_alone(tmp_path: Path) -> None:
    before = matplotlib.get_backend()
    matplotlib.use("svg")  # as a notebook has its own
    plots.luck({"two levels": report_of([0.0, -5.0])}, tmp_path / "starts.png")
    assert matplotlib.get_backend() == "svg"
    matplotlib.use(before)
