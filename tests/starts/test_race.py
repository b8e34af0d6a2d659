"""The race: the worse half dropped again and again, the winner finished."""

import gc
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.sharding import Mesh
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi
from proxvi.starts._lanes import Lanes
from proxvi.starts._programs import _known
from proxvi.starts.racing import better_half

KEY = jax.random.key(0)
TIMES = jnp.arange(60)
Y = jnp.sin(1.3 * TIMES) + 0.3 * jax.random.normal(jax.random.key(1), TIMES.shape)


METHODS = ("plain", "speed limit")


def wave(y: jax.Array) -> None:
    """Most starts see no wave at all: the likelihood has a narrow peak at the right frequency."""
    frequency = jnp.asarray(numpyro.sample("frequency", dist.Uniform(0.0, 3.0)))
    numpyro.sample("y", dist.Normal(jnp.sin(frequency * TIMES), 0.3).to_event(1), obs=y)


def svi() -> SVI:
    return SVI(wave, AutoNormal(wave, init_scale=0.01), optax.adam(0.01), Trace_ELBO())


@pytest.fixture(scope="module")
def raced() -> proxvi.Race:
    return proxvi.race(svi(), KEY, 8_000, Y, starts=32, methods=METHODS, progress_bar=False)


@pytest.mark.slow
def test_a_race_finds_what_most_runs_of_as_many_steps_do_not(raced: proxvi.Race) -> None:
    alone = [svi().run(jax.random.key(seed), 8_000, Y, progress_bar=False).losses[-100:].mean() for seed in range(5)]
    assert raced.elbo > float(np.median([-float(loss) for loss in alone])) + 50
    guide: Any = AutoNormal(wave)
    SVI(wave, guide, optax.adam(0.01), Trace_ELBO()).init(KEY, Y)
    assert guide.median(raced.params)["frequency"] == pytest.approx(1.3, abs=0.01)


def test_the_steps_add_up_and_half_of_the_lanes_go_on(raced: proxvi.Race) -> None:
    assert [len(lanes) for lanes, _, _ in raced.rounds] == [64, 32, 16, 8, 4, 2]
    spent = sum(len(lanes) * steps for lanes, steps, _ in raced.rounds)
    assert 0.45 * raced.steps < spent <= 0.5 * raced.steps
    for (before, _, scores), (after, _, _) in zip(raced.rounds[:-1], raced.rounds[1:], strict=True):
        kept = np.isin(before, after)
        plain = before < 32
        worst_kept = np.min(scores[kept & plain], initial=np.inf)
        assert np.all(scores[~kept] <= max(np.sort(scores)[len(scores) // 2], worst_kept))
        assert np.any(after < 32)  # a plain one
    assert "number" in str(raced)


@pytest.mark.slow
def test_the_same_key_gives_the_same_bits_on_any_number_of_devices(raced: proxvi.Race) -> None:
    for count in (1, 3, 8):
        mesh = Mesh(np.array(jax.devices()[:count]), "lanes")
        again = proxvi.race(svi(), KEY, 8_000, Y, starts=32, methods=METHODS, mesh=mesh, progress_bar=False)
        assert (again.lane, again.elbo) == (raced.lane, raced.elbo)
        jax.tree.map(np.testing.assert_array_equal, again.params, raced.params)


@pytest.mark.slow
def test_a_race_that_was_interrupted_goes_on_to_the_same_bits(raced: proxvi.Race, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"starts": 32, "methods": METHODS, "progress_bar": False}
    settings["checkpointing"] = proxvi.Checkpointing(tmp_path, every=0.0)
    advance, calls = Lanes.advance, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) in (4, 10, 20):  # in a round, at the end of the rounds, in the finish
            raise KeyboardInterrupt
        return advance(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "advance", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                proxvi.race(svi(), KEY, 8_000, Y, **settings)
        on_three = Mesh(np.array(jax.devices()[:3]), "lanes")  # and not on eight, as before
        again = proxvi.race(svi(), KEY, 8_000, Y, mesh=on_three, **settings)
    assert len(calls) < 40  # nothing was begun again from the start: 32 calls, and 3 more for what was lost
    assert (again.lane, again.elbo) == (raced.lane, raced.elbo)
    jax.tree.map(np.testing.assert_array_equal, again.params, raced.params)
    for ours, theirs in zip(again.rounds, raced.rounds, strict=True):
        np.testing.assert_array_equal(ours.scores, theirs.scores)
    with pytest.raises(proxvi.ConfigurationError, match="`num_steps`"):
        proxvi.race(svi(), KEY, 9_000, Y, **settings)


@pytest.mark.slow
def test_a_race_refuses_the_folder_of_another_run_by_name(tmp_path: Path) -> None:
    folder = proxvi.Checkpointing(tmp_path)
    with closing(folder.open({"num_steps": 9_000})) as checkpoints:
        checkpoints.save(5_000, {"x": jnp.zeros(1)}, {})  # a race has no such step
        checkpoints.wait()
    with pytest.raises(proxvi.ConfigurationError, match=r"checkpoint 5000 in .* use another folder"):
        proxvi.race(svi(), KEY, 400, Y, starts=2, checkpointing=folder, progress_bar=False)


def test_a_plain_lane_is_kept_until_one_is_left() -> None:
    scores = np.array([5.0, 4.0, 3.0, 2.0, np.nan, 1.0, 0.0, -1.0])
    plain = np.array([False] * 7 + [True])
    assert better_half(scores, plain).tolist() == [0, 1, 2, 7]
    assert better_half(scores, ~plain).tolist() == [0, 1, 2, 3]
    assert better_half(np.array([2.0, 1.0]), np.array([False, True])).tolist() == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"starts": 3}, "`starts` must give a power of 2 runs with 1 methods, got 3"),
        ({"methods": ("magic",)}, r"`methods` must name 'plain', 'speed limit', or both, got \['magic'\]"),
        ({"num_steps": 100}, "`num_steps` must be at least 768, one step for each of 64 runs, got 100"),
    ],
)
def test_what_cannot_be_raced_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        proxvi.race(svi(), KEY, arguments.pop("num_steps", 8_000), Y, progress_bar=False, **arguments)


def test_starts_that_begin_at_one_point_are_not_raced() -> None:
    def guide(y: jax.Array) -> None:
        del y
        numpyro.sample("frequency", dist.Uniform(0.0, 2.0 + jnp.asarray(numpyro.param("width", 0.0))))

    fixed = SVI(wave, guide, optax.adam(0.01), Trace_ELBO())
    with pytest.raises(ValueError, match="`svi` must begin at another point for each key, got 4 starts with the same"):
        proxvi.race(fixed, KEY, 200, Y, starts=4, progress_bar=False)


def test_an_optimiser_that_does_not_hold_the_parameters_is_refused_by_name() -> None:
    svi = SVI(wave, AutoNormal(wave), numpyro.optim.SM3(0.01), Trace_ELBO())
    lanes = Lanes(svi, KEY, (Y,), None, 2)
    with pytest.raises(TypeError, match="which `luck` and `race` read and change, got one that does not"):
        lanes.advance(lanes.start(jax.random.split(KEY, 2), 10), 0, 5)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_warm_up_does_not_begin_again_for_the_winner(scheduled: bool) -> None:
    loss = proxvi.WarmUpELBO(Trace_ELBO(), optax.linear_schedule(0.0, 1.0, 10)) if scheduled else Trace_ELBO()
    lanes = Lanes(proxvi.ProximitySVI(wave, AutoNormal(wave), optax.adam(0.1), loss, ()), KEY, (Y,), None, 2)
    states = lanes.start(jax.random.split(KEY, 2), 10)
    states = states._replace(optim_state=jax.tree.map(lambda x: x + 7, states.optim_state))  # as if 7 steps were taken
    step, (params, (adam, _)) = lanes.with_fresh_optimizer(states).optim_state
    assert step.tolist() == [7 if scheduled else 0] * 2
    assert adam.count.tolist() == [0, 0]
    jax.tree.map(np.testing.assert_array_equal, params, states.optim_state[1][0])


@pytest.mark.slow
def test_a_race_without_a_finite_end_is_refused() -> None:
    def model() -> None:
        numpyro.factor("none", jnp.nan * jnp.asarray(numpyro.param("m", lambda key: jax.random.normal(key))))

    lost = SVI(model, lambda: None, optax.adam(0.01), Trace_ELBO())
    with pytest.raises(FloatingPointError, match="the race has no winner: the parameters of the best start"):
        proxvi.race(lost, KEY, 50, starts=2, particles=2, progress_bar=False)


@pytest.mark.slow
def test_a_race_is_not_lost_for_a_sample_of_density_zero() -> None:
    def model() -> None:
        z = jnp.asarray(numpyro.sample("z", dist.Normal(0.0, 1.0)))
        numpyro.factor("support", jnp.where(z > 1.0, -jnp.inf, 0.0))

    svi = SVI(model, AutoNormal(model, init_scale=1.0), optax.adam(0.001), Trace_ELBO())
    with pytest.warns(UserWarning, match=r"not finite, for \d+ of its 100 samples are not; its parameters are"):
        ended = proxvi.race(svi, KEY, 50, starts=2, progress_bar=False)
    assert ended.elbo == -np.inf
    assert np.isfinite(ended.params["z_auto_loc"])


@pytest.mark.slow
def test_a_loss_that_is_not_finite_does_not_spoil_a_score_but_a_lost_lane_has_none() -> None:
    def model(y: jax.Array) -> None:
        place = jnp.asarray(numpyro.param("place", lambda key: jax.random.normal(key)))
        numpyro.factor("rare", jnp.where(y == 1.0, -jnp.inf, 0.0) - place**2)  # its gradient stays finite
        numpyro.factor("fatal", jnp.where(y == 2.0, jnp.nan, 0.0) * place)

    svi = SVI(model, lambda _: None, optax.sgd(0.0), Trace_ELBO())

    def losses(row: int, value: float) -> np.ndarray:
        """Of five steps; row 4 is that of the third, row 5 that of the last."""
        lanes = Lanes(svi, KEY, (jnp.zeros(6).at[row].set(value),), 1, 2)
        return lanes.advance(lanes.start(jax.random.split(KEY, 2), 5), 0, 5)[1]

    np.testing.assert_allclose(losses(4, 1.0), losses(4, 0.0), rtol=1e-6)
    assert np.all(losses(5, 1.0) == np.inf)
    assert np.all(losses(4, 2.0) == np.inf)


def test_a_second_race_with_the_same_svi_is_not_compiled_again_and_is_the_same_as_with_a_new_one() -> None:
    used = svi()
    settings: dict[str, Any] = {"starts": 4, "progress_bar": False}
    proxvi.race(used, KEY, 200, Y, **settings)
    again = proxvi.race(used, jax.random.key(7), 200, Y, **settings)
    (programs,) = _known[used].values()
    compiled: tuple[Any, ...] = (programs.start, programs.advance, programs.elbos)
    assert [program._cache_size() for program in compiled] == [1, 1, 1]
    fresh = proxvi.race(svi(), jax.random.key(7), 200, Y, **settings)
    assert (again.elbo, again.start) == (fresh.elbo, fresh.start)
    proxvi.race(used, KEY, 300, Y[:30].repeat(2), **settings)  # other data of the same shape, and more steps
    assert [program._cache_size() for program in compiled] == [1, 1, 1]


def test_a_model_that_uses_a_global_variable_sees_its_new_value() -> None:
    where = {"y": 1.0}

    def model() -> None:
        numpyro.sample("y", dist.Normal(numpyro.sample("z", dist.Normal(0, 10)), 0.1), obs=where["y"])

    used = SVI(model, AutoNormal(model), optax.adam(0.05), Trace_ELBO())

    def answer() -> float:
        return float(proxvi.race(used, KEY, 4_000, starts=4, progress_bar=False).params["z_auto_loc"])

    assert answer() == pytest.approx(1.0, abs=0.1)
    where["y"] = 5.0
    assert answer() == pytest.approx(5.0, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["initial value", "optimiser", "NumPy data"])
def test_what_has_changed_is_compiled_again(change: str) -> None:
    start, data = {"mean": 0.0}, np.zeros(3, np.float32)

    def model() -> None:
        with numpyro.plate("rows", 3):
            mean = numpyro.param("m", lambda key: start["mean"] + jax.random.normal(key))
            numpyro.sample("x", dist.Normal(mean), obs=data)

    def new(rate: float = 0.1) -> SVI:
        return SVI(model, lambda: None, optax.sgd(rate), Trace_ELBO())

    def ends(svi: SVI) -> np.ndarray:
        return np.asarray(proxvi.luck(svi, KEY, 5, starts=2, particles=2, progress_bar=False).params["m"])

    used, rate = new(), 0.1
    before = ends(used)
    if change == "initial value":
        start["mean"] = 100.0
    elif change == "optimiser":
        rate = 0.01
        used.optim = new(rate).optim
    else:
        data[:] = 50.0
    after = ends(used)
    np.testing.assert_array_equal(after, ends(new(rate)))
    assert np.all(after != before)


def test_compiled_programs_are_forgotten_with_their_svi() -> None:
    used = svi()
    proxvi.race(used, KEY, 200, Y, starts=4, progress_bar=False)
    (programs,) = _known[used].values()
    kept = weakref.ref(programs)
    del used, programs
    gc.collect()
    assert kept() is None
