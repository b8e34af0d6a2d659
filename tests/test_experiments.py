"""The experiments at a small size: they run by the command, and come out as they should."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from proxvi.experiments import figure_1, results


def proxvi(*arguments: str) -> str:
    """What the command prints."""
    command = Path(sys.executable).with_name("proxvi")
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_figure_1_by_the_command(tmp_path: Path) -> None:
    """One data set, six starts, half the steps: VI is trapped at every start, and entropy PVI at none."""
    sizes = ("--data-sets", "1", "--starts", "6", "--steps", "5000")
    arguments = ("reproduce", "figure-1", "--folder", str(tmp_path), *sizes)
    printed = proxvi(*arguments)
    rows = dict(re.findall(r"^\| ([A-Z].*?|annealing|coordinate ascent) \| 6 \| (.*) \|$", printed, re.MULTILINE))
    assert set(rows) == set(figure_1.METHODS)
    free = {name: row.split(" | ")[1] for name, row in rows.items()}
    assert free["VI"] == free["coordinate ascent"] == "0.0%"
    assert free["PVI, entropy"] == free["PVI, entropy, statistic average"] == "100.0%"
    assert free["PVI, KL distance"] == free["PVI, KL distance, coordinate ascent"] == "100.0%"
    assert "a mean is stranded" in printed
    assert (tmp_path / "figure-1.png").stat().st_size > 20_000
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == len(figure_1.METHODS)
    record = json.loads(files[0].read_text())
    assert record["command"] == "proxvi " + " ".join(arguments)
    assert {"jax", "python", "numpyro"} <= record["versions"].keys()
    before = {path: path.stat().st_mtime_ns for path in files}
    assert proxvi(*arguments) == printed  # from the files
    assert {path: path.stat().st_mtime_ns for path in files} == before


def test_the_help_names_the_experiments() -> None:
    assert "reproduce" in proxvi("--help")
    assert "figure-1-settings" in proxvi("reproduce", "--help")
    assert "--data-sets" in proxvi("reproduce", "figure-1", "--help")


def test_the_study_of_the_settings_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure_1, "GRID", {"gamma": (1e-10,), "steps": (1_000, 3_000)})
    monkeypatch.setattr(figure_1, "STUDIED", ("VI", "PVI, entropy"))
    printed = figure_1.reproduce_settings(tmp_path, data_sets=1, starts=2, scale=0.01)
    assert printed.startswith("| setting | value | VI | PVI, entropy |")
    assert "\n| steps | 10 | " in printed  # what was run
    with pytest.raises(ValueError, match="`starts` must not be a multiple of 8, got 16; 17 has no start on the saddle"):
        figure_1.ring(16)
    assert printed.count("\n| ") == 3 + 1 + 1 + len(figure_1.VARIANTS)
    assert (tmp_path / "settings.png").stat().st_size > 10_000


def test_tables_in_the_text_are_those_of_the_result_files() -> None:
    root = Path(__file__).parent.parent
    tables = {line for path in root.glob("results/*/table.md") for line in path.read_text().splitlines()}
    found = 0
    for path in (root / "README.md", *root.glob("docs/*.md")):
        ours = False  # whether the table has the heading of one that the experiments write
        for line in path.read_text().splitlines():
            ours = line.startswith("|") and (ours or line in tables)
            if ours:
                assert line in tables, f"{path.name} has another row than the result files: {line}"
                found += 1
    assert found > 10


def test_starts_are_judged_by_distance_and_elbo() -> None:
    elbos = np.array([[-100.0, -103.0, -101.9, -400.0]])
    means = np.array([[[5.0, 5.9], [4.1, 5.0], [3.0, 5.0], [5.0, 80.0]]])
    judged = figure_1.judge(elbos, means, np.array([-100.0]))
    assert judged == pytest.approx({"near": 0.5, "free": 0.5, "median_gap": 2.45, "worst_gap": 300.0})


def test_a_result_file_is_read_only_for_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    settings = asdict(figure_1.Settings("VI"))
    assert results.read(path, settings) is None
    results.save(path, settings, {"elbos": np.array([[1.0, -2.25]])}, seconds=1.0)
    assert results.read(path, settings) == {"elbos": [[1.0, -2.25]]}
    assert results.read(path, settings | {"steps": 1}) is None
    assert list(tmp_path.iterdir()) == [path]
