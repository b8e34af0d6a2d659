"""A race that is killed goes on to the same winner."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "killed_race.py"


def race(folder: Path, seconds: float | None = None) -> str:
    """The last line of a race; of one that is killed `seconds` after its first checkpoint, an empty one."""
    process = subprocess.Popen([sys.executable, SCRIPT, folder], stdout=subprocess.PIPE, text=True)
    if seconds is not None:
        known = set(folder.glob("[0-9]*"))
        while process.poll() is None and set(folder.glob("[0-9]*")) <= known:
            time.sleep(0.01)
        time.sleep(seconds)
        process.kill()
        process.communicate()
        return ""
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return printed.splitlines()[-1]


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
def test_a_race_that_is_killed_ten_times_has_the_same_winner(tmp_path: Path) -> None:
    whole = race(tmp_path / "whole")
    for seconds in np.random.default_rng(0).exponential(0.3, 10):
        race(tmp_path / "killed", float(seconds))
    assert race(tmp_path / "killed") == whole
    assert whole.startswith("start ")
