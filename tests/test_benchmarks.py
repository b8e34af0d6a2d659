"""Records of benchmarks, and their comparison."""

import argparse
import hashlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import compare
import jax
import numpy as np
import numpyro.distributions as dist
import optax
import page
import problems
import pytest
import records
import remedies
import run
from numpyro.infer import SVI

ROOT = Path(__file__).parents[1]
BEFORE = {"plain Adam": (1.0, 1.0), "statistic average": (1.08, 1.107), "starts": (31.0, None)}


def write(path: Path, rows: dict[str, tuple[Any, Any]]) -> str:
    listed = [{"name": name, "ratio": ratio, "flop_ratio": flops} for name, (ratio, flops) in rows.items()]
    path.write_text(json.dumps({"rows": listed}))
    return str(path)


@pytest.fixture
def before(tmp_path: Path) -> str:
    return write(tmp_path / "before.json", BEFORE)


def test_a_record_that_grew_within_the_bound_passes(
    tmp_path: Path, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    after = write(tmp_path / "after.json", BEFORE | {"statistic average": (1.12, 1.107), "more": (9.0, None)})
    assert compare.main([before, after, "--bound", "1.05"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^statistic average +1\.080 +1\.120 +1\.037$", printed, re.M)
    assert re.search(r"^more +9\.000 +new$", printed, re.M)
    assert "0 of 3 rows failed" in printed


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("statistic average", (1.14, 1.107), "slower"),
        ("statistic average", (1.08, 1.2), "more FLOPs"),
        ("statistic average", (1.08, None), "FLOPs gone"),
        ("starts", None, "gone"),
    ],
)
def test_a_row_that_grew_beyond_the_bound_or_is_gone_fails(
    name: str, row: Any, problem: str, tmp_path: Path, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {other: row if other == name else old for other, old in BEFORE.items()}
    after = write(tmp_path / "after.json", {other: kept for other, kept in rows.items() if kept is not None})
    assert compare.main([before, after, "--bound", "1.05"]) == 1
    printed = capsys.readouterr().out
    assert re.search(rf"^{name} .*\b{problem}$", printed, re.M)
    assert "1 of 3 rows failed" in printed
    if problem == "slower":
        assert compare.main([before, after, "--bound", "1.06"]) == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"rows": []}',
        '{"rows": {}}',
        '{"rows": [3]}',
        '{"rows": [{"name": "a"}]}',
        '{"rows": [{"name": "a", "ratio": "1"}]}',
        '{"rows": [{"name": "a", "ratio": NaN}]}',  # which no bound is exceeded by
        '{"rows": [{"name": "a", "ratio": null}]}',
        '{"rows": [{"name": "a", "ratio": 1}, {"name": "a", "ratio": 2}]}',
        '{"rows": [{"name": ["a"], "ratio": 1}]}',
        "\xff",
        None,
    ],
)
def test_a_file_that_is_no_record_gives_an_error_of_one_line(
    content: str | None, tmp_path: Path, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    after = tmp_path / "after.json"
    if content is not None:
        after.write_bytes(content.encode("latin-1"))
    assert compare.main([before, str(after)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(f"compare: {after}")
    assert printed.err.count("\n") == 1


def test_a_record_has_command_versions_hardware_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["/anywhere/benchmarks/cost.py", "--rounds", "1", "--json", "record.json"])
    row = records.Row.of_ratios("Adam", np.linspace(1.0, 2.0, 11), seconds=0.5, flop_ratio=1.25)
    records.write_record(path, [row, records.Row("not finite", float("nan"))])
    record = json.loads(path.read_text())
    assert record["command"] == "python benchmarks/cost.py --rounds 1 --json record.json"
    assert {"python", "proxvi", "jax", "numpyro", "optax"} <= set(record["versions"])
    assert set(record["hardware"]) == {"processor", "cores", "devices", "xla_flags"}
    first, second = record["rows"]
    assert first["name"] == "Adam"
    assert [first[key] for key in ("ratio", "low", "high", "seconds", "flop_ratio")] == [1.5, 1.1, 1.9, 0.5, 1.25]
    assert second["ratio"] is None
    assert compare.main([str(path), str(path)]) == 2
    records.write_record(path, [row])
    assert compare.main([str(path), str(path)]) == 0


def test_json_must_be_a_file_in_a_folder_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    records.add_json_option(parser)
    assert parser.parse_args([]).json is None
    assert parser.parse_args(["--json", str(tmp_path / "a.json")]).json == tmp_path / "a.json"
    for path in (tmp_path, tmp_path / "nowhere" / "a.json"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--json", str(path)])
        assert "must be a file in a folder that exists" in capsys.readouterr().err


NO_BENCHMARKS = {"compare", "records", "timing"}


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_can_write_a_record(path: Path) -> None:
    source = path.read_text()
    if path.stem not in NO_BENCHMARKS and "training_speeds(" not in source:  # which writes it
        assert "add_json_option(parser)" in source
        assert "write_record(arguments.json, " in source


def test_the_tables_of_luck_are_those_of_the_result_files() -> None:
    results = page.read(run.RESULTS)
    for path, count in zip(page.PAGES, (1, 3, 2), strict=True):
        text = path.read_text()
        assert text.count("<!-- table: ") == count
        assert page.with_tables(text, results) == text


def test_every_result_of_luck_says_how_to_make_it_again() -> None:
    for path in run.RESULTS.glob("*.json"):
        record = json.loads(path.read_text())
        assert record["command"].startswith(f"python benchmarks/luck/run.py {record['problem']} "), path.name
        assert record["versions"]["jax"], path.name


def test_the_data_of_luck_are_as_published() -> None:
    for line in (problems.DATA / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((problems.DATA / name).read_bytes()).hexdigest() == digest, name


NEW_PROBLEM = '''
"""One unknown number."""
import numpyro
import numpyro.distributions as dist
from problems import Problem

def problem(scale=1.0):
    def model():
        numpyro.sample("x", dist.Normal(numpyro.sample("z", dist.Normal(0, 1)), 1), obs=2.0)
    return Problem(model, scale=scale, steps=800, particles=2_000)
'''


@pytest.mark.slow
def test_a_problem_and_a_remedy_are_ten_lines_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert NEW_PROBLEM.strip().count("\n") < 10
    (tmp_path / "one_number.py").write_text(NEW_PROBLEM.lstrip())
    monkeypatch.setattr(problems, "__path__", [*problems.__path__, str(tmp_path)])
    assert "one_number" in problems.names()

    def larger_rate(make: Any, steps: int, key: Any, seeds: int) -> np.ndarray:
        problem = make(1.0)
        svi = SVI(problem.model, problem.new_guide(), optax.adam(5 * problem.rate), problem.loss)
        return remedies.several(svi, problem, steps, key, seeds)

    monkeypatch.setitem(remedies.REMEDIES, "larger rate", larger_rate)
    with ThreadPoolExecutor(1) as executor, jax.numpy_rank_promotion("allow"):
        cells = [run.Cell("one_number", remedy, seeds=2) for remedy in ("one run", "larger rate", "race, plain")]
        assert run.run(cells, tmp_path / "results", executor) == 0
        assert run.run(cells, tmp_path / "results", executor) == 0  # at once: they are there
    results = page.read(tmp_path / "results")
    exact = float(dist.Normal(0, 2**0.5).log_prob(2.0))  # the approximation can be exact here
    assert results.best["one_number"] == pytest.approx(exact, abs=0.02)
    assert all(results.within(cell) == 2 for cell in results.gaps)
    assert "| one number (−2.3) | 800 | 2, 0.0 |" in page.by_problem(results)
    results.inapplicable.update((name, 800, "best of 4") for name in ("one", "two"))  # on other problems it was tried
    assert "| one number (−2.3), not all run | 800 | 2, 0.0 |" in page.by_problem(results)
    page.picture(results, tmp_path / "picture")
    assert (tmp_path / "picture.svg").stat().st_size > 10_000


def test_a_remedy_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: Any) -> np.ndarray:
        raise RuntimeError("no memory")

    def ending_in_nan(*_: Any) -> np.ndarray:
        return np.array([-3.0, np.nan])

    monkeypatch.setitem(remedies.REMEDIES, "failing", failing)
    monkeypatch.setitem(remedies.REMEDIES, "one run", ending_in_nan)
    with ThreadPoolExecutor(1) as executor:
        assert run.run([run.Cell("schools", name) for name in ("failing", "one run")], tmp_path, executor) == 1
    assert "1/2 schools, failing: RuntimeError('no memory')" in capsys.readouterr().out
    results = page.read(tmp_path)
    assert results.gaps["schools", 6_000, "one run"].tolist() == [0.0, np.inf]
    assert results.within(("schools", 6_000, "one run")) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("problem", problems.names())
def test_every_problem_of_luck_runs(problem: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor, jax.numpy_rank_promotion("allow"):
        cells = [run.Cell(problem, remedy, steps=800, seeds=2) for remedy in remedies.REMEDIES]
        assert run.run(cells, tmp_path, executor) == 0
    results = page.read(tmp_path)
    assert len(results.gaps) + len(results.inapplicable) == len(cells)
