"""Several devices and several processes."""

import json
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import proxvi
from proxvi.training._chunks import ChunkPacer, ChunkRunner

from . import faults
from .common import KEY, ROWS

# Many runs here are too short to let go of the constraint.
pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")


@pytest.mark.slow
def test_eight_devices_give_the_losses_of_one() -> None:
    one = proxvi.fit(faults.make_svi(), KEY, 200, ROWS, batch_size=200)
    mesh = jax.make_mesh((8,), ("data",))
    eight = proxvi.fit(faults.make_svi(), KEY, 200, ROWS, batch_size=200, mesh=mesh)
    np.testing.assert_allclose(eight.losses, one.losses, rtol=1e-5)
    source = ChunkRunner(faults.make_svi(), KEY, (ROWS,), 200, ChunkPacer(10, 10), mesh).source
    feed, _ = source.feed(0, 10)
    (batch,) = jax.jit(source.pick)(feed, 0, 0)
    assert [shard.data.shape[0] for shard in batch.addressable_shards] == 8 * [25]  # each has its part
    with pytest.raises(ValueError, match="`batch_size` must be a multiple of the 8 devices"):
        proxvi.fit(faults.make_svi(), KEY, 200, ROWS, batch_size=100, mesh=mesh)


def two_processes(
    folder: Path, send: signal.Signals | None = None, at: int = 0, disturbance: str = ""
) -> tuple[list[str], list[int]]:
    """What each of them printed and its exit status; with `send`, the second one gets that signal at step `at`."""
    both = faults.start_two(folder, disturbance)
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
    return [faults.bits_printed(text) for text in printed]


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["", "killed"])
def test_two_processes_agree_stop_together_and_survive_the_death_of_one(tmp_path: Path, killed: bool) -> None:
    printed, ended = two_processes(tmp_path / "alone")
    assert ended == [0, 0], printed
    first, alone = bits_printed(printed)
    assert first == alone
    assert len(alone) == 2
    one = proxvi.fit(faults.make_svi(), KEY, 100, ROWS, batch_size=100)
    lines = (tmp_path / "alone-arrays.jsonl").read_text().splitlines()
    elbos = {line["step"]: line["elbo"] for line in map(json.loads, lines) if "elbo" in line}
    np.testing.assert_allclose(elbos[100], -np.mean(one.losses[80:100]), rtol=1e-5)

    printed, ended = two_processes(tmp_path / "disturbed", signal.SIGTERM, at=40)
    assert ended == [128 + signal.SIGTERM] * 2, printed
    assert "another process received a signal: saved step" in printed[0]
    assert "received SIGTERM: saved step" in printed[1]
    if killed:
        (survivor, _), _ = two_processes(tmp_path / "disturbed", signal.SIGKILL, at=160)
        assert "another task died" in survivor or "heartbeat" in survivor
    printed, ended = two_processes(tmp_path / "disturbed")
    assert ended == [0, 0], printed
    assert bits_printed(printed) == [alone, alone]


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
def test_processes_whose_steps_take_long_stop_soon_after_a_signal(tmp_path: Path) -> None:
    both = faults.start_two(tmp_path / "slow", "slow=0.1")
    time.sleep(30.0)  # compiled, and far from a report
    both[1].send_signal(signal.SIGTERM)
    sent = time.monotonic()
    printed = [process.communicate(timeout=60)[0] for process in both]
    assert time.monotonic() - sent < 10.0
    assert [process.returncode for process in both] == [128 + signal.SIGTERM] * 2, printed
    assert "received SIGTERM: saved step" in printed[1]


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
def test_if_one_process_cannot_verify_a_checkpoint_all_take_the_one_before(tmp_path: Path) -> None:
    printed, ended = two_processes(tmp_path / "run")
    assert ended == [0, 0], printed
    _, (_, alone) = bits_printed(printed)
    printed, ended = two_processes(tmp_path / "run", disturbance="unverified")
    assert ended == [0, 0], printed
    assert bits_printed(printed) == [[alone], [alone]]
    assert all("is damaged (its contents do not match its digest)" in text for text in printed)


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
def test_a_process_may_come_late_to_the_first_step(tmp_path: Path) -> None:
    printed, ended = two_processes(tmp_path / "run", disturbance="late=40")  # Gloo waits for 30 seconds
    assert ended == [0, 0], printed
    first, second = bits_printed(printed)
    assert first == second
