"""Figure 1 at a small size, the command line, and the tables in the pages."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from proxvi_paper import cli
from proxvi_paper.experiments import figure_1, results
from proxvi_paper.experiments.sweeps import Options
from proxvi_paper.experiments.trials import finished

ROOT = Path(__file__).parents[2]


def proxvi(*arguments: str) -> str:
    """What the command prints."""
    command = Path(sys.executable).with_name("proxvi")
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_figure_1_by_the_command(tmp_path: Path) -> None:
    """One data set, six starts, half the steps: VI is trapped at every start, and entropy PVI at none."""
    sizes = ("--data-sets", "1", "--starts", "6", "--steps", "5000")
    folder = tmp_path / "figure-1"
    arguments = ("reproduce", "figure-1", "--results", str(tmp_path), "--runs", str(tmp_path / "runs"), *sizes)
    printed = proxvi(*arguments)
    rows = dict(re.findall(r"^\| ([A-Z].*?|annealing|coordinate ascent) \| 6 \| (.*) \|$", printed, re.MULTILINE))
    assert set(rows) == set(figure_1.METHODS)
    free = {name: row.split(" | ")[1] for name, row in rows.items()}
    assert free["VI"] == free["coordinate ascent"] == "0.0%"
    assert free["PVI, entropy"] == free["PVI, entropy, statistic average"] == "100.0%"
    assert free["PVI, KL distance"] == free["PVI, KL distance, coordinate ascent"] == "100.0%"
    assert "a mean is stranded" in printed
    assert (folder / "figure-1.png").stat().st_size > 20_000
    files = sorted(folder.glob("*.json"))
    assert len(files) == len(figure_1.METHODS)
    record = json.loads(files[0].read_text())
    assert record["command"] == "proxvi " + " ".join(arguments)
    assert {"jax", "python", "numpyro"} <= record["versions"].keys()
    before = {path: path.stat().st_mtime_ns for path in files}
    assert proxvi(*arguments) == printed  # from the files
    assert {path: path.stat().st_mtime_ns for path in files} == before


def test_the_help_and_the_version_start_without_jax() -> None:
    assert "figure-1-settings" in proxvi("reproduce", "--help")
    assert re.fullmatch(r"proxvi-paper \d.*, proxvi \d.*\n", proxvi("--version"))
    imports = "import sys, proxvi_paper.cli; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", imports], text=True) == "False\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reproduce", "tabel-1"], "must be one of figure-1, .*, got tabel-1. Did you mean table-1?"),
        (["reproduce"], "is missing; it comes first, and is one of figure-1, "),
        (["reproduce", "table-1", "--methods", "vi"], "got 'vi'; did you mean 'VI'?"),
        (["reproduce", "table-1", "--starts", "xyz"], "got 'xyz'; mind the case."),
    ],
)
def test_a_wrong_word_is_answered_with_the_choices(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["proxvi", *words])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    printed = " ".join(re.sub(r"[│╭╰─╮╯]", " ", capsys.readouterr().err).split())
    assert re.search(message.replace("?", r"\?"), printed), printed


@pytest.mark.slow
def test_the_study_of_the_settings_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure_1, "STUDY", {"gamma": (1e-5, 1e-10), "steps": (1_000, 10_000)})
    monkeypatch.setattr(figure_1, "STUDIED", ("VI", "PVI, entropy"))
    options = Options(tmp_path, tmp_path / "runs")
    options.run("settings", figure_1.SettingsGrid(data_sets=1, starts=2, scale=0.01).trials())
    printed = figure_1.report_settings(tmp_path / "settings")
    assert printed.startswith("| setting | value | VI | PVI, entropy |")
    assert "\n| steps | 10 | " in printed  # what was run
    assert printed.count("\n| ") == 4 + 1 + 1 + len(figure_1.VARIANTS)
    assert (tmp_path / "settings" / "settings.png").stat().st_size > 10_000
    options.run("settings", [figure_1.Trial("VI", 1, 3, 10, seed=100)])
    assert printed + "\n\n1 result files of other" in figure_1.report_settings(tmp_path / "settings")
    for grid in (figure_1.Grid, figure_1.SettingsGrid):
        with pytest.raises(ValueError, match="`starts` must not be a multiple of 8, got 16; 17 has no start on the"):
            grid(starts=16).trials()


def test_our_result_files_are_found_by_their_trials() -> None:
    """So their names and settings are still those of the code: figure 1 is not run again."""
    for name in ("figure-1", "figure-1-settings", "logistic-regression"):
        trials = cli.EXPERIMENTS[name].grid().trials()
        assert all(finished(trial, ROOT / "paper" / "results" / name) for trial in trials)
    some = cli.EXPERIMENTS["table-1"].grid(scale=0.25).trials()
    assert all(finished(trial, ROOT / "paper" / "results" / "table-1") for trial in some)


@pytest.mark.slow
def test_all_results_are_printed_and_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """As in `proxvi results | head`."""
    assert proxvi("results", "--results", str(tmp_path)).count("no result files in") == len(cli.EXPERIMENTS)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "proxvi_paper.cli", "results", "--results", str(tmp_path)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("paper/*.md"), *(ROOT / "docs").rglob("*.md")]
COMMAND = r"\b(proxvi (?:reproduce|results)[^`\n#]*)"
COMMANDS = sorted({command.strip() for page in PAGES for command in re.findall(COMMAND, page.read_text())})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_in_the_pages_exist_with_their_options(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, name, *rest = shlex.split(command)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", [program, name, *(word for word in rest[:1] if word[0] != "-"), "--help"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    known = capsys.readouterr().out
    for option in rest:
        if option.startswith("--"):
            assert re.search(rf"{option}\b", known), f"{option} is no option of {program} {name}"


def test_tables_in_the_text_are_those_of_the_result_files() -> None:
    tables = {line for path in ROOT.glob("paper/results/*/table.md") for line in path.read_text().splitlines()}
    found = 0
    for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        ours = False  # whether the table has the heading of one that the experiments write
        for line in path.read_text().splitlines():
            is_heading = line in tables and not set(line) <= set("|- ")
            ours = line.startswith("|") and (ours or is_heading)
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
    settings = asdict(figure_1.Trial("VI"))
    assert results.read(path, settings) is None
    results.save(path, settings, {"elbos": np.array([[1.0, -2.25]])}, seconds=1.0, command="a test")
    assert results.read(path, settings) == {"elbos": [[1.0, -2.25]]}
    assert results.read(path, settings | {"steps": 1}) is None
    assert list(tmp_path.iterdir()) == [path]
