"""`fit`: the same bits however it is cut up, and nothing lost; the faults at small size."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import faults
import grain
import jax
import jax.numpy as jnp
import memory
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi
from proxvi.training._batches import Arrays
from proxvi.training._chunks import Run
from proxvi.training.fitting import _reproducible

ROOT = Path(__file__).parents[1]
# Many runs here are too short to let go of the constraint.
pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")

KEY = jax.random.key(0)
ROWS = 3.0 + np.random.default_rng(0).standard_normal((1_000, 50), np.float32)


@pytest.fixture(autouse=True)
def ranks_are_numpyros_business() -> Any:
    with jax.numpy_rank_promotion("allow"):
        yield


class CrashError(Exception):
    """What ends a run in the middle."""


def crash_at(step: int) -> Any:
    def callback(now: int, _: dict[str, Any]) -> None:
        if now == step:
            raise CrashError

    return callback


def test_bits_do_not_depend_on_how_the_run_is_cut_up(tmp_path: Path) -> None:
    alone = faults.bits(faults.run(None))
    assert faults.bits(faults.run(None, report_every=77)) == alone
    for step in (300, 1_700):
        with pytest.raises(CrashError):
            faults.run(tmp_path, callback=crash_at(step))
    # and once more with reports at other steps
    assert faults.bits(faults.run(tmp_path, report_every=250)) == alone
    # a finished run is not run again
    assert faults.bits(faults.run(tmp_path, callback=lambda *_: pytest.fail("it is"))) == alone
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    reports = [line["step"] for line in lines if "elbo" in line]
    assert reports == sorted(set(reports))  # nothing twice, whatever was repeated after the crash
    assert sum("resumed" in line for line in lines) >= 2


def test_each_epoch_visits_every_row_once_in_another_order() -> None:
    source = Arrays((np.arange(103),), 10, KEY, longest=25)
    seen = []
    step = 0
    while step < 30:
        feed, length = source.feed(step, 30 - step)
        seen += [np.asarray(source.pick(feed, jnp.asarray(step + i), jnp.asarray(i))[0]) for i in range(length)]
        step += length
    epochs = np.array(seen).reshape(3, 100)
    assert all(len(set(epoch)) == 100 for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    again = Arrays((np.arange(103),), 10, KEY, longest=7)  # addressed by the step, whatever the length of a feed
    feed, _ = again.feed(17, 1)
    np.testing.assert_array_equal(again.pick(feed, jnp.asarray(17), jnp.asarray(0))[0], seen[17])


def test_numpyros_svi_takes_the_same_steps_as_in_its_own_loop() -> None:
    svi = SVI(faults.model, AutoNormal(faults.model), optax.adam(0.05), Trace_ELBO())
    result = proxvi.fit(svi, KEY, 200, ROWS, report_every=50)
    state = svi.init(jax.random.fold_in(KEY, 0), ROWS)
    update = jax.jit(svi.update)
    for _ in range(200):
        state, _ = update(state, ROWS)
    for name, value in svi.get_params(state).items():
        np.testing.assert_allclose(result.params[name], value, rtol=1e-5)
    np.testing.assert_allclose(svi.evaluate(result.state, ROWS), result.losses[-1], rtol=0.01)


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

    proxvi.fit(svi, KEY, 1_050, ROWS, batch_size=100, report_every=100, callback=callback, validation=ROWS[:100])
    assert counts[1:] == [counts[1]] * 10  # nothing is traced after the first report and validation
    assert [step for step, _ in reports] == [*range(100, 1_001, 100), 1_050]
    assert set(reports[0][1]) == {
        *("elbo", "magnitude", "distance", "share", "skipped", "steps_per_second", "seconds", "validation_elbo")
    }
    assert reports[0][1]["share"] > 0.05 > 0.01 > reports[-1][1]["share"]


def test_stops_when_validation_does_not_improve_but_not_while_constrained() -> None:
    def fit(constraint: Any, **options: Any) -> Any:
        svi = proxvi.ProximitySVI(faults.model, AutoNormal(faults.model), optax.adam(0.05), Trace_ELBO(), constraint)
        return proxvi.fit(svi, KEY, 3_000, ROWS, batch_size=100, report_every=100, validation=ROWS, **options)

    held = proxvi.Proximity(proxvi.entropy, magnitude=1.0)
    with pytest.warns(UserWarning, match=r"constraint on `entropy` still makes up \d+% of the gradient"):
        assert len(fit(held, patience=2).losses) == 3_000
    assert 200 < len(fit((), patience=2).losses) < 3_000
    with pytest.raises(ValueError, match="`patience` must come with `validation`"):
        proxvi.fit(faults.make_svi(), KEY, 100, ROWS, patience=2)


def test_checkpoints_of_another_run_are_refused_by_name(tmp_path: Path) -> None:
    def fit(rows: Any = ROWS, key: Any = KEY, steps: int = 200, rate: float = 0.05, **options: Any) -> Any:
        options = {"batch_size": 100, **options}
        svi = proxvi.ProximitySVI(faults.model, AutoNormal(faults.model), optax.adam(rate), Trace_ELBO(), ())
        return proxvi.fit(svi, key, steps, rows, report_every=100, checkpoints=tmp_path, **options)

    fit()
    for name, options in {
        "batch_size": {"batch_size": 50},
        "key": {"key": jax.random.key(1)},
        "data": {"rows": ROWS[:500]},
        "data_digest": {"rows": ROWS + 1.0},
        "user": {"configuration": {"mine": 1}},
        "program": {"rate": 0.1},
    }.items():
        with pytest.raises(proxvi.ConfigurationError, match=rf"checkpoint 200 in .* for `{name}`, this run"):
            fit(**options)
    with pytest.raises(ValueError, match="`num_steps` must be at least 200"):
        fit(steps=100)
    assert len(fit(steps=300).losses) == 300  # going on for longer is no other run


def test_a_constraint_on_another_site_is_another_run(tmp_path: Path) -> None:
    def model(x: Any) -> None:
        one, two = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("one", "two"))
        numpyro.sample("x", dist.Normal(one + two, 1.0), obs=x)

    def fit(statistic: Any) -> Any:
        svi = proxvi.ProximitySVI(
            model, AutoNormal(model), optax.adam(0.1), Trace_ELBO(), proxvi.Proximity(statistic, magnitude=1.0)
        )
        return proxvi.fit(svi, KEY, 10, ROWS[:, 0], checkpoints=tmp_path)

    def of(site: str) -> Any:
        return lambda q: proxvi.entropy(q[site])

    fit(of("one"))
    fit(of("one"))
    with pytest.raises(proxvi.ConfigurationError, match="for `constraints`"):
        fit(of("two"))


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from proxvi import checkpoints

    monkeypatch.setattr(checkpoints, "LONGEST_WAIT", 1)
    first = checkpoints.Checkpoints(tmp_path, {}, keep=2)
    with pytest.raises(RuntimeError, match="`checkpoints` must be a folder that no other run uses"):
        checkpoints.Checkpoints(tmp_path, {}, keep=2)
    first.close()
    checkpoints.Checkpoints(tmp_path, {}, keep=2).close()


def test_arrays_that_the_model_closes_over_are_part_of_the_run(tmp_path: Path) -> None:
    def fit(scale: Any) -> Any:
        def model(x: Any) -> None:
            numpyro.sample("x", dist.Normal(numpyro.sample("mean", dist.Normal(0.0, 1.0)), scale), obs=x)

        svi = SVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
        return proxvi.fit(svi, KEY, 10, ROWS[:, 0], checkpoints=tmp_path)

    fit(jnp.full(1_000, 1.0))
    fit(jnp.full(1_000, 1.0))
    with pytest.raises(proxvi.ConfigurationError, match="for `program`"):
        fit(jnp.full(1_000, 2.0))


def test_settings_of_the_model_go_into_the_svi(tmp_path: Path) -> None:
    def model(x: Any, spread: float) -> None:
        numpyro.sample("x", dist.Normal(numpyro.sample("mean", dist.Normal(0.0, spread)), 1.0), obs=x)

    def fit(model: Any, **settings: Any) -> Any:
        held = proxvi.Proximity(proxvi.kl_to_prior, magnitude=1.0)
        svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO(), held, **settings)
        return proxvi.fit(svi, KEY, 10, ROWS[:, 0], batch_size=1_000, checkpoints=tmp_path / str(settings))

    given, bound = fit(model, spread=2.0), fit(partial(model, spread=2.0))
    assert faults.bits(given) == faults.bits(bound)
    assert faults.bits(fit(model, spread=3.0)) != faults.bits(bound)
    (tmp_path / str({"spread": 2.0})).rename(tmp_path / str({"spread": 4.0}))
    with pytest.raises(proxvi.ConfigurationError, match="for `program`"):
        fit(model, spread=4.0)


def test_state_of_another_shape_or_dtype_is_refused_by_name(tmp_path: Path) -> None:
    from proxvi.training.checkpoints import Checkpoints

    folder = Checkpoints(tmp_path, {}, keep=2)
    folder.save(5, {"weights": jnp.zeros((3, 2)), "key": KEY}, {"note": 1})
    folder.wait()
    for other in (jnp.zeros((2, 3)), jnp.zeros((3, 2), jnp.bfloat16)):
        with pytest.raises(proxvi.ConfigurationError, match=r"has 'float32\[3, 2\]' for `\['weights'\]`"):
            folder.restore(lambda _, other=other: {"weights": other, "key": KEY})
    restored = folder.restore(lambda _: {"weights": jnp.ones((3, 2)), "key": jax.random.key(7)})
    assert restored is not None
    assert np.all(restored.tree["weights"] == 0)
    assert jnp.all(jax.random.key_data(restored.tree["key"]) == jax.random.key_data(KEY))
    assert restored.notes == {"note": 1}
    folder.close()


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.nightly)])
def test_nothing_is_lost_by_kill(tmp_path: Path, times: int) -> None:
    faults.kill(tmp_path, times)


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
def test_sigterm_at_any_moment_saves_and_exits(tmp_path: Path) -> None:
    faults.kill(tmp_path, times=5, number=signal.SIGTERM)


def test_sigterm_saves_and_exits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def terminate(step: int, _: dict[str, Any]) -> None:
        if step == 1_000:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        faults.run(tmp_path, checkpoint_every=300.0, callback=terminate)
    assert ended.value.code == 128 + signal.SIGTERM
    assert "told to stop: saved step 1000 of 3000" in caplog.text
    assert faults.bits(faults.run(tmp_path)) == faults.bits(faults.run(None))


@pytest.mark.parametrize(("flips", "cuts"), [(10, 5), pytest.param(100, 20, marks=pytest.mark.nightly)])
def test_damaged_checkpoints_are_never_loaded(tmp_path: Path, flips: int, cuts: int) -> None:
    faults.damage(tmp_path, flips, cuts, runs=1)


def test_nan_is_left_out_or_stops_the_run(tmp_path: Path) -> None:
    faults.nan(tmp_path / "nan", times=20)


def test_bits_do_not_depend_on_the_chunks_where_steps_are_left_out() -> None:
    bad = {3, 4, 5, 41, 80, 119}
    batches = [(ROWS[:100], np.asarray(t in bad)) for t in range(120)]

    def fit(**options: Any) -> Any:
        return proxvi.fit(faults.make_svi(), KEY, 120, batches, **options)

    whole, short = fit(), fit(report_every=7)
    assert list(np.flatnonzero(np.isnan(whole.losses))) == sorted(bad)
    assert whole.state.skipped.total == short.state.skipped.total == len(bad)
    assert faults.bits(whole) == faults.bits(short)


def test_bad_steps_with_good_ones_between_them_do_not_stop_a_run_of_short_chunks() -> None:
    batches = [(ROWS[:100], np.asarray(t % 3 == 2)) for t in range(60)]
    result = proxvi.fit(faults.make_svi(), KEY, 60, batches, report_every=1)
    assert result.state.skipped.total == 20


@pytest.mark.parametrize("chunk", [1, 60])
def test_ten_bad_steps_in_a_row_stop_a_run_whatever_its_chunks(chunk: int) -> None:
    batches = [(ROWS[:100], np.asarray(13 <= t < 28)) for t in range(60)]
    with pytest.raises(FloatingPointError, match="not finite at step 13, nor any step since: 10 in a row"):
        proxvi.fit(faults.make_svi(), KEY, 60, batches, report_every=chunk)


def test_a_gradient_that_overflows_the_optimiser_is_left_out() -> None:
    def model(scale: Any) -> None:
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        numpyro.factor("steep", scale[0] * loc)

    svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO(), ())
    batches = [np.full(1, 1e25 if t == 5 else 1.0, np.float32) for t in range(20)]  # its square is not a float32
    result = proxvi.fit(svi, KEY, 20, batches)
    assert result.state.skipped.total == 1
    assert result.state.skipped.parameter == -2


def test_callers_svi_reads_the_result() -> None:
    svi = faults.make_svi()
    result = proxvi.fit(svi, KEY, 50, ROWS)
    np.testing.assert_array_equal(svi.get_params(result.state)["mean_auto_loc"], result.params["mean_auto_loc"])
    assert np.isfinite(svi.evaluate(result.state, ROWS))
    assert len(svi.run(KEY, 5, ROWS, init_state=result.state, progress_bar=False).losses) == 5


def test_patience_does_not_wait_for_what_beats_nan() -> None:
    from proxvi.training import _wait_for_better

    notes = {"best": None, "waited": 0}
    for elbo in (float("nan"), -5.0, -4.0, -3.0):
        _wait_for_better(notes, {"validation_elbo": elbo})
    assert notes == {"best": -3.0, "waited": 0}


def test_a_run_that_patience_stopped_goes_on_without_it(tmp_path: Path) -> None:
    def length(steps: int, **options: Any) -> int:
        svi = proxvi.ProximitySVI(faults.model, AutoNormal(faults.model), optax.sgd(0.0), Trace_ELBO(), ())
        options = {"report_every": 10, "validation": ROWS, "checkpoints": tmp_path, **options}
        return len(proxvi.fit(svi, KEY, steps, ROWS, batch_size=100, **options).losses)

    assert length(200, patience=2) == length(200, patience=2) == 30  # nothing moves, so nothing gets better
    assert length(60) == 60


def test_a_folder_in_which_nothing_is_intact_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    faults.run(tmp_path, checkpoint_every=300.0)
    for _ in range(2):
        for file in (tmp_path / "checkpoints").glob("*/state/d/*"):
            file.write_bytes(b"")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(OSError, match=r"nothing but 3000 \(.*\); look at them"):
                faults.run(tmp_path)


def test_checkpoints_that_fail_to_load_for_once_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is out of memory, a network disk that hiccups: that is no damage."""
    whole = faults.bits(faults.run(tmp_path, checkpoint_every=300.0))

    def fail(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch:
        patch.setattr("proxvi.training.checkpoints._digest", fail)
        with pytest.raises(OSError, match=r"nothing but 3000 \(RESOURCE_EXHAUSTED\)"):
            faults.run(tmp_path)
    assert faults.bits(faults.run(tmp_path, callback=lambda *_: pytest.fail("it is there"))) == whole


def test_reports_of_several_constraints_and_what_is_kept(tmp_path: Path) -> None:
    constraints = [
        proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, 100, 1e-10)),
        proxvi.Proximity(proxvi.mean_variance, magnitude=0.0),
    ]
    svi = proxvi.ProximitySVI(faults.model, AutoNormal(faults.model), optax.adam(0.01), Trace_ELBO(), constraints)
    file = tmp_path / "metrics.jsonl"
    options = {"report_every": 20, "metrics_file": file, "checkpoints": tmp_path / "checkpoints"}
    proxvi.fit(svi, KEY, 100, ROWS, batch_size=100, validation=(ROWS,), checkpoint_every=0.0, keep=2, **options)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]
    shares = [line["share"] for line in lines if "share" in line]
    assert len(shares) == 5
    assert shares[0][0] > 0.01
    assert all(off is None for _, off in shares)  # NaN is no JSON
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit())
    assert len(kept) == 2
    assert kept[-1] == 100


def test_losses_keep_their_precision() -> None:
    with jax.enable_x64(True):
        svi = proxvi.ProximitySVI(faults.model, AutoNormal(faults.model), optax.adam(0.01), Trace_ELBO(), ())
        assert proxvi.fit(svi, KEY, 10, ROWS.astype(np.float64), batch_size=100).losses.dtype == np.float64


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"`checkpoints` must be a folder that can be written to, got .*choose another"):
        faults.run(None, checkpoints=tmp_path / "file" / "folder")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_said_and_the_checkpoint_before_is_intact(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("this machine does not mount")
    subprocess.run(["umount", tmp_path], check=True)
    faults.disk(tmp_path / "disk")


def test_eight_devices_give_the_losses_of_one() -> None:
    one = proxvi.fit(faults.make_svi(), KEY, 200, ROWS, batch_size=200)
    mesh = jax.make_mesh((8,), ("data",))
    eight = proxvi.fit(faults.make_svi(), KEY, 200, ROWS, batch_size=200, mesh=mesh)
    np.testing.assert_allclose(eight.losses, one.losses, rtol=1e-5)
    source = Run(_reproducible(faults.make_svi()), KEY, (ROWS,), 200, 10, mesh).source
    feed, _ = source.feed(0, 10)
    (batch,) = jax.jit(source.pick)(feed, 0, 0)
    assert [shard.data.shape[0] for shard in batch.addressable_shards] == 8 * [25]  # each has its part
    with pytest.raises(ValueError, match="`batch_size` must be a multiple of the 8 devices"):
        proxvi.fit(faults.make_svi(), KEY, 200, ROWS, batch_size=100, mesh=mesh)


def two_processes(folder: Path, send: signal.Signals | None = None, at: int = 0) -> tuple[list[str], list[int]]:
    """What each of them printed and how it ended; with `send`, the second one gets that signal when at step `at`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks"), "JAX_PLATFORMS": "cpu"}
    script = ROOT / "tests" / "two_processes.py"
    both = [
        subprocess.Popen(
            [sys.executable, str(script), str(port), str(number), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in (0, 1)
    ]
    metrics = Path(f"{folder}.jsonl")
    if send is not None:
        while both[1].poll() is None and not (metrics.exists() and f'"step": {at},' in metrics.read_text()):
            time.sleep(0.05)
        both[1].send_signal(send)
        sent = time.monotonic()
        both[0].wait(timeout=30)  # the bound that we promise
        assert time.monotonic() - sent < 30
    printed = [process.communicate(timeout=300)[0] for process in both]
    return printed, [process.returncode for process in both]


def bits_printed(printed: list[str]) -> list[list[str]]:
    return [[line for line in text.splitlines() if line.startswith("bits ")] for text in printed]


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["", "killed"])
def test_two_processes_agree_stop_together_and_survive_the_death_of_one(tmp_path: Path, killed: bool) -> None:
    printed, ended = two_processes(tmp_path / "alone")
    assert ended == [0, 0], printed
    first, alone = bits_printed(printed)
    assert first == alone
    assert len(alone) == 2
    one = proxvi.fit(faults.make_svi(), KEY, 100, ROWS, batch_size=100, progress=False)
    lines = (tmp_path / "alone-arrays.jsonl").read_text().splitlines()
    elbos = {line["step"]: line["elbo"] for line in map(json.loads, lines) if "elbo" in line}
    np.testing.assert_allclose(elbos[100], -np.mean(one.losses[80:100]), rtol=1e-5)

    printed, ended = two_processes(tmp_path / "disturbed", signal.SIGTERM, at=40)
    assert ended == [128 + signal.SIGTERM] * 2, printed
    assert all("told to stop: saved step" in text for text in printed)
    if killed:
        (survivor, _), _ = two_processes(tmp_path / "disturbed", signal.SIGKILL, at=160)
        assert "another task died" in survivor or "heartbeat" in survivor
    printed, ended = two_processes(tmp_path / "disturbed")
    assert ended == [0, 0], printed
    assert bits_printed(printed) == [alone, alone]


@pytest.mark.parametrize("batch_size", [50, pytest.param(500, marks=pytest.mark.nightly)])
def test_grain_resumes_in_the_middle_of_an_epoch(tmp_path: Path, batch_size: int) -> None:
    """10^4 or 10^5 records, streamed in shuffled batches; a crash in the second epoch."""
    records = 3.0 + np.random.default_rng(1).standard_normal((200 * batch_size, 2), np.float32)
    epoch = {}  # the batches of an epoch, by the first record of each

    def note(batch: Any) -> Any:
        epoch[batch.tobytes()] = len(epoch)
        return batch

    def fit(folder: Path, **options: Any) -> Any:
        loader = grain.MapDataset.source(records).shuffle(seed=0).batch(batch_size).map(note).to_iter_dataset()

        def model(x: Any) -> None:
            mean = numpyro.sample("mean", dist.Normal(jnp.zeros(2), 10.0).to_event(1))
            with numpyro.plate("data", len(records), subsample_size=x.shape[0]):
                numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

        constraint = proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, 200, 1e-10))
        svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.01), Trace_ELBO(), constraint)
        options = {"checkpoints": folder, "checkpoint_every": 0.0, **options}
        return proxvi.fit(svi, KEY, 600, loader, report_every=30, **options)

    alone = fit(tmp_path / "alone")
    batches = dict(epoch)
    assert len(batches) >= 200
    with pytest.raises(CrashError):
        fit(tmp_path / "crash", callback=crash_at(330))
    epoch.clear()
    again = fit(tmp_path / "crash")
    assert faults.bits(again) == faults.bits(alone)
    assert set(epoch) <= set(batches)  # the same batches, records and all
    assert 90 < len(epoch) <= 330  # and not from the beginning: the first to be looked at, and those from 300 on


@pytest.mark.parametrize("once", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["list", "generator"])
def test_a_plain_iterable_is_run_forward_to_its_place(tmp_path: Path, once: bool) -> None:
    batches = [ROWS[100 * i : 100 * (i + 1)] for i in range(10)]

    def fit(folder: Path, **options: Any) -> Any:
        options = {"checkpoints": folder, "checkpoint_every": 0.0, "report_every": 10, **options}
        data = (batches[i % 10] for i in range(1_000)) if once else batches
        return proxvi.fit(faults.make_svi(), KEY, 105, data, **options)

    alone = fit(tmp_path / "alone")
    with pytest.raises(CrashError):
        fit(tmp_path / "crash", callback=crash_at(70))
    assert faults.bits(fit(tmp_path / "crash")) == faults.bits(alone)
    with pytest.raises(ValueError, match=r"`data` ended after 1 epoch and cannot be started again"):
        proxvi.fit(faults.make_svi(), KEY, 105, (batch for batch in batches))
    with pytest.raises(ValueError, match="`batch_size` must be None where `data` is an iterable"):
        proxvi.fit(faults.make_svi(), KEY, 105, batches, batch_size=10)


def test_bad_arguments_are_refused() -> None:
    svi = faults.make_svi()
    with pytest.raises(ValueError, match="`num_steps` must be an integer of at least 1, got 0"):
        proxvi.fit(svi, KEY, 0, ROWS)
    with pytest.raises(ValueError, match="`batch_size` must lie between 1 and the 1000 rows of the data, got 2000"):
        proxvi.fit(svi, KEY, 10, ROWS, batch_size=2_000)
    with pytest.raises(ValueError, match=r"`data` must have one leading axis in common, got lengths \[10, 1000\]"):
        proxvi.fit(svi, KEY, 10, ROWS, ROWS[:10], batch_size=5)
    with pytest.raises(ValueError, match=r"`data` must yield batches of one shape.*drop_remainder"):
        proxvi.fit(svi, KEY, 10, [ROWS[:10], ROWS[:10], ROWS[:5]])
    with pytest.raises(ValueError, match="`data` must be arrays or an iterable of batches"):
        proxvi.fit(svi, KEY, 10, [1.0, 2.0])
    with pytest.raises(
        TypeError, match=r"`data` must be what the model takes, one argument after the other, got a tuple"
    ):
        proxvi.fit(svi, KEY, 10, (ROWS, ROWS))
    with pytest.raises(ValueError, match="`patience` must be an integer of at least 1, got 0"):
        proxvi.fit(svi, KEY, 10, ROWS, validation=ROWS, patience=0)


def test_a_batch_that_does_not_stand_for_all_rows_is_said_aloud(recwarn: pytest.WarningsRecorder) -> None:
    def said_of(plate: Any, mean: Any = None, size: int = 100) -> list[str]:
        def model(x: Any) -> None:
            shared = numpyro.sample("mean", dist.Normal(0.0, 1.0)) if mean is None else mean
            with plate(x):
                local = numpyro.sample("local", dist.Normal(shared, 1.0))
                numpyro.sample("x", dist.Normal(local, 1.0), obs=x[:, 0])

        recwarn.clear()
        guide = AutoNormal(model, create_plates=plate)
        svi = proxvi.ProximitySVI(model, guide, optax.sgd(1e-3), Trace_ELBO(), ())
        Run(svi, KEY, (ROWS,), size, 10, None)
        return [str(w.message) for w in recwarn if "`batch_size` is 100 of 1000 rows" in str(w.message)]

    [said] = said_of(lambda x: numpyro.plate("rows", x.shape[0]))
    assert "'x'" in said
    assert "'mean'" in said
    assert "subsample_size=x.shape[0]" in said
    assert not said_of(lambda x: numpyro.plate("rows", 1_000, subsample_size=x.shape[0]))
    assert not said_of(lambda x: numpyro.plate("rows", x.shape[0]), mean=0.0)  # nothing is shared
    assert not said_of(lambda x: numpyro.plate("rows", x.shape[0]), size=1_000)  # all rows at once


def test_progress_bar_shows_elbo_magnitude_and_distance(capsys: pytest.CaptureFixture[str]) -> None:
    faults.run(None, progress=True)
    shown = capsys.readouterr().err
    assert "3000/3000" in shown
    assert all(f"{name} " in shown for name in ("elbo", "magnitude", "distance"))
    faults.run(None, progress=None)  # not on a terminal
    assert capsys.readouterr().err == ""


def test_memory_is_flat_and_nothing_compiles_twice() -> None:
    ratio, traces = memory.main(steps=100_000)
    assert ratio < 1.05  # 1.02 after 10^6 steps, by hand
    assert traces == 0
