"""Signals: killed or asked to stop at any moment, a run loses nothing that it has acknowledged."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from . import faults

# Many runs here are too short to let go of the constraint.
pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.nightly)])
def test_nothing_is_lost_by_kill(tmp_path: Path, times: int) -> None:
    faults.kill(tmp_path, times)


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
def test_sigterm_at_any_moment_saves_and_exits(tmp_path: Path) -> None:
    faults.kill(tmp_path, times=5, number=signal.SIGTERM)


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
def test_slow_runs_survive_a_fault_every_few_seconds(tmp_path: Path) -> None:
    faults.soak(tmp_path, times=8, minute=10.0, batch_seconds=0.01)


@pytest.mark.slow
def test_sigterm_saves_and_exits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def terminate(step: int, _: dict[str, Any]) -> None:
        if step == 1_000:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        faults.run(tmp_path, checkpoint_every=300.0, callback=terminate)
    assert ended.value.code == 128 + signal.SIGTERM
    assert "received SIGTERM: saved step 1000 of 3000" in caplog.text
    assert faults.bits(faults.run(tmp_path)) == faults.bits(faults.run(None))


def test_the_documentation_has_the_figures_of_the_result_file() -> None:
    root = Path(__file__).parents[2]
    figures = json.loads((root / "results" / "faults.json").read_text())
    page = (root / "docs" / "long-runs.md").read_text()
    assert page.split("<!-- table: faults -->")[1].split("<!-- end -->")[0].strip() == faults.table(figures)
