"""The examples at smoke size."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_rescue_of_a_mixture(tmp_path: Path) -> None:
    arguments = ("mixture", "--seeds", "2", "--steps", "20", "--results", str(tmp_path))
    printed = run("rescue.py", *arguments, "--only", "VI", "PVI, entropy")
    assert printed.count(" of 2 |") == 2
    saved = json.loads((tmp_path / "mixture-pvi-entropy.json").read_text())
    assert len(saved["elbos"]) == 2
    saved["elbos"] = [-1.0, -1.0]
    (tmp_path / "mixture-pvi-entropy.json").write_text(json.dumps(saved))
    again = run("rescue.py", *arguments, "--only", "PVI, entropy")
    assert "| PVI, entropy | 2 of 2 | -1.000 |" in again  # what is there is not run again


@pytest.mark.slow
def test_rescue_of_a_network() -> None:
    printed = run("rescue.py", "network", "--seeds", "1", "--steps", "5", "--only", "PVI, entropy")
    assert printed.count(" of 1 |") == 1


@pytest.mark.slow
def test_long_run_goes_on_where_it_was(tmp_path: Path) -> None:
    run("long_run.py", "--folder", str(tmp_path), "--steps", "500")
    assert "ELBO of a picture" in run("long_run.py", "--folder", str(tmp_path), "--steps", "500")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == {"step": 500, "resumed": True}


@pytest.mark.slow
@pytest.mark.parametrize("problem", [pytest.param("mixture", marks=pytest.mark.nightly), "network"])
def test_sensitivity_report(problem: str, tmp_path: Path) -> None:
    size = ("--only", problem, "--starts", "4", "--steps", "40")
    printed = run("sensitivity.py", *size, "--picture", str(tmp_path / "starts.png"))
    assert len(re.findall(r"of 4 starts ends? within 2 nats", printed)) == 4
    assert (tmp_path / "starts.png").stat().st_size > 20_000


@pytest.mark.slow
def test_settings_of_a_speed_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import speed_limit_settings as study  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(study, "STUDY", {"over": (0.33,), "b2": (0.999,), "rate": (1.0,)})
    picture, size = tmp_path / "settings.png", ("--seeds", "2", "--steps", "20", "--results", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["study", "mixture", *size, "--picture", str(picture)])
    study.main()
    printed = capsys.readouterr().out
    assert printed.count("| 0.33 |") == printed.count("| 0 |") == 2  # with the limit and without, from two starts
    assert picture.stat().st_size > 20_000
    study.main()  # from the result files
    assert capsys.readouterr().out == printed


# In place of a scheduler: starts the command as often as the job's header says, with the variables that SLURM sets.
SRUN = """#!/usr/bin/env bash
shift
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_STEP_NODELIST=localhost SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""


@pytest.mark.xdist_group("processes")
@pytest.mark.nightly  # how a job starts the processes; that they train together is in `training/test_processes.py`
def test_the_slurm_job_trains_in_several_processes(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    places = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    header = dict(re.findall(r"^#SBATCH --(\S+?)=(\S+)", (EXAMPLES / "slurm.sh").read_text(), re.M))
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": header["ntasks"]}
    environment = {**os.environ, "PATH": places, **job}
    command = ["bash", "examples/slurm.sh", str(tmp_path / "bars"), "--steps", "500"]
    done = subprocess.run(command, cwd=EXAMPLES.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (line for line in done.stdout.splitlines() if line.startswith("ELBO of a picture"))
    assert first == second
    assert (tmp_path / "bars" / "checkpoints" / "500").is_dir()


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
def test_the_kubernetes_job_trains_in_several_processes(tmp_path: Path) -> None:
    _, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(given["PROCESSES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, **given, "COORDINATOR": f"localhost:{port}"}
    program, script, option, _ = container["command"]
    assert program == "python"
    pods = [
        subprocess.Popen(
            [sys.executable, script, option, str(tmp_path), "--steps", "500"],
            cwd=EXAMPLES.parent,
            env={**environment, "JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(job["spec"]["completions"])
    ]
    first, second = (pod.communicate()[0].splitlines()[-1] for pod in pods)
    assert first.startswith("ELBO of a picture")
    assert first == second


@pytest.mark.nightly
@pytest.mark.xdist_group("processes")
def test_sweep_by_submitit(tmp_path: Path, digits: None) -> None:  # noqa: ARG001
    arguments = ("--scale", "1e-6", "--methods", "VI", "--samples", "2", "--digits", "5", "--cluster", "local")
    printed = run("slurm_sweep.py", *arguments, "--folder", str(tmp_path))
    assert "| VI | " in printed
    assert len(list((tmp_path / "results" / "table-1").glob("*.json"))) == 2
    assert len(list((tmp_path / "runs" / "table-1" / "jobs").glob("*_result.pkl"))) == 2  # each was a job of its own
