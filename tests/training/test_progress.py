"""How far a run is, and the progress bar."""

import logging
from pathlib import Path

import numpy as np
import pytest

from proxvi.training._progress import Progress

from . import faults
from .common import CrashError, crash_at

# Many runs here are too short to let go of the constraint.
pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")


def test_any_finite_validation_elbo_is_better_than_nan() -> None:
    progress = Progress(np.empty(0))
    for elbo in (float("nan"), -5.0, -4.0, -3.0):
        progress.validate(elbo, held=False)
    assert (progress.best, progress.waited) == (-3.0, 0)


@pytest.mark.slow
def test_progress_bar_shows_elbo_magnitude_and_distance(capsys: pytest.CaptureFixture[str]) -> None:
    faults.run(None, progress=True)
    shown = capsys.readouterr().err
    assert "3000/3000" in shown
    assert all(f"{name} " in shown for name in ("elbo", "magnitude", "distance"))
    faults.run(None, progress=None)  # not on a terminal
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_resumed_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for step, progress in ((1_000, False), (2_000, None)):  # None: no bar, for this is no terminal
        with pytest.raises(CrashError):
            faults.run(tmp_path, callback=crash_at(step))
        capsys.readouterr()
        with caplog.at_level(logging.INFO, "proxvi"), pytest.raises(CrashError):
            faults.run(tmp_path, progress=progress, callback=crash_at(step + 500))
        said = caplog.text if progress is False else capsys.readouterr().err
        assert f"resumed at step {step} of 3000 from {tmp_path}" in said
