"""What a run survives, and what it says of what it cannot: files that are not its own, changes, exceptions, threads."""

import json
import logging
import os
import signal
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi
from proxvi._validation import check_arrays
from proxvi.training._orbax_store import OrbaxStore, lock_folder

from . import faults
from .common import KEY, ROWS, CrashError

# Many runs here are too short to let go of the constraint.
pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")


def fit(
    steps: int = 20,
    data: Any = ROWS,
    *,
    folder: Path | None = None,
    model: Any = faults.model,
    optimizer: Any = None,
    constraints: Any = (),
    accept_changes: bool = False,
    **reporting: Any,
) -> Any:
    svi = proxvi.ProximitySVI(model, AutoNormal(model), optimizer or optax.adam(0.05), Trace_ELBO(), constraints)
    checkpointing = None
    if folder is not None:
        checkpointing = proxvi.Checkpointing(folder, every=0.0, accept_changes=accept_changes)
    return proxvi.fit(
        svi, KEY, steps, data, checkpointing=checkpointing, reporting=proxvi.Reporting(**{"every": 10, **reporting})
    )


def checkpoints_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


# The metrics file


@pytest.mark.parametrize("content", ['{\n "a": 1\n}\n', '{"a": 1}\n', "[1, 2]\n", "123\n", "\n", "a,b\n1,2\n"])
def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    file = tmp_path / "notes.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"`metrics_file` must be a new file or one that `fit` wrote, got .* whose"):
        fit(metrics_file=file)
    assert file.read_text() == content
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/null"), tmp_path):
        with pytest.raises(ValueError, match="`metrics_file` must be a regular file, got"):
            fit(metrics_file=path)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_link_to_a_metrics_file_stays_a_link(tmp_path: Path) -> None:
    link, target = tmp_path / "link.jsonl", tmp_path / "target.jsonl"
    link.symlink_to(target)
    fit(metrics_file=link)
    assert link.is_symlink()
    assert len(target.read_text().splitlines()) == 2


@pytest.mark.slow
def test_garbled_and_lost_metrics_do_not_stop_a_run_from_resuming(tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path / "checkpoints", "metrics_file": tmp_path / "metrics.jsonl"}
    fit(20, **options)
    with options["metrics_file"].open("ab") as file:
        file.write(b"\xff\xfe\x00\x80{")
    fit(40, **options)
    lines = [json.loads(line) for line in options["metrics_file"].read_text().splitlines()]
    assert [line["step"] for line in lines if "elbo" in line] == [10, 20, 30, 40]
    options["metrics_file"].unlink()
    fit(60, **options)
    lines = [json.loads(line) for line in options["metrics_file"].read_text().splitlines()]
    assert [line["step"] for line in lines if "elbo" in line] == [50, 60]


# Where checkpoints go


@pytest.mark.parametrize("path", ["gs://bucket/run", "s3://bucket/run", "az://bucket/run"])
def test_object_stores_are_refused_at_once(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (path, Path(path)):  # which has one slash less
        with pytest.raises(ValueError, match=r"`folder` must be on a file system, got the object store .* mount"):
            proxvi.Checkpointing(given)
        with pytest.raises(ValueError, match=r"`metrics_file` must be on a file system, got the object store"):
            proxvi.Reporting(metrics_file=given)
    assert list(tmp_path.iterdir()) == []
    assert proxvi.Checkpointing("C:/runs").folder == "C:/runs"


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("precious\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(precious)
    with pytest.raises(OSError, match=r"`Checkpointing\.folder` must be a folder that can be written to"):
        fit(folder=tmp_path / "run")
    assert precious.read_text() == "precious\n"


# Going on with something else


def scaled(x: Any) -> None:
    faults.model(2.0 * x)


@pytest.mark.slow
def test_a_changed_run_is_refused_and_goes_on_if_asked_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = fit(20, folder=tmp_path)
    lower: dict[str, Any] = {"folder": tmp_path, "optimizer": optax.adam(0.001)}
    with pytest.raises(
        proxvi.ConfigurationError, match=r"for `program` .*go on from it by `Checkpointing\(\.\.\., acc"
    ):
        fit(40, **lower)
    result = fit(40, accept_changes=True, **lower)
    assert "a run with another `program`. This run continues from it and keeps all of its state" in caplog.text
    np.testing.assert_array_equal(result.losses[:20], first.losses)
    assert int(result.state.optim_state[0]) == 40
    distance = np.max(np.abs(result.params["mean_auto_loc"] - first.params["mean_auto_loc"]))
    assert 0 < distance < 20 * 0.001 * 1.5
    # It is a run of its own now, which resumes to the bit.
    whole = fit(60, accept_changes=True, **lower)
    assert faults.bits(fit(60, **lower)) == faults.bits(whole)


@pytest.mark.slow
def test_what_does_not_fit_starts_afresh_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = fit(20, folder=tmp_path)
    held = proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, 10, 1e-10))
    clipped = optax.chain(optax.clip(1.0), optax.sgd(1e-9))
    result = fit(21, folder=tmp_path, optimizer=clipped, constraints=held, accept_changes=True)
    assert "This run continues from it and starts the constraints and the optimiser afresh" in caplog.text
    assert int(result.state.optim_state[0]) == 21  # the clock of an annealed ELBO goes on
    np.testing.assert_allclose(result.params["mean_auto_loc"], first.params["mean_auto_loc"], rtol=1e-5)
    assert len(result.losses) == 21


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SpeedLimit")
def test_another_speed_limit_is_another_run_and_holds_if_asked_to(tmp_path: Path) -> None:
    def over(steps: int, number: float | None, **options: Any) -> float:
        result = fit(steps, folder=tmp_path, constraints=proxvi.SpeedLimit(over=number), **options)
        return float(result.state.constraints[0].constraint.over)

    assert over(20, 100.0) == 100.0
    with pytest.raises(proxvi.ConfigurationError, match=r"for `over`"):
        over(40, 1_000.0)
    assert over(40, 1_000.0, accept_changes=True) == 1_000.0
    assert over(60, None, accept_changes=True) == 20.0
    assert over(90, None) == 20.0  # a longer run keeps it
    assert over(120, None, accept_changes=True) == 20.0


@pytest.mark.slow
def test_figures_of_ones_own_have_names_of_their_own() -> None:
    for name in ("step", "elbo"):
        measure = proxvi.Reporting(every=10, measure=lambda _, name=name: {name: 1.0})
        with pytest.raises(ValueError, match=f"`measure` must name its figures by words .*, got '{name}'"):
            proxvi.fit(faults.make_svi(), KEY, 10, ROWS, batch_size=100, reporting=measure)


@pytest.mark.slow
def test_parameters_must_fit_even_if_changes_are_accepted(tmp_path: Path) -> None:
    fit(20, folder=tmp_path)
    with pytest.raises(proxvi.ConfigurationError, match=r"has 'float32\[50\]' for .*auto_loc.*, this run None"):
        fit(40, folder=tmp_path, model=lambda x: other_model(x), accept_changes=True)


def other_model(x: Any) -> None:
    import numpyro
    import numpyro.distributions as dist

    mean = numpyro.sample("other", dist.Normal(0.0, 10.0))
    numpyro.sample("x", dist.Normal(mean, 1.0).expand([50]).to_event(1), obs=x)


@pytest.mark.slow
def test_after_too_many_bad_steps_a_lower_rate_goes_on_from_the_good_ones(tmp_path: Path) -> None:
    bad = [(ROWS[:100], np.asarray(t >= 30)) for t in range(80)]
    with pytest.raises(FloatingPointError, match="at step 30"):
        fit(80, bad, folder=tmp_path)
    assert checkpoints_in(tmp_path)[-1] <= 30
    good = [(ROWS[:100], np.asarray(False)) for _ in range(80)]
    result = fit(80, good, folder=tmp_path, optimizer=optax.adam(0.01), accept_changes=True)
    assert np.all(np.isfinite(result.losses))


@pytest.mark.slow
def test_a_stream_that_yields_something_else_is_refused(tmp_path: Path) -> None:
    batches = [ROWS[i : i + 10] for i in range(0, 1_000, 10)]
    fit(30, batches, folder=tmp_path)
    with pytest.raises(proxvi.ConfigurationError, match=r"`data` must yield the batches that it yielded before"):
        fit(40, [batches[0], *(batch + 100 for batch in batches[1:])], folder=tmp_path)
    assert len(fit(40, batches, folder=tmp_path).losses) == 40


@pytest.mark.slow
def test_a_stream_with_a_state_that_yields_something_else_is_refused(tmp_path: Path) -> None:
    grain = pytest.importorskip("grain")

    def stream(rows: np.ndarray) -> Any:
        return grain.MapDataset.source(list(rows)).repeat().batch(10).to_iter_dataset()

    fit(30, stream(ROWS), folder=tmp_path)
    others = ROWS.copy()
    others[10:] += 100  # the first batch is the same
    with pytest.raises(proxvi.ConfigurationError, match=r"`data` must yield the batches that it yielded before"):
        fit(40, stream(others), folder=tmp_path)
    assert faults.bits(fit(40, stream(ROWS), folder=tmp_path)) == faults.bits(fit(40, stream(ROWS)))


# Exceptions and signals


@pytest.mark.slow
@pytest.mark.parametrize("where", ["callback", "measure"])
def test_an_exception_of_the_user_is_raised_after_the_run_was_saved(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise CrashError("the tracker is down")

    with pytest.raises(CrashError, match="the tracker is down"):
        fit(
            folder=tmp_path,
            callback=fail if where == "callback" else None,
            measure=fail if where == "measure" else None,
        )
    assert checkpoints_in(tmp_path)[-1] == 10
    assert "CrashError('the tracker is down') ended the run: saved step 10 to" in caplog.text
    assert faults.bits(fit(folder=tmp_path)) == faults.bits(fit())


@pytest.mark.slow
def test_a_stream_that_fails_is_saved_too(tmp_path: Path) -> None:
    class Lost:
        def __iter__(self) -> Any:
            yield from [ROWS[:10]] * 5
            raise OSError("lost the disk")

    with pytest.raises(OSError, match="lost the disk"):
        fit(20, Lost(), folder=tmp_path)
    assert checkpoints_in(tmp_path)
    assert len(fit(20, [ROWS[:10]] * 5, folder=tmp_path).losses) == 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_signals_save_and_exit_with_their_own_status(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    number = signal.Signals[name]

    def send(step: int, _: dict[str, Any]) -> None:
        if step == 10:
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt if name == "SIGINT" else SystemExit) as ended:
        fit(folder=tmp_path, callback=send)
    if name != "SIGINT":
        assert ended.value.code == 128 + number  # pyright: ignore[reportAttributeAccessIssue]
    assert f"received {name}: saved step 10 of 20" in caplog.text


@pytest.mark.slow
def test_an_exception_that_follows_a_signal_is_saved_too(tmp_path: Path) -> None:
    """A signal to all processes of a group ends the workers of a data loader, and then the loader raises."""

    def lose_the_loader(step: int, _: dict[str, Any]) -> None:
        if step == 10:
            signal.raise_signal(signal.SIGTERM)
            raise CrashError("a worker was killed")

    with pytest.raises(CrashError, match="a worker was killed"):
        fit(folder=tmp_path, callback=lose_the_loader)
    assert checkpoints_in(tmp_path)[-1] == 10


@pytest.mark.slow
def test_a_second_signal_ends_the_run_without_killing_the_process(tmp_path: Path) -> None:
    def send_two(step: int, _: dict[str, Any]) -> None:
        if step == 10:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        fit(folder=tmp_path, callback=send_two)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def crash_at_step_10(folder: Path) -> None:
    def crash(step: int, _: dict[str, Any]) -> None:
        if step == 10:
            raise CrashError

    with pytest.raises(CrashError):
        fit(folder=folder, callback=crash)


@pytest.mark.parametrize(("name", "number"), [("_new_checkpointer", 2), ("load", 2), ("load", 15)])
def test_a_signal_while_checkpoints_are_read_ends_the_run_and_sets_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    crash_at_step_10(tmp_path)
    read = getattr(OrbaxStore, name)

    def interrupted(self: OrbaxStore, *arguments: Any) -> Any:
        try:
            os.kill(os.getpid(), number)
            return read(self, *arguments)
        except (KeyboardInterrupt, SystemExit):  # Orbax does so, in about half of its moments
            raise LookupError("incompatible handler") from None

    # A shell's `&` has Ctrl-C ignored; the entry point of a container may have a handler of SIGTERM that raises.
    raises = signal.default_int_handler if number == signal.SIGINT else lambda *_: sys.exit(143)
    before = signal.signal(number, raises)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(OrbaxStore, name, interrupted)
            with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as ended:
                fit(folder=tmp_path)
    finally:
        signal.signal(number, before)
    assert checkpoints_in(tmp_path)[-1] == 10
    assert not list(tmp_path.glob("*damaged*"))
    # The folder is free, although a notebook keeps the last traceback, and with it all that the run had open.
    assert faults.bits(fit(folder=tmp_path)) == faults.bits(fit())
    assert ended.tb is not None


def test_a_checkpoint_is_set_aside_only_if_it_cannot_be_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_at_step_10(tmp_path)
    load, failed = OrbaxStore.load, []

    def hiccup(self: OrbaxStore, step: int, like: Any) -> Any:
        if not failed:
            failed.append(step)
            raise OSError("stale file handle")
        return load(self, step, like)

    monkeypatch.setattr(OrbaxStore, "load", hiccup)
    fit(folder=tmp_path)
    assert failed == [10]
    assert not list(tmp_path.glob("*damaged*"))


@pytest.mark.slow
def test_in_a_thread_an_exception_of_the_callback_saves_and_stops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop, caught = threading.Event(), []

    def callback(*_: Any) -> None:
        if stop.is_set():
            raise SystemExit
        stop.set()  # what a handler of signals in the main thread would do

    def run() -> None:
        try:
            with jax.numpy_rank_promotion("allow"):
                fit(1_000_000, folder=tmp_path, callback=callback)
        except SystemExit as error:
            caught.append(error)

    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(120)
    assert caught
    assert "outside of the main thread" in caplog.text
    assert checkpoints_in(tmp_path)[-1] == 20


# Arguments


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ({"batch_size": 0}, ROWS, "`batch_size` must be an integer of at least 1, got 0"),
        ({"batch_size": 1_001}, ROWS, "`batch_size` must be at most the 1000 rows of the data, got 1001"),
        ({}, ROWS[:0], r"`data` must have at least one row, got shape \(0, 50\)"),
        ({"batch_size": 1}, ROWS[:0], "`data` must have at least one row"),
        ({}, [], "`data` ended after 0 batches"),
    ],
)
def test_arguments_are_refused_by_name(options: dict[str, Any], data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        proxvi.fit(faults.make_svi(), KEY, 10, data, **options)


@pytest.mark.slow
def test_a_batch_that_is_a_list_is_several_arguments() -> None:
    as_lists = [[ROWS[:10], np.asarray(False)] for _ in range(5)]
    as_tuples = [(ROWS[:10], np.asarray(False)) for _ in range(5)]
    assert faults.bits(fit(20, as_lists)) == faults.bits(fit(20, as_tuples))


@pytest.mark.slow
def test_scalars_go_to_all_devices() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    bad = np.asarray(False)
    whole = proxvi.fit(faults.make_svi(), KEY, 10, ROWS, bad)
    np.testing.assert_allclose(
        proxvi.fit(faults.make_svi(), KEY, 10, ROWS, bad, mesh=mesh).losses, whole.losses, rtol=1e-5
    )
    held_out = proxvi.Validation(*jax.device_put((ROWS, bad), jax.devices()[0]))  # there alone
    proxvi.fit(faults.make_svi(), KEY, 10, ROWS, bad, mesh=mesh, validation=held_out)
    stream = [(ROWS, bad)] * 3
    np.testing.assert_allclose(
        proxvi.fit(faults.make_svi(), KEY, 10, stream, mesh=mesh).losses, whole.losses, rtol=1e-5
    )
    with pytest.raises(ValueError, match=r"`data` must be a multiple of the 8 devices .* got 999 rows"):
        proxvi.fit(faults.make_svi(), KEY, 10, ROWS[:999], mesh=mesh)
    with pytest.raises(ValueError, match=r"`data` must be a multiple of the 8 devices .* got 10 rows"):
        proxvi.fit(faults.make_svi(), KEY, 10, [ROWS[:10]], mesh=mesh)


# What a review found


@pytest.mark.slow
def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    def send(step: int, _: dict[str, Any]) -> None:
        if step == 10:
            signal.raise_signal(signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        assert len(fit(folder=tmp_path, callback=send).losses) == 20
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_save_whose_first_attempt_was_complete_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = OrbaxStore(tmp_path, keep=2)
    save, calls = type(store._orbax).save, iter([True])

    def fail_after(*args: Any, **options: Any) -> bool:
        save(*args, **options)
        if next(calls, False):
            raise OSError("an old checkpoint could not be removed")
        return True

    monkeypatch.setattr(type(store._orbax), "save", fail_after)
    assert store.save(10, {"x": np.ones(3)}, {"note": 1})
    assert store.steps() == [10]
    store.close()


@pytest.mark.parametrize("every", [False, True], ids=["the newest", "all"])
def test_a_checkpoint_whose_metadata_orbax_cannot_read_is_set_aside(tmp_path: Path, every: bool) -> None:
    """One bit of a key of Orbax's own: it then fails to open the folder, with the intact checkpoints in it."""
    tmp_path /= "barrier"  # a word that Orbax's errors have, where processes wait for each other
    before = fit(20, folder=tmp_path)
    steps = checkpoints_in(tmp_path)
    assert len(steps) > 1
    for step in steps if every else steps[-1:]:
        path = tmp_path / str(step) / "_CHECKPOINT_METADATA"
        path.write_text(path.read_text().replace("commit_timestamp", "commit_uimestamp"))
    (tmp_path / "notes").mkdir()  # something else in the folder
    if every:  # the cause may be another version of Orbax
        with pytest.raises(
            RuntimeError, match=r"checkpoints that Orbax can read, .* \(Provided metadata contains unknown"
        ) as refused:
            fit(20, folder=tmp_path)
        assert checkpoints_in(tmp_path) == steps
        lock_folder(tmp_path).close()  # the folder is free, although the traceback is kept
        assert refused.tb is not None
        return
    with pytest.warns(UserWarning, match=r"is damaged \(Provided .*\)\. It is renamed to \d+\.damaged"):
        after = fit(20, folder=tmp_path)
    assert (tmp_path / f"{steps[-1]}.damaged").exists()
    np.testing.assert_array_equal(before.losses, after.losses)


def test_a_folder_that_opens_at_the_second_attempt_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_at_step_10(tmp_path)
    steps, attempts, new = checkpoints_in(tmp_path), [], OrbaxStore._new_checkpointer

    def hiccup(self: OrbaxStore) -> Any:
        attempts.append(1)
        if len(attempts) == 1:
            raise LookupError
        return new(self)

    monkeypatch.setattr(OrbaxStore, "_new_checkpointer", hiccup)
    store = OrbaxStore(tmp_path, keep=3)
    assert len(attempts) == 2
    assert store.steps() == steps
    assert not store.damaged()
    store.close()


@pytest.mark.slow
def test_a_stream_of_other_data_goes_on_if_changes_are_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [ROWS[i : i + 10] for i in range(0, 1_000, 10)]
    fit(30, batches, folder=tmp_path)
    others = [batches[0], *(batch + 1 for batch in batches[1:])]
    assert len(fit(40, others, folder=tmp_path, accept_changes=True).losses) == 40
    assert "`data` yields other batches than before" in caplog.text


@pytest.mark.slow
def test_a_metrics_file_that_cannot_be_written_does_not_keep_the_run_from_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("proxvi.training._progress.MetricsLog.report", full)
    with pytest.raises(OSError, match="No space left"):
        fit(folder=tmp_path, metrics_file=tmp_path / "metrics.jsonl")
    assert checkpoints_in(tmp_path)[-1] == 10
    assert "ended the run: saved step 10" in caplog.text


def test_a_first_line_that_was_cut_off_is_still_ours(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 10, "elb')
    fit(metrics_file=file)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [10, 20]


def test_data_may_have_no_columns() -> None:
    check_arrays((ROWS, np.zeros((1_000, 0))), 10)


@pytest.mark.slow
def test_another_rate_in_the_state_of_the_optimiser_is_another_run(tmp_path: Path) -> None:
    fit(folder=tmp_path, optimizer=optax.inject_hyperparams(optax.adam)(learning_rate=0.05))
    with pytest.raises(proxvi.ConfigurationError, match="for `start`"):
        fit(40, folder=tmp_path, optimizer=optax.inject_hyperparams(optax.adam)(learning_rate=0.5))
