"""The laws of the speed limit: void while it is kept, a bounded change, no faster fall than it says, an end."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.optim
import optax
import optax.contrib
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoIAFNormal, AutoMultivariateNormal, AutoNormal

import proxvi
from proxvi import SpeedLimit
from proxvi.constraints.limit import LONGEST_PULL
from proxvi.svi import steers

KEY = jax.random.key(0)
ROUNDS_ALIKE = pytest.mark.skipif(
    jax.__version__.split(".") < ["0", "11", "1"], reason="XLA rounds across the barrier of `descend`"
)
HELD = pytest.mark.filterwarnings("ignore:SpeedLimit:UserWarning")  # so few steps


@pytest.fixture(autouse=True)
def ranks_are_numpyros_business() -> Any:
    with jax.numpy_rank_promotion("allow"):
        yield


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def bernoulli_entropy(params: Any) -> Any:
    return proxvi.entropy(dist.Bernoulli(logits=params["logits"]).to_event(1))


def normal_entropy(params: Any) -> Any:
    return proxvi.entropy(dist.Normal(params["loc"], jnp.exp(params["log_scale"])).to_event(1))


def network_entropy(params: Any) -> Any:
    x = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
    return proxvi.entropy(dist.Bernoulli(logits=jnp.tanh(x @ params["w"]) @ params["v"]).to_event(1))


def descend(
    optimizer: optax.GradientTransformation,
    loss: Callable[[Any], jax.Array],
    params: Any,
    steps: int,
    state: Any = None,
) -> tuple[Any, Any]:
    """The parameters after each step, and the states; from `state` on, if it is given."""
    state = optimizer.init(params) if state is None else state

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optax.with_extra_args_support(optimizer).update(grads, state, params, value=value)
        # Without the barrier XLA may multiply and add in one rounding where nothing stands between the two.
        params = optax.apply_updates(params, jax.lax.optimization_barrier(updates))
        return (params, state), (params, state)

    return jax.jit(lambda: jax.lax.scan(step, (params, state), None, steps)[1])()


# A loss that drives the entropy to its end, the statistic, and parameters to start from.
PROBLEMS: dict[str, tuple[Callable[[Any], jax.Array], Any, Callable[[jax.Array], Any]]] = {
    "Bernoulli": (
        lambda p: jnp.sum((p["logits"] - 8.0) ** 2),
        bernoulli_entropy,
        lambda key: {"logits": jax.random.normal(key, (5,))},
    ),
    "normal": (
        lambda p: jnp.sum((p["loc"] - 1.0) ** 2 + (p["log_scale"] + 6.0) ** 2),
        normal_entropy,
        lambda key: {"loc": jax.random.normal(key, (3,)), "log_scale": jnp.zeros(3)},
    ),
    "network": (
        lambda p: jnp.sum((jnp.tanh(jnp.linspace(-1.0, 1.0, 12).reshape(4, 3) @ p["w"]) @ p["v"] - 8.0) ** 2),
        network_entropy,
        lambda key: {"w": jax.random.normal(key, (3, 6)), "v": 0.1 * jax.random.normal(key, (6, 5))},
    ),
}
OPTIMIZERS: dict[str, Callable[[float | jax.Array], optax.GradientTransformation]] = {
    "sgd": lambda rate: optax.sgd(0.1 * rate),
    "adam": optax.adam,
    "lion": optax.lion,
    "adafactor": lambda rate: optax.adafactor(rate, min_dim_size_to_factor=2, multiply_by_parameter_scale=False),
    "prodigy": lambda rate: optax.contrib.prodigy(10 * rate),
}


@functools.cache
def limited_run(name: str, problem: str) -> Callable[..., tuple[Any, Any]]:
    """400 steps under a limit, compiled once for all rates, limits and starts: its telemetry, and the statistic."""
    loss, statistic, _ = PROBLEMS[problem]

    @jax.jit
    def run(rate: jax.Array, over: jax.Array, start: Any) -> tuple[Any, Any]:
        link = proxvi.speed_limit(statistic, over)
        params, (_, states) = descend(optax.chain(OPTIMIZERS[name](rate), link), loss, start, 400)
        visited = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), start, params)
        return proxvi.telemetry(states), jax.vmap(statistic)(visited)

    return run


@pytest.mark.slow
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    problem=st.sampled_from(sorted(PROBLEMS)),
    rate=st.floats(0.001, 0.03),
    over=st.integers(200, 400),
    seed=st.integers(0, 100),
)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_nothing_falls_faster_than_the_limit_and_no_change_is_longer_than_it_says(
    name: str, problem: str, rate: float, over: int, seed: int
) -> None:
    start = PROBLEMS[problem][-1](jax.random.key(seed))
    (done,), levels = limited_run(name, problem)(jnp.array(rate), jnp.array(float(over)), start)
    assert isinstance(done, proxvi.LimitTelemetry)
    assert np.all(np.asarray(done.pull) <= 1.0 + LONGEST_PULL + 1e-5)
    # The limit sees a step after it was made. The tolerance is 0.05; to it comes what single steps lose that were made
    # while nothing, or not all, was held. Those of Prodigy can lose a large part of the range: it lengthens its steps
    # while it is held.
    reach = 5.0 if problem == "normal" else np.log(2.0)
    one_step = np.max(-np.diff(np.asarray(levels), axis=0)) / reach
    tolerance = min(0.6, 0.05 + 2.0 * max(one_step, 0.025)) if name == "prodigy" else 0.1
    assert np.max(done.shortfall) < tolerance
    # And by the levels themselves, whatever the limit says of them: from the first one on, a line of this slope.
    line = levels[0] - (np.arange(401) / over)[:, None] * reach
    assert np.all(np.asarray(levels) > line - tolerance * reach)


@pytest.mark.parametrize("problem", sorted(PROBLEMS))
def test_without_the_limit_the_same_run_falls_at_once(problem: str) -> None:
    loss, statistic, start = PROBLEMS[problem]
    params = start(KEY)
    (free, _), (held, _) = (
        descend(optimizer, loss, params, 200)
        for optimizer in (optax.adam(0.03), optax.chain(optax.adam(0.03), proxvi.speed_limit(statistic, 400)))
    )
    end_free, end_held = (statistic(jax.tree.map(lambda x: x[-1], p)) for p in (free, held))
    reach = 5.0 if problem == "normal" else np.log(2.0)
    lowest = statistic(params) - 0.5 * reach  # half of the range in half of the steps
    assert np.any(np.asarray(end_free) < np.asarray(lowest) - 0.1 * reach)
    assert np.all(np.asarray(end_held) > np.asarray(lowest) - 0.1 * reach)


@pytest.mark.parametrize(("lacks", "slowed_by"), [(0.5, 1.0), (0.02, 0.4)])
def test_only_what_makes_a_held_unit_fall_is_slowed_and_by_its_weight(lacks: float, slowed_by: float) -> None:
    def statistic(params: Any) -> Any:
        return params["level"]

    link = proxvi.speed_limit(statistic, over=1e9, range=1.0)
    start = {"level": jnp.ones(3)}
    _, state = link.update({"level": jnp.zeros(3)}, link.init(start), start)
    fallen, wanted = {"level": jnp.array([1.0 - lacks, 1.0 - lacks, 1.0])}, jnp.array([-0.1, 0.3, -0.1])
    limited: Any = link.update({"level": wanted}, state, fallen)[0]
    np.testing.assert_allclose(limited["level"], [-0.1 * (1.0 - slowed_by), 0.3, -0.1], atol=1e-6)


@ROUNDS_ALIKE
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_while_the_limit_is_kept_every_bit_is_the_optimisers(name: str) -> None:
    params = {"logits": jnp.array([3.0, -2.0, 1.0])}

    def spread_out(p: Any) -> jax.Array:
        return jnp.sum(p["logits"] ** 2)  # the entropy rises

    bare = OPTIMIZERS[name](0.01)
    for optimizer in (
        optax.chain(OPTIMIZERS[name](0.01), proxvi.speed_limit(bernoulli_entropy, 1_000)),
        optax.chain(OPTIMIZERS[name](0.01), proxvi.speed_limit(bernoulli_entropy, 0)),
    ):
        assert bits(descend(optimizer, spread_out, params, 50)[0]) == bits(descend(bare, spread_out, params, 50)[0])


def test_a_limit_off_is_void_also_where_the_entropy_falls() -> None:
    loss, statistic, start = PROBLEMS["Bernoulli"]
    off = optax.chain(optax.adam(0.03), proxvi.speed_limit(statistic, 0))
    assert bits(descend(off, loss, start(KEY), 50)[0]) == bits(descend(optax.adam(0.03), loss, start(KEY), 50)[0])


def level(params: Any) -> Any:
    return params["level"]


OVER = 40


def sink(optimizer: optax.GradientTransformation) -> tuple[Any, Any]:
    """The loss pulls the level down for ever: 2 `OVER` steps with the limit, and as many without."""
    link = optax.chain(optimizer, proxvi.speed_limit(level, OVER, range=1.0))
    return descend(link, lambda p: jnp.sum(level(p)), {"level": jnp.ones(3)}, 4 * OVER)


def test_the_limit_ends_after_twice_over() -> None:
    _, (_, limits) = sink(optax.adam(0.1))
    done = limits.telemetry
    assert np.all(done.pull[2 * OVER - 10 : 2 * OVER] > 0.0)
    assert np.all(done.pull[2 * OVER :] == 0.0)
    assert np.all(done.shortfall[2 * OVER :] == 0.0)
    np.testing.assert_allclose(done.active[-1], done.active[2 * OVER - 1] / 2)


@ROUNDS_ALIKE
def test_after_the_end_every_bit_is_the_optimisers() -> None:
    adam = optax.adam(0.1)
    visited, (states, _) = sink(adam)
    params, state = jax.tree.map(lambda x: x[2 * OVER - 1], (visited, states))
    alone, _ = descend(adam, lambda p: jnp.sum(level(p)), params, 2 * OVER, state)
    assert bits(alone) == bits(jax.tree.map(lambda x: x[2 * OVER :], visited))


def units(x: jax.Array) -> None:
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.sample("x", dist.Normal(z, 0.1).to_event(1), obs=x)


def units_guide(x: jax.Array) -> None:
    loc = numpyro.param("loc", jnp.zeros(3))
    scale = numpyro.param("scale", jnp.ones(3), constraint=dist.constraints.positive)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("z", dist.Normal(loc, scale).to_event(1))


X = jnp.array([[3.0, -3.0, 0.5]])
LIMIT = SpeedLimit()


def make_svi(constraint: Any = LIMIT, optim: Any = None, loss: Any = None) -> proxvi.ProximitySVI:
    return proxvi.ProximitySVI(units, units_guide, optim or optax.adam(0.05), loss or TraceMeanField_ELBO(), constraint)


@HELD
def test_the_limit_acts_in_numpyro_and_both_doors_agree() -> None:
    steps = 100
    result = make_svi(SpeedLimit(over=2_000)).run(KEY, steps, X, progress_bar=False)
    free = make_svi(()).run(KEY, steps, X, progress_bar=False)
    assert np.all(result.params["scale"] > 1.1 * free.params["scale"])
    (done,) = proxvi.telemetry(result.state)
    assert isinstance(done, proxvi.LimitTelemetry)
    assert done.active > 0.5

    # The same steps by the other door, with the same keys.
    def statistic(params: Any) -> Any:
        return proxvi.entropy(dist.Normal(params["loc"], jnp.exp(params["scale"])).to_event(1))

    params, key = {"loc": jnp.zeros(3), "scale": jnp.zeros(3)}, jax.random.split(KEY)[0]
    optimizer = optax.chain(optax.adam(0.05), proxvi.speed_limit(statistic, 2_000))
    state = optimizer.init(params)

    def loss(params: Any, key: jax.Array) -> jax.Array:
        constrained = {"loc": params["loc"], "scale": jnp.exp(params["scale"])}
        return jnp.asarray(TraceMeanField_ELBO().loss(key, constrained, units, units_guide, X))

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        key, now = jax.random.split(key)
        updates, state = optimizer.update(jax.grad(loss)(params, now), state, params)
        return optax.apply_updates(params, updates), state, key

    for _ in range(steps):
        params, state, key = step(params, state, key)
    np.testing.assert_allclose(result.params["loc"], params["loc"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.params["scale"], np.exp(params["scale"]), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim",
    [
        numpyro.optim.Adam(0.05),
        numpyro.optim.SGD(0.01),
        numpyro.optim.Momentum(0.01, 0.9),
        numpyro.optim.RMSProp(0.01),
        numpyro.optim.ClippedAdam(0.05),
        numpyro.optim.Adagrad(0.1),
    ],
    ids=lambda optim: type(optim).__name__,
)
@HELD
def test_numpyros_own_optimisers_are_limited(optim: Any) -> None:
    limited = make_svi(SpeedLimit(over=10_000), optim).run(KEY, 20, X, progress_bar=False)
    free = make_svi((), optim).run(KEY, 20, X, progress_bar=False)
    assert np.all(limited.params["scale"] > free.params["scale"])


def test_a_third_of_the_run_is_known_to_run_and_must_be_named_for_update() -> None:
    svi = make_svi()
    state = svi.init(KEY, X)
    with pytest.raises(ValueError, match=r"`over` must be given where `update` is called by hand, got None"):
        svi.update(state, X)
    result = svi.run(KEY, 60, X, progress_bar=False)
    assert result.state.constraints[0].constraint.over == 20.0
    again = svi.run(KEY, 60, X, progress_bar=False, init_state=result.state)  # goes on with the limit that it had
    assert again.state.constraints[0].constraint.over == 20.0


def test_a_constant_in_the_loss_and_the_units_of_the_data_change_nothing() -> None:
    def shifted(x: jax.Array) -> None:
        units(x)
        numpyro.factor("constant", 1e4)

    results = [
        proxvi.ProximitySVI(model, units_guide, optax.adam(0.05), TraceMeanField_ELBO(), SpeedLimit()).run(
            KEY, 60, X, progress_bar=False
        )
        for model in (units, shifted)
    ]
    assert bits(results[0].params) == bits(results[1].params)


@pytest.mark.slow
def test_many_runs_at_once_are_those_one_by_one() -> None:
    svi = make_svi(loss=Trace_ELBO())

    def run(key: jax.Array) -> Any:
        return svi.run(key, 40, X, progress_bar=False).params

    keys = jax.random.split(KEY, 2)
    together = jax.vmap(run)(keys)
    for i, key in enumerate(keys):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-6), together, run(key))


@pytest.mark.slow
def test_a_resumed_fit_has_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    x = jnp.tile(X, (8, 1))
    whole = proxvi.fit(make_svi(), KEY, 200, x, batch_size=4)
    stopped = proxvi.Checkpointing(tmp_path, every=0.0)

    def stop(step: int, metrics: Any) -> None:
        assert metrics["pull"] >= 0.0
        if step == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        proxvi.fit(
            make_svi(),
            KEY,
            200,
            x,
            batch_size=4,
            checkpointing=stopped,
            reporting=proxvi.Reporting(every=50, callback=stop),
        )
    resumed = proxvi.fit(make_svi(), KEY, 200, x, batch_size=4, checkpointing=stopped)
    assert bits(resumed.params) == bits(whole.params)


@pytest.mark.slow
def test_eight_devices_give_what_one_gives() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), "units")
    loss, statistic, _ = PROBLEMS["Bernoulli"]
    optimizer = optax.chain(optax.adam(0.03), proxvi.speed_limit(statistic, 300))
    params = {"logits": jnp.linspace(-1.0, 1.0, 16)}
    spread = jax.device_put(params, NamedSharding(mesh, PartitionSpec("units")))
    one, eight = (descend(optimizer, loss, p, 100)[0] for p in (params, spread))
    np.testing.assert_allclose(one["logits"], eight["logits"], rtol=1e-5, atol=1e-6)


def test_bfloat16_parameters_stay_so_and_are_held() -> None:
    loss, statistic, _ = PROBLEMS["Bernoulli"]
    params = {"logits": jnp.zeros(5, jnp.bfloat16)}
    ended, (_, state) = descend(optax.chain(optax.adam(0.03), proxvi.speed_limit(statistic, 1_000)), loss, params, 200)
    assert ended["logits"].dtype == jnp.bfloat16
    assert np.all(np.asarray(state.constraint.average)[-1] > 0.45)


@pytest.mark.slow
@HELD
@pytest.mark.parametrize("guide", [AutoMultivariateNormal, pytest.param(AutoIAFNormal, marks=pytest.mark.nightly)])
def test_guides_that_sample_all_latents_at_once_are_limited(guide: Any) -> None:
    svi = proxvi.ProximitySVI(units, guide(units), optax.adam(0.01), Trace_ELBO(), SpeedLimit(over=10_000))
    result = svi.run(KEY, 50, X, progress_bar=False)
    (done,) = proxvi.telemetry(result.state)
    assert isinstance(done, proxvi.LimitTelemetry)
    assert 0.0 < done.active <= 1.0
    assert np.all(np.isfinite(result.losses))


def test_the_range_is_that_of_the_distributions() -> None:
    def ranges(statistic: Callable[[], Any], **settings: Any) -> Any:
        return SpeedLimit(lambda: None, **settings).ranges(statistic)

    three = dist.Categorical(logits=jnp.zeros((7, 3)))
    both = {"z": dist.Bernoulli(logits=jnp.zeros((4, 2))).to_event(1), "k": three, "w": dist.Normal(jnp.zeros(2), 1.0)}
    found = ranges(lambda: proxvi.entropy(both))
    np.testing.assert_allclose(found["z"], np.log(2.0))
    np.testing.assert_allclose(found["k"], np.log(3.0))
    np.testing.assert_allclose(found["w"], 5.0)
    np.testing.assert_allclose(ranges(lambda: proxvi.entropy(both["z"], total=True)), 2 * np.log(2.0))
    wide = dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4))
    np.testing.assert_allclose(ranges(lambda: proxvi.entropy(wide)), 20.0)
    np.testing.assert_allclose(proxvi.entropy(three), np.log(3.0), rtol=1e-6)  # outside, an entropy is itself
    np.testing.assert_allclose(ranges(lambda: jnp.ones(2), range=3), [3.0, 3.0])
    masked = dist.Bernoulli(logits=jnp.zeros((4, 2))).mask(jnp.array(False)).to_event(1)
    np.testing.assert_allclose(ranges(lambda: proxvi.entropy(masked)), 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_svi(SpeedLimit(proxvi.kl_to_prior)).run(KEY, 2, X), r"`range` must be given for a statistic"),
        (lambda: make_svi(SpeedLimit(proxvi.mean_variance)).run(KEY, 2, X), r"`range` must be given for a statistic"),
        (
            lambda: make_svi(SpeedLimit(jax.jit(lambda q: proxvi.entropy(q)))).run(KEY, 2, X),
            r"`range` must be given for a statistic that is not an entropy, or is compiled by `jax.jit`",
        ),
        (lambda: SpeedLimit(over=-1), r"`over` must be a finite number of at least 0, got -1"),
        (lambda: SpeedLimit(over=np.inf), r"`over` must be a finite number of at least 0, got inf"),
        (lambda: SpeedLimit(range=0), r"`range` must be a finite number above 0, got 0"),
        (
            lambda: make_svi(SpeedLimit(proxvi.identity, range=1.0)).init(KEY, X),
            r"must return arrays, got distributions",
        ),
        (
            lambda: make_svi().run(KEY, 2, X, forward_mode_differentiation=True),
            r"`forward_mode_differentiation` must be False with a SpeedLimit",
        ),
        (
            lambda: proxvi.ProximitySVI(units, AutoDelta(units), optax.adam(0.1), Trace_ELBO(), SpeedLimit()).init(
                KEY, X
            ),
            r"must hold at least one distribution",
        ),
    ],
)
def test_what_cannot_be_limited_is_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_limit_that_has_not_ended_is_told() -> None:
    with pytest.warns(UserWarning, match=r"SpeedLimit\(entropy, over=100000\) has changed .* and has not ended"):
        make_svi(SpeedLimit(over=100_000)).run(KEY, 100, X, progress_bar=False)


def test_a_limit_that_has_changed_nothing_is_not_told() -> None:
    # The fastest loss that it allows is more than the optimiser's; a warning would be an error.
    make_svi(SpeedLimit(over=60), optax.sgd(1e-6)).run(KEY, 100, X, progress_bar=False)


def test_a_limit_without_settings_ends_within_the_run_and_nothing_is_told() -> None:
    # 0.3 nats a dimension are lost in a step, of the 0.17 that may be.
    state = make_svi(optim=optax.adam(0.3)).run(KEY, 90, X, progress_bar=False).state  # a warning would be an error
    (done,) = proxvi.telemetry(state)
    assert isinstance(done, proxvi.LimitTelemetry)
    assert 0.0 < done.active < 2 / 3
    assert done.pull == done.shortfall == 0.0


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"pull": 0.07, "shortfall": 0.02}, True),  # what the noise of batches makes
        ({"pull": 0.0, "shortfall": 0.0}, False),
        ({"pull": [0.0, 0.01]}, True),
        ({"share": 0.02}, True),
        ({"share": 0.005}, False),
        ({}, False),
    ],
)
def test_a_limit_steers_while_it_changes_updates(metrics: Any, expected: bool) -> None:
    assert steers(metrics) == expected


@HELD
def test_kl_to_prior_may_be_limited_with_a_range_of_its_own() -> None:
    def divergence(constraint: Any) -> Any:
        params = {"loc": jnp.full(3, 3.0), "scale": jnp.ones(3)}
        result = make_svi(constraint, optax.adam(0.1)).run(
            KEY, 50, jnp.zeros((1, 3)), progress_bar=False, init_params=params
        )
        return 0.5 * result.params["loc"] ** 2  # the part of the location, which the data pull to 0

    assert np.all(divergence(()) < 1.0)
    assert np.all(divergence(SpeedLimit(proxvi.kl_to_prior, range=5.0, over=10_000)) > 3.0)


def test_float64_through_both_doors() -> None:
    with jax.enable_x64(True):
        result = make_svi(SpeedLimit()).run(KEY, 20, X, progress_bar=False)
        assert result.params["loc"].dtype == np.float64
        loss, statistic, start = PROBLEMS["Bernoulli"]
        link = optax.chain(optax.adam(0.03), proxvi.speed_limit(statistic, 400))
        visited, _ = descend(link, loss, start(jax.random.key(0)), 20)
        assert visited["logits"].dtype == np.float64


def test_a_state_that_was_not_told_the_length_of_the_run_is_refused() -> None:
    svi = make_svi(SpeedLimit())
    svi.run(KEY, 10, X, progress_bar=False)
    with pytest.raises(ValueError, match="`over` must be given where `update` is called by hand"):
        svi.update(svi.init(KEY, X), X)
    with pytest.raises(ValueError, match="`over` must be given where `update` is called by hand"):
        jax.jit(svi.update)(svi.init(KEY, X), X)
    result = svi.run(KEY, 10, X, progress_bar=False)
    svi.init(KEY, X)
    svi.update(result.state, X)  # which knows it


@pytest.mark.parametrize("zero", [0, 0.0, jnp.zeros(())])
def test_every_zero_is_no_limit(zero: Any) -> None:
    assert SpeedLimit(over=zero).is_off


def test_over_may_be_a_hyperparameter_of_optax() -> None:
    link: Any = optax.inject_hyperparams(proxvi.speed_limit, static_args="statistic")(bernoulli_entropy, over=500.0)
    params = {"logits": jnp.zeros(2)}
    updates, _ = jax.jit(link.update)(params, link.init(params), params)
    assert bits(updates) == bits(params)


@pytest.mark.parametrize(
    ("statistic", "reach"),
    [
        (lambda p: proxvi.entropy(dist.Binomial(3, logits=p).to_event(1)), np.log(4.0)),
        (lambda p: -proxvi.entropy(dist.Bernoulli(logits=p).to_event(1)), np.log(2.0)),
    ],
    ids=["a finite number of values", "minus an entropy"],
)
def test_ranges_of_entropies(statistic: Any, reach: float) -> None:
    np.testing.assert_allclose(SpeedLimit(statistic).ranges(lambda: statistic(jnp.zeros(2))), reach, rtol=1e-6)


def test_numpyros_svi_is_the_same_as_no_constraint() -> None:
    plain = SVI(units, units_guide, optax.adam(0.05), TraceMeanField_ELBO()).run(KEY, 30, X, progress_bar=False)
    off = make_svi(SpeedLimit(over=0)).run(KEY, 30, X, progress_bar=False)
    assert bits(plain.params) == bits(off.params)


@HELD
def test_an_autoguide_is_limited() -> None:
    def model() -> None:
        numpyro.sample("x", dist.Normal(jnp.asarray(numpyro.sample("m", dist.Normal(0.0, 1.0))), 1e-3), obs=1.0)

    svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.05), Trace_ELBO(), SpeedLimit(over=1_000))
    result = svi.run(KEY, 100, progress_bar=False)
    assert result.params["m_auto_scale"] > 0.1 * np.exp(-5.0 * 100 / 1_000) * 0.7
