"""The examples at smoke size."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_rescue_of_a_mixture() -> None:
    command = [sys.executable, str(EXAMPLES / "rescue.py"), "mixture", "--seeds", "2", "--steps", "20"]
    only = ["--only", "VI", "annealing", "PVI, entropy"]
    printed = subprocess.run([*command, *only], check=True, capture_output=True, text=True).stdout
    assert printed.count(" of 2 |") == 3
