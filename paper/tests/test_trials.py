"""Trials of tables 1 and 2 at a small size: interrupted, run twice, on a real cluster whose workers are killed."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from importlib import metadata
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import distributed
import jax
import numpy as np
import pytest

from proxvi_paper.experiments import autoencoders, belief_networks, digit_trials, results, sweeps, trials
from proxvi_paper.experiments.belief_networks import OneLayer, Trial

SMALL: dict[str, Any] = {"method": "PVI, entropy", "units": (5,), "samples": 30, "digits": 20}
ONE = Trial(start="bad", steps=1_000, **SMALL)
EIGHT = [Trial(start="good", steps=6_000, seed=seed, **SMALL) for seed in range(8)]
ENVIRONMENT = {  # of worker processes: one core, and what one has compiled the others need not
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "NPROC": "1",
    "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_cpu_multi_thread_eigen=false",
}


# With the other tests that start processes of their own, on one worker: they would starve each other.
pytestmark = [pytest.mark.usefixtures("digits"), pytest.mark.xdist_group("processes")]


def save(trial: Trial, folder: Path, figures: dict[str, Any]) -> Path:
    path = folder / trial.file_name
    results.save(path, asdict(trial), figures, seconds=1.0, command="a test")
    return path


def figures_in(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text())["figures"] for path in sorted(folder.glob("*.json"))}


@pytest.mark.slow
def test_a_trial_is_run_once_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trials.run(ONE, tmp_path / "a", tmp_path / "a")
    assert whole["elbo"] <= whole["log_likelihood"] < 0
    assert {len(curve) for curve in whole["curves"].values()} == {2}
    assert whole["curves"]["step"][-1] == ONE.steps
    assert {"entropy", "magnitude", "validation_elbo"} <= whole["curves"].keys()
    images = digit_trials.decode(whole["samples"])
    assert images.shape == (20, 784)
    assert images.min() >= 0
    assert images.max() <= 1

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("proxvi.evaluate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trials.run(ONE, tmp_path / "b", tmp_path / "b")
    assert trials.finished(ONE, tmp_path / "b") is None
    assert trials.run(ONE, tmp_path / "b", tmp_path / "b") == whole
    with monkeypatch.context() as patch:
        patch.setattr("proxvi.fit", interrupt)
        assert trials.run(ONE, tmp_path / "b", tmp_path / "b") == whole  # from the file

    curves = tmp_path / "b" / ONE.name / "metrics.jsonl"
    curves.write_text("".join(curves.read_text().splitlines(keepends=True)[-1:]))
    (tmp_path / "b" / ONE.file_name).unlink()
    with pytest.raises(OSError, match=r"got [01] of 2 reports in .*metrics\.jsonl; put the file back"):
        trials.run(ONE, tmp_path / "b", tmp_path / "b")


def test_of_two_processes_that_run_one_trial_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another open file, as here, is to a lock what another process is; only one that excludes all waits for this."""
    monkeypatch.setattr(digit_trials, "train", lambda *_, **__: pytest.fail("the other one has done it"))
    (tmp_path / ONE.name).mkdir()
    with ThreadPoolExecutor(1) as pool, (tmp_path / ONE.name / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        waiting = pool.submit(trials.run, ONE, tmp_path, tmp_path)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=1.0)
        save(ONE, tmp_path, {"elbo": -1.0})
        fcntl.flock(other, fcntl.LOCK_UN)
        assert waiting.result(timeout=60.0) == {"elbo": -1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [signal.SIGINT, *(pytest.param(how, marks=pytest.mark.nightly) for how in (signal.SIGTERM, signal.SIGKILL))]
)
def test_a_command_that_is_stopped_leaves_checkpoints_and_no_workers(how: int, tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("proxvi"), "reproduce", "table-1", "--scale", "0.05", "--workers", "2"]
    running = subprocess.Popen(
        command,
        cwd=tmp_path,
        start_new_session=True,
        stderr=(tmp_path / "said").open("w"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # as a terminal has it
    )
    try:
        begun = "runs/table-1/*/metrics.jsonl"
        wait_for(lambda: running.poll() is not None or len(list(tmp_path.glob(begun))) == 2, "two workers in training")
        assert running.poll() is None
        time.sleep(2)
        if how == signal.SIGINT:
            os.killpg(running.pid, how)  # a terminal tells all of them
        else:
            running.send_signal(how)
        ended = running.wait(120)
        assert ended != 0
        wait_for(lambda: not alive(running.pid), "the end of the workers")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    if how == signal.SIGINT:
        assert ended == 130
        said = (tmp_path / "said").read_text()
        assert "10 trials; results go to results/table-1, checkpoints to runs/table-1." in said
        assert "the same command goes on from there" in said
        assert "Traceback" not in said
    if how != signal.SIGKILL:
        saved = [path.name for path in tmp_path.glob("runs/table-1/*/checkpoints/*") if path.name != ".lock"]
        assert len(saved) == 2
        assert all(name.isdigit() for name in saved)  # whole ones


def alive(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def threads_that_compute() -> int:
    jax.numpy.ones(3).sum().block_until_ready()
    return sum(task.joinpath("comm").read_text() == "tf_XLAEigen\n" for task in Path("/proc/self/task").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_worker_computes_on_one_thread() -> None:
    with sweeps.OneCoreEach(1) as executor:
        assert executor.submit(threads_that_compute).result() == 1


@pytest.mark.slow
def test_a_sweep_names_what_did_not_finish(tmp_path: Path) -> None:
    class Broken:
        def submit(self, function: Any, trial: Trial, *args: Any, **options: Any) -> Future[Any]:
            future: Future[Any] = Future()
            if trial.seed:
                future.set_exception(MemoryError("no room"))
            else:
                future.set_result(function(trial, *args, **options))
            return future

    two = [ONE, replace(ONE, seed=1)]
    with pytest.raises(RuntimeError, match=rf"1 of 2 trials did not finish \({two[1].name}: MemoryError: no room\)"):
        sweeps.sweep(two, tmp_path, tmp_path, Broken())
    assert trials.finished(ONE, tmp_path) is not None


def train_until_stopped(started: Path) -> None:
    """As `fit`: it notes the signals that come while it saves, and exits."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    started.touch()
    while not received:
        time.sleep(0.05)
    time.sleep(2.0)
    signal.signal(signal.SIGTERM, before)
    sys.exit(128 + signal.SIGTERM)


def be_killed(started: Path) -> None:
    while not started.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_pool_ends_where_one_worker_is_killed_and_another_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "SECONDS_TO_SAVE", 5.0)

    def run_both() -> None:
        with sweeps.Options(workers=2)._executor(False) as pool:
            jobs = [pool.submit(job, tmp_path / "started") for job in (train_until_stopped, be_killed)]
            jobs[1].result(timeout=60)

    with pytest.raises(BrokenExecutor):
        run_both()
    for worker in active_children():
        worker.join(60)
        assert not worker.is_alive()


@pytest.mark.slow
def test_a_killed_local_worker_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    two = [ONE, replace(ONE, seed=1)]
    options = sweeps.Options(tmp_path / "results", tmp_path / "runs", checkpoint_every=0.0, workers=1)
    file = tmp_path / "runs" / "x" / ONE.name / "metrics.jsonl"

    def kill_one() -> None:
        while not file.exists():
            time.sleep(0.05)
        for worker in active_children():
            worker.kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    found = options.run("x", two)
    killer.join()
    assert found.keys() == set(two)
    assert "a worker was killed; new ones go on from the checkpoints" in capfd.readouterr().err


@pytest.mark.parametrize("content", [b"", b"[]", b'{"protocol": 1}', b"\xff\xfe"])
def test_a_result_file_that_was_cut_off_is_ignored_with_a_warning(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ONE.file_name).write_bytes(content)
    with pytest.warns(UserWarning, match="is no result file and is ignored; remove it, or run its trial again"):
        assert trials.finished(ONE, tmp_path) is None


def test_the_options_are_checked_before_hours_of_training() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"digits": 20_000}, r"`digits` must be at most 10,000.*got 20000"),
        ({"digits": -5}, r"`digits` must be an integer of at least 1, got -5"),
        ({"samples": 1}, r"`samples` must be an integer of at least 2, got 1"),
        ({"methods": ("vi",)}, r"`methods` must be of \['VI'.*got 'vi'; did you mean 'VI'"),
        ({"starts": ("worse",)}, r"`starts` must be of"),
        ({"scale": 0.0}, r"`scale` must be a finite number above 0, got 0"),
        # Optax would make of these a schedule that never lets go, or one of NaN.
        *(
            ({"gammas": (gamma,)}, r"`gammas` must be a finite number above 0 and below 1, got")
            for gamma in (0.0, -1.0, 10.0, float("nan"))
        ),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            OneLayer(**options)
    with pytest.raises(ValueError, match=r"`workers` must be an integer of at least 1, got 0"):
        sweeps.Options(workers=0)
    with pytest.raises(ValueError, match=r"`workers` must be left out with `dask`, got 2"):
        sweeps.Options(dask="tcp://scheduler:8786", workers=2)


def test_a_grid_has_all_combinations_and_what_has_no_decay_once() -> None:
    both = OneLayer(gammas=(1e-5, 1e-10), methods=("VI", "annealing", "PVI, speed limit"), starts=("bad",)).trials()
    assert [(trial.method, trial.gamma) for trial in both] == [
        ("VI", 1e-10),
        ("annealing", 1e-5),
        ("PVI, speed limit", 1e-10),
        ("annealing", 1e-10),
    ]


@pytest.mark.parametrize("kind", [belief_networks.Trial, autoencoders.Trial])
def test_file_names_depend_on_all_settings(kind: type[digit_trials.DigitTrial]) -> None:
    settings = {field.name for field in fields(kind)}
    assert set(kind.training_settings) == settings - {"samples", "digits"}


def figures_of(elbo: float, khat_above: float, **curves: Any) -> dict[str, Any]:
    flat = {name: [1.0, 2.0] for name in digit_trials.CURVES}
    found = {"elbo": elbo, "log_likelihood": elbo + 10, "khat_above": khat_above}
    return found | {"curves": curves or flat, "samples": [digit_trials.encode(np.zeros(784))]}


@pytest.mark.slow
def test_the_report_puts_seeds_together_and_the_paper_beside(tmp_path: Path) -> None:
    trial = Trial(method="PVI, entropy", start="bad")
    save(trial, tmp_path, figures_of(-120.0, 0.2))
    save(replace(trial, seed=1), tmp_path, figures_of(-122.0, 0.2))
    printed = belief_networks.report(tmp_path)
    full = "| PVI, entropy | −121.0 ± 1.4 / −111.0 ± 1.4 (2 seeds) | −118.0 / −110.0 | missing | −114.1 / −107.5 |"
    assert "γ 1e-10, 10,000 digits, 5,000 samples. At the paper's size, 4,000,000 steps:" in printed
    assert full in printed
    assert "| annealing | missing | −119.4 / −110.2 | missing | −116.5 / −108.7 |" in printed
    assert "Shorter runs" not in printed
    assert (tmp_path / "table.md").read_text() == printed + "\n"
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "samples.png").stat().st_size > 1_000
    assert not (tmp_path / "curves-shorter.png").exists()
    # Shorter runs have a table of their own. Other settings are not averaged with the seeds; the row names them.
    path = save(replace(trial, steps=400_000), tmp_path, figures_of(-200.0, 0.9))
    save(replace(trial, start="good", batch_size=2_000), tmp_path, figures_of(-99.0, 0.2))
    at_full_size, shorter = belief_networks.report(tmp_path).split("\n\nShorter runs")
    assert full in at_full_size
    assert "| PVI, entropy (batch_size 2,000) | missing | −118.0 / −110.0 | −99.0 / −89.0 | −114.1" in at_full_size
    assert "−200.0" not in at_full_size
    assert "| PVI, entropy (scale 0.1) | −200.0 / −190.0† | −118.0 / −110.0 |  | −114.1 / −107.5 |" in shorter
    assert (tmp_path / "curves-shorter.png").stat().st_size > 10_000
    # Seeds of another version of proxvi are marked.
    assert "‡" not in shorter
    other = save(replace(trial, steps=400_000, seed=1), tmp_path, figures_of(-202.0, 0.2))
    other.write_text(other.read_text().replace(f'"proxvi": "{metadata.version("proxvi")}"', '"proxvi": "0.0.1"'))
    mixed = belief_networks.report(tmp_path)
    assert "| PVI, entropy (scale 0.1) | −201.0 ± 1.4 / −191.0 ± 1.4† (2 seeds‡) |" in mixed
    assert "‡ Not all seeds are of one version of proxvi" in mixed
    other.unlink()
    # A file of another protocol is no result.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"protocol": 0}))
    assert "Shorter runs" not in belief_networks.report(tmp_path)


@pytest.mark.slow
def test_the_report_tells_what_early_stopping_would_give(tmp_path: Path) -> None:
    """The run is best at report 30 and falls from there; a constraint that still acts makes `fit` wait."""
    reports = np.arange(1, 101.0)
    curves: Any = {"step": 1_000 * reports, "entropy": reports, "validation_elbo": -100.0 - np.abs(reports - 30)}
    save(Trial(method="VI", start="bad"), tmp_path, figures_of(-170.0, 0.2, **curves))
    held = figures_of(-170.0, 0.2, **curves, share=np.where(reports <= 60, 0.5, 0.0))
    save(Trial(method="PVI, entropy", start="bad"), tmp_path, held)
    printed = belief_networks.report(tmp_path)
    assert "| method | start | end | best | at step | at the stop | at step |" in printed
    assert "| VI | bad | −170.0 | −100.0 | 30,000 | −120.0 | 50,000 |" in printed
    assert "| PVI, entropy | bad | −170.0 | −100.0 | 30,000 | −150.0 | 80,000 |" in printed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled"))}
    no_dashboard: dict[str, Any] = {"dashboard_address": None}  # documented, but not in Dask's types
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, env=ENVIRONMENT | cache, **no_dashboard
    ) as running:
        yield running


@pytest.fixture(scope="module", params=[3, pytest.param(8, marks=pytest.mark.nightly)])
def undisturbed(cluster: Any, tmp_path_factory: pytest.TempPathFactory, request: Any) -> dict[str, Any]:
    """What trials come to when they are left alone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with cluster.get_client() as client:
        sweeps.sweep(EIGHT[: request.param], folder, folder / "runs", client.get_executor())
    return figures_in(folder)


def wait_for(condition: Any, what: str) -> Any:
    for _ in range(4_000):
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError(what)


def in_progress(runs: Path) -> list[Path]:
    """Folders of trials that have a checkpoint and are not at their end."""
    found = []
    for path in runs.glob("*/metrics.jsonl"):
        lines = path.read_text().splitlines()
        if any("checkpoint" in line for line in lines) and max(json.loads(line)["step"] for line in lines) < 5_000:
            found.append(path.parent)
    return found


@pytest.mark.nightly
def test_killed_workers_lose_nothing(cluster: Any, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    killed = []
    with cluster.get_client() as client:

        def kill() -> None:
            for _ in range(2):
                busy = wait_for(
                    lambda: {p: w for p, w in holders(tmp_path / "runs").items() if p not in killed}, "work"
                )
                pid, folder = next(iter(busy.items()))
                wait_for(lambda folder=folder: folder in in_progress(tmp_path / "runs"), "a checkpoint")
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

        killer = threading.Thread(target=kill)
        killer.start()
        these = EIGHT[: len(undisturbed)]
        found = sweeps.sweep(these, tmp_path, tmp_path / "runs", client.get_executor(), checkpoint_every=0.3)
        killer.join()
    assert len(set(killed)) == 2
    assert len(found) == len(these)
    assert figures_in(tmp_path) == undisturbed


def holders(runs: Path) -> dict[int, Path]:
    """Processes that hold the lock of a trial, by what the kernel says."""
    inodes = {path.stat().st_ino: path.parent for path in runs.glob("*/lock")}
    held = {}
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and (folder := inodes.get(int(fields[5].split(":")[-1]))):
            held[int(fields[4])] = folder
    return held


THREE = EIGHT[:3]
DRIVER = """
import sys
from pathlib import Path
from distributed import Client
from proxvi_paper.experiments.sweeps import sweep
from test_trials import THREE
if __name__ == "__main__":
    folder = Path(sys.argv[2])
    with Client(sys.argv[1]) as client:
        sweep(THREE, folder, folder / "runs", client.get_executor(), checkpoint_every=0.3)
"""


@pytest.mark.nightly
def test_a_killed_driver_goes_on_where_it_was(cluster: Any, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, cluster.scheduler_address, str(tmp_path)]
    driver = subprocess.Popen(command, cwd=Path(__file__).parent)
    wait_for(lambda: list(tmp_path.glob("*.json")), "the first result")
    driver.kill()
    driver.wait()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert 0 < len(before) < 3
    subprocess.run(command, cwd=Path(__file__).parent, check=True, timeout=300)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert figures_in(tmp_path) == {trial.file_name: undisturbed[trial.file_name] for trial in THREE}
