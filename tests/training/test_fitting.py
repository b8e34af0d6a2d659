"""`fit`: the same bits however a run is cut up, its reports, and when it stops."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi

from . import faults
from .common import KEY, ROWS, CrashError, crash_at

# Many runs here are too short to let go of the constraint.
pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")


@pytest.mark.slow
def test_bits_do_not_depend_on_how_the_run_is_cut_up(tmp_path: Path) -> None:
    alone = faults.bits(faults.run(None))
    assert faults.bits(faults.run(None, every=77)) == alone
    for step in (300, 1_700):
        with pytest.raises(CrashError):
            faults.run(tmp_path, callback=crash_at(step))
    # and once more with reports at other steps
    assert faults.bits(faults.run(tmp_path, every=250)) == alone
    # a finished run is not run again
    assert faults.bits(faults.run(tmp_path, callback=lambda *_: pytest.fail("it is"))) == alone
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    reports = [line["step"] for line in lines if "elbo" in line]
    assert reports == sorted(set(reports))  # nothing twice, whatever was repeated after the crash
    assert sum("resumed" in line for line in lines) >= 2


@pytest.mark.slow
def test_numpyros_svi_takes_the_same_steps_as_in_its_own_loop() -> None:
    svi = SVI(faults.model, AutoNormal(faults.model), optax.adam(0.05), Trace_ELBO())
    result = proxvi.fit(svi, KEY, 200, ROWS, reporting=proxvi.Reporting(every=50))
    state = svi.init(jax.random.fold_in(KEY, 0), ROWS)
    update = jax.jit(svi.update)
    for _ in range(200):
        state, _ = update(state, ROWS)
    for name, value in svi.get_params(state).items():
        np.testing.assert_allclose(result.params[name], value, rtol=1e-5)
    np.testing.assert_allclose(svi.evaluate(result.state, ROWS), result.losses[-1], rtol=0.01)


@pytest.mark.slow
def test_callers_svi_reads_the_result() -> None:
    svi = faults.make_svi()
    result = proxvi.fit(svi, KEY, 50, ROWS)
    np.testing.assert_array_equal(svi.get_params(result.state)["loc"], result.params["loc"])
    assert np.isfinite(svi.evaluate(result.state, ROWS))
    assert len(svi.run(KEY, 5, ROWS, init_state=result.state, progress_bar=False).losses) == 5


@pytest.mark.slow
def test_one_compilation_and_a_report_of_everything() -> None:
    traces, reports = 0, []

    def model(x: Any) -> None:
        nonlocal traces
        traces += 1
        faults.model(x)

    guide = AutoNormal(model)
    constraint = proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, 250, 1e-10))
    svi = proxvi.ProximitySVI(model, guide, optax.adam(0.05), Trace_ELBO(), constraint)
    counts = []

    def callback(step: int, metrics: dict[str, Any]) -> None:
        counts.append(traces)
        reports.append((step, metrics))

    reporting, validation = proxvi.Reporting(every=100, callback=callback), proxvi.Validation(ROWS[:100])
    proxvi.fit(svi, KEY, 1_050, ROWS, batch_size=100, reporting=reporting, validation=validation)
    assert counts[1:] == [counts[1]] * 10  # nothing is traced after the first report and validation
    assert [step for step, _ in reports] == [*range(100, 1_001, 100), 1_050]
    assert set(reports[0][1]) == {
        *("elbo", "magnitude", "distance", "share", "skipped", "steps_per_second", "seconds", "validation_elbo")
    }
    assert reports[0][1]["share"] > 0.05 > 0.01 > reports[-1][1]["share"]


@pytest.mark.slow
def test_stops_when_validation_does_not_improve_but_not_while_constrained() -> None:
    def fit(constraint: Any) -> Any:
        svi = proxvi.ProximitySVI(faults.model, AutoNormal(faults.model), optax.adam(0.05), Trace_ELBO(), constraint)
        options = {"reporting": proxvi.Reporting(every=100), "validation": proxvi.Validation(ROWS, patience=2)}
        return proxvi.fit(svi, KEY, 3_000, ROWS, batch_size=100, **options)

    held = proxvi.Proximity(proxvi.entropy, magnitude=1.0)
    with pytest.warns(UserWarning, match=r"constraint on `entropy` still makes up \d+% of the gradient"):
        assert len(fit(held).losses) == 3_000
    assert 200 < len(fit(()).losses) < 3_000


def steps_taken(folder: Path, optimizer: Any, steps: int, validation: proxvi.Validation | None) -> int:
    svi = proxvi.ProximitySVI(faults.model, AutoNormal(faults.model), optimizer, Trace_ELBO(), ())
    result = proxvi.fit(
        svi,
        KEY,
        steps,
        ROWS,
        batch_size=100,
        checkpointing=proxvi.Checkpointing(folder),
        reporting=proxvi.Reporting(every=10),
        validation=validation,
    )
    return len(result.losses)


@pytest.mark.slow
def test_a_run_that_patience_stopped_goes_on_without_it(tmp_path: Path) -> None:
    def length(steps: int, patience: int | None = None) -> int:
        return steps_taken(tmp_path, optax.sgd(0.0), steps, proxvi.Validation(ROWS, patience=patience))

    assert length(200, patience=2) == length(200, patience=2) == 30  # nothing moves, so nothing gets better
    assert length(60) == 60


@pytest.mark.slow
def test_early_stopping_starts_afresh_with_other_validation_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def length(steps: int, held_out: Any = None) -> int:
        validation = None if held_out is None else proxvi.Validation(held_out, patience=2)
        return steps_taken(tmp_path, optax.adam(0.01), steps, validation)

    assert length(40, ROWS) == 40
    assert length(50) == 50
    assert "early stopping starts afresh" not in caplog.text
    assert length(100, ROWS + 1.0) == 100  # whose ELBO is lower, but rises
    assert "`validation` has other data than before step 50, so early stopping starts afresh" in caplog.text


@pytest.mark.slow
def test_losses_keep_their_precision() -> None:
    with jax.enable_x64(True):
        svi = proxvi.ProximitySVI(faults.model, AutoNormal(faults.model), optax.adam(0.01), Trace_ELBO(), ())
        assert proxvi.fit(svi, KEY, 10, ROWS.astype(np.float64), batch_size=100).losses.dtype == np.float64


def test_bad_arguments_are_refused() -> None:
    def model(x: Any) -> None:
        numpyro.factor("x", -jnp.sum((x - numpyro.param("mean", 0.0)) ** 2))

    svi = proxvi.ProximitySVI(model, lambda x: None, optax.sgd(0.1), Trace_ELBO(), ())
    with pytest.raises(ValueError, match="`num_steps` must be an integer of at least 1, got 0"):
        proxvi.fit(svi, KEY, 0, ROWS)
    with pytest.raises(ValueError, match="`batch_size` must be at most the 1000 rows of the data, got 2000"):
        proxvi.fit(svi, KEY, 10, ROWS, batch_size=2_000)
    with pytest.raises(ValueError, match=r"`data` must have one leading axis in common, got lengths \[10, 1000\]"):
        proxvi.fit(svi, KEY, 10, ROWS, ROWS[:10], batch_size=5)
    with pytest.raises(ValueError, match=r"`data` must yield batches of one shape.*drop_remainder"):
        proxvi.fit(svi, KEY, 10, [ROWS[:10], ROWS[:10], ROWS[:5]])
    with pytest.raises(ValueError, match="`data` must be arrays or an iterable of batches"):
        proxvi.fit(svi, KEY, 10, [1.0, 2.0])
    with pytest.raises(TypeError, match=r"`data` must be the arguments of the model, one after the other, got a tuple"):
        proxvi.fit(svi, KEY, 10, (ROWS, ROWS))
    with pytest.raises(TypeError, match="`svi` must be a ProximitySVI or NumPyro's SVI, got Other"):
        proxvi.fit(type("Other", (SVI,), {})(svi.model, svi.guide, svi.optim, svi.loss), KEY, 10, ROWS)
