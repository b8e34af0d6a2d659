"""The examples at smoke size."""

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_rescue_of_a_mixture(tmp_path: Path) -> None:
    arguments = ("mixture", "--seeds", "2", "--steps", "20", "--results", str(tmp_path))
    methods = ("VI", "annealing", "PVI, entropy")
    printed = run("rescue.py", *arguments, "--only", *methods)
    assert printed.count(" of 2 |") == 3
    saved = json.loads((tmp_path / "mixture-pvi-entropy.json").read_text())
    assert len(saved["elbos"]) == 2
    saved["elbos"] = [-1.0, -1.0]
    (tmp_path / "mixture-pvi-entropy.json").write_text(json.dumps(saved))
    again = run("rescue.py", *arguments, "--only", "PVI, entropy")
    assert "| PVI, entropy | 2 of 2 | -1.000 |" in again  # what is there is not run again


def test_rescue_of_a_network() -> None:
    printed = run("rescue.py", "network", "--seeds", "1", "--steps", "5", "--only", "PVI, entropy")
    assert printed.count(" of 1 |") == 1


def test_long_run_goes_on_where_it_was(tmp_path: Path) -> None:
    run("long_run.py", "--folder", str(tmp_path), "--steps", "500")
    assert "ELBO of a picture" in run("long_run.py", "--folder", str(tmp_path), "--steps", "500")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == {"step": 500, "resumed": True}


def test_sensitivity_report(tmp_path: Path) -> None:
    printed = run("sensitivity.py", "--starts", "4", "--steps", "40", "--picture", str(tmp_path / "starts.png"))
    assert printed.count("of 4 starts end within 2 nats") == 4
    assert (tmp_path / "starts.png").stat().st_size > 20_000
