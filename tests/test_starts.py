"""Many starts in one program, and the report of how much they matter."""

import functools
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
from proxvi import plots
from proxvi.starts import Starts

HILLS = jnp.linspace(-3.0, 3.0, 10)


def climb(start: Any) -> tuple[Any, jax.Array]:
    def step(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        def elbo(x: jax.Array) -> jax.Array:
            return jnp.maximum(-((x - 1) ** 2), -((x + 1) ** 2) - 1)

        x = x + 0.1 * jax.grad(elbo)(x)
        return x, elbo(x)

    x, trace = jax.lax.scan(step, start, length=100)
    return {"x": x}, trace


@pytest.mark.slow
def test_one_program_gives_what_a_loop_gives() -> None:
    together = proxvi.multistart(climb, HILLS)
    for i, start in enumerate(HILLS):
        params, trace = climb(start)
        np.testing.assert_allclose(together.params["x"][i], params["x"], rtol=1e-6)
        np.testing.assert_allclose(together.traces[i], trace, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(together.elbos, together.traces[:, -1])
    averaged = proxvi.multistart(climb, HILLS, average_last=5)
    np.testing.assert_allclose(averaged.elbos, together.traces[:, -5:].mean(1), rtol=1e-6)


@functools.cache
def on_one_device() -> Starts:
    return proxvi.multistart(climb, HILLS, mesh=Mesh(np.array(jax.devices()[:1]), "starts"))


@pytest.mark.parametrize("count", [3, 8])
def test_starts_are_spread_over_devices(count: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:count]), "starts")
    spread = proxvi.multistart(climb, HILLS, mesh=mesh)  # 10 starts: 3 and 8 do not divide them
    alone = on_one_device()
    assert len(spread.traces.sharding.device_set) == count
    assert spread.elbos.shape == (10,)
    np.testing.assert_allclose(spread.elbos, alone.elbos, rtol=1e-6, atol=1e-7)


def test_a_trace_that_is_too_short_is_refused_before_the_work() -> None:
    worked = []

    def optimise(start: jax.Array) -> tuple[Any, jax.Array]:
        jax.debug.callback(worked.append, start)
        return climb(start)

    with pytest.raises(ValueError, match="`average_last` must be at most the"):
        proxvi.multistart(optimise, HILLS, average_last=100_000)
    jax.effects_barrier()
    assert not worked


def test_the_function_is_traced_once() -> None:
    traced = []

    def optimise(start: jax.Array) -> tuple[Any, jax.Array]:
        traced.append(1)
        return climb(start)

    proxvi.multistart(optimise, jnp.linspace(-3.0, 3.0, 200))
    assert len(traced) == 1


@pytest.mark.slow
def test_keys_start_an_svi_of_numpyro() -> None:
    def model() -> None:
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=2.0)

    svi = SVI(model, AutoNormal(model), optax.adam(0.05), Trace_ELBO())

    def optimise(key: jax.Array) -> tuple[Any, jax.Array]:
        result = svi.run(key, 1_000, progress_bar=False)
        return result.params, -result.losses

    ended = proxvi.multistart(optimise, jax.random.split(jax.random.key(0), 20), average_last=200)
    assert ended.report(tolerance=0.5).share == 1.0
    np.testing.assert_allclose(ended.params["x_auto_loc"], 1.0, atol=0.5)


def test_the_report_counts_and_groups() -> None:
    elbos = jnp.array([-10.0, -300.0, -10.5, -12.9, jnp.inf, -11.8, -301.0])
    report = Starts(elbos, None, elbos[:, None]).report(tolerance=2.0)
    assert (report.best, report.worst, report.not_finite) == (-10.0, -301.0, 1)
    assert report.share == pytest.approx(3 / 7)  # −12.9 is not within 2 of the best, and infinity is none
    assert [basin.starts.tolist() for basin in report.basins] == [[0, 2, 5, 3], [1, 6]]
    text = str(report)
    assert "43% of 7 starts" in text
    assert "1 starts ended without a finite ELBO" in text


def test_what_cannot_be_reported_is_refused() -> None:
    nothing = jnp.full(3, jnp.nan)
    with pytest.raises(ValueError, match=r"`elbos` must have a finite entry, got none in 3"):
        Starts(nothing, None, nothing[:, None]).report()
    with pytest.raises(ValueError, match=r"`tolerance` must be above 0, got 0"):
        Starts(jnp.zeros(3), None, jnp.zeros((3, 1))).report(tolerance=0.0)
    with pytest.raises(ValueError, match=r"`starts` must have one leading axis in common.*\[2, 3\]"):
        proxvi.multistart(climb, (jnp.zeros(2), jnp.zeros(3)))
    with pytest.raises(ValueError, match=r"`average_last` must be an integer of at least 1, got 0"):
        proxvi.multistart(climb, HILLS, average_last=0)
    with pytest.raises(ValueError, match=r"`average_last` must be at most the 1 ELBOs that `optimise` returns, got 2"):
        proxvi.multistart(lambda start: (start, start[None]), HILLS, average_last=2)
    with pytest.raises(ValueError, match=r"`optimise` must return its ELBOs as one vector, got 0 axes"):
        proxvi.multistart(lambda start: (start, start), HILLS)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    plots.starts({"two hills": on_one_device()}, tmp_path / "starts.png", tolerance=0.1)
    assert (tmp_path / "starts.png").stat().st_size > 10_000
