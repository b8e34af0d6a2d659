"""Compiled chunks: steps that are not finite are left out, nothing compiles twice, warnings."""

import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import memory
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi
from proxvi.training._chunks import ChunkPacer, ChunkRunner

from . import faults
from .common import KEY, ROWS

# Many runs here are too short to let go of the constraint.
pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")


@pytest.mark.parametrize(
    ("computing", "loading", "ready"),
    [(0.01, 0.0, 0), (0.001, 0.1, 0), (0.1, 0.1, 0), (0.001, 0.1, 8), (2.0, 0.1, 0), (0.1, 2.0, 0)],
)
def test_chunks_take_about_a_second_whether_steps_or_batches_are_slow(
    computing: float, loading: float, ready: int
) -> None:
    """Seconds of a step and of a batch; a loader has the first `ready` batches at hand."""
    pacer, step, length, took = ChunkPacer(10**6, 10**6), 0, 1, []
    for _ in range(40):
        ahead = pacer.limit(step + length)
        waited = loading * sum(ready <= step + length + i for i in range(ahead))
        took.append(max(computing * length, waited))
        pacer.record(length, took[-1], ahead, waited)
        step, length = step + length, ahead
    slower = max(computing, loading)
    assert max(took) <= max(2.1, slower)
    assert took[-1] >= min(0.9, slower)


def test_the_rate_is_that_of_all_steps_since_the_last_report() -> None:
    pacer = ChunkPacer(1_000, 10_000)
    pacer.record(900, 9.0)
    pacer.record(100, 0.001)
    assert pacer.take_rate() == pytest.approx(1_000 / 9.001)
    pacer.record(10, 1.0)
    assert pacer.take_rate() == pytest.approx(10.0)


@pytest.mark.slow
def test_nan_is_left_out_or_stops_the_run(tmp_path: Path) -> None:
    faults.nan(tmp_path / "nan", times=20)


@pytest.mark.nightly
def test_bits_do_not_depend_on_the_chunks_where_steps_are_left_out() -> None:
    bad = {3, 4, 5, 41, 80, 119}
    batches = [(ROWS[:100], np.asarray(t in bad)) for t in range(120)]

    def fit(**options: Any) -> Any:
        return proxvi.fit(faults.make_svi(), KEY, 120, batches, **options)

    whole, short = fit(), fit(reporting=proxvi.Reporting(every=7))
    assert list(np.flatnonzero(np.isnan(whole.losses))) == sorted(bad)
    assert whole.state.skipped.total == short.state.skipped.total == len(bad)
    assert faults.bits(whole) == faults.bits(short)


@pytest.mark.slow
def test_bad_steps_with_good_ones_between_them_do_not_stop_a_run_of_short_chunks() -> None:
    batches = [(ROWS[:100], np.asarray(t % 3 == 2)) for t in range(60)]
    result = proxvi.fit(faults.make_svi(), KEY, 60, batches, reporting=proxvi.Reporting(every=1))
    assert result.state.skipped.total == 20


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 60])
def test_ten_bad_steps_in_a_row_stop_a_run_whatever_its_chunks(chunk: int) -> None:
    batches = [(ROWS[:100], np.asarray(13 <= t < 28)) for t in range(60)]
    with pytest.raises(FloatingPointError, match="not finite at step 13, nor any step since: 10 in a row"):
        proxvi.fit(faults.make_svi(), KEY, 60, batches, reporting=proxvi.Reporting(every=chunk))


@pytest.mark.slow
def test_a_gradient_that_overflows_the_optimiser_is_left_out() -> None:
    def model(scale: Any) -> None:
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        numpyro.factor("steep", scale[0] * loc)

    svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO(), ())
    batches = [np.full(1, 1e25 if t == 5 else 1.0, np.float32) for t in range(20)]  # its square is not a float32
    result = proxvi.fit(svi, KEY, 20, batches)
    assert result.state.skipped.total == 1
    assert result.state.skipped.parameter == -2


@pytest.mark.slow
def test_warns_if_a_batch_does_not_stand_for_all_rows(recwarn: pytest.WarningsRecorder) -> None:
    def warnings_of(plate: Any, mean: Any = None, size: int = 100) -> list[str]:
        def model(x: Any) -> None:
            shared = numpyro.sample("mean", dist.Normal(0.0, 1.0)) if mean is None else mean
            with plate(x):
                local = numpyro.sample("local", dist.Normal(shared, 1.0))
                numpyro.sample("x", dist.Normal(local, 1.0), obs=x[:, 0])

        recwarn.clear()
        guide = AutoNormal(model, create_plates=plate)
        svi = proxvi.ProximitySVI(model, guide, optax.sgd(1e-3), Trace_ELBO(), ())
        ChunkRunner(svi, KEY, (ROWS,), size, ChunkPacer(10, 10), None)
        return [str(w.message) for w in recwarn if "`batch_size` is 100 of 1000 rows" in str(w.message)]

    [warning] = warnings_of(lambda x: numpyro.plate("rows", x.shape[0]))
    assert "'x'" in warning
    assert "'mean'" in warning
    assert "subsample_size=x.shape[0]" in warning
    assert not warnings_of(lambda x: numpyro.plate("rows", 1_000, subsample_size=x.shape[0]))
    assert not warnings_of(lambda x: numpyro.plate("rows", x.shape[0]), mean=0.0)  # nothing is shared
    assert not warnings_of(lambda x: numpyro.plate("rows", x.shape[0]), size=1_000)  # all rows at once


def test_a_shared_variable_as_long_as_a_batch_is_not_taken_for_rows() -> None:
    def model(x: Any) -> None:
        weights = jnp.asarray(numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([10]).to_event(1)))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("x", dist.Normal(jnp.sum(weights), 1.0), obs=x[:, 0])

    svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.sgd(1e-3), Trace_ELBO(), ())
    with pytest.warns(UserWarning, match="beside the whole prior of 'weights'"):
        ChunkRunner(svi, KEY, (ROWS,), 10, ChunkPacer(10, 10), None)


AVERAGE = proxvi.statistic_average(0.9)


@pytest.mark.parametrize(
    ("constraint", "of_parameters"),
    [
        (proxvi.SpeedLimit, False),
        (lambda f: proxvi.Proximity(f, magnitude=1.0, reference=AVERAGE), False),
        (lambda f: proxvi.Proximity(f, magnitude=1.0), True),  # its past is that of the parameters, not of the rows
        (lambda f: proxvi.Proximity(f, magnitude=0.0, reference=AVERAGE), True),  # off
        (lambda f: proxvi.SpeedLimit(f, over=0), True),
    ],
)
def test_a_statistic_of_single_rows_is_refused_with_batches(constraint: Any, of_parameters: bool) -> None:
    def model(x: Any) -> None:
        with numpyro.plate("rows", x.shape[0]):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x[:, 0])

    def guide(x: Any) -> None:
        slope = jnp.asarray(numpyro.param("slope", 0.0))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("z", dist.Normal(slope * x[:, 0], 1.0))

    def svi(statistic: Any) -> proxvi.ProximitySVI:
        return proxvi.ProximitySVI(model, guide, optax.sgd(1e-3), Trace_ELBO(), constraint(statistic))

    ChunkRunner(svi(proxvi.entropy), KEY, (ROWS,), 10, ChunkPacer(10, 10), None)
    by_row = svi(lambda q: proxvi.entropy(q["z"].to_event(1)))
    ChunkRunner(by_row, KEY, (ROWS,), None, ChunkPacer(10, 10), None)
    for size in (10, 1_000):  # all rows at once are in another order in each epoch
        if of_parameters:
            ChunkRunner(by_row, KEY, (ROWS,), size, ChunkPacer(10, 10), None)
        else:
            with pytest.raises(ValueError, match="`statistic` must be averaged over the rows of a batch"):
                ChunkRunner(by_row, KEY, (ROWS,), size, ChunkPacer(10, 10), None)


def test_looking_at_batches_of_another_size_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    def model(x: Any) -> None:
        with numpyro.plate("rows", 1_000, subsample_size=x.shape[0]):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x[:, 0])

    def fixed(x: Any) -> None:
        with numpyro.plate("rows", 2):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x[:, 0])

    guide = AutoNormal(model, create_plates=lambda x: numpyro.plate("rows", 1_000, subsample_size=x.shape[0]))
    for pair, size in (((model, guide), 10), ((fixed, AutoNormal(fixed)), 2)):
        warnings.simplefilter("always")
        svi = proxvi.ProximitySVI(*pair, optax.sgd(1e-3), Trace_ELBO(), ())
        ChunkRunner(svi, KEY, (ROWS,), size, ChunkPacer(10, 10), None)
    assert not [str(w.message) for w in recwarn]


@pytest.mark.slow
def test_warns_if_a_factor_of_a_batch_does_not_stand_for_all_rows() -> None:
    def model(x: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        numpyro.factor("likelihood", dist.Normal(mean, 1.0).log_prob(x[:, 0]))

    svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.sgd(1e-3), Trace_ELBO(), ())
    with pytest.warns(UserWarning, match="likelihood of 'likelihood' counts those of a batch only"):
        ChunkRunner(svi, KEY, (ROWS,), 100, ChunkPacer(10, 10), None)


@pytest.mark.slow
def test_memory_is_flat_and_nothing_compiles_twice() -> None:
    ratio, traces = memory.main(steps=100_000)
    assert ratio < 1.05  # 1.02 after 10^6 steps, by hand
    assert traces == 0
