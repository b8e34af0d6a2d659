"""Bad inputs are refused by errors that name the argument."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_hundred_bad_inputs_are_refused_by_name() -> None:
    script = Path(__file__).with_name("bad_inputs.py")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2_000:]
    assert int(ended.stdout.split()[0]) >= 100
