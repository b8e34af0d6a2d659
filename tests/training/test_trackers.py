"""Trackers, each with the real library that writes to disk."""

import math
import struct
import time
from pathlib import Path
from typing import Any

import optax
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi
from proxvi.training import trackers

from . import faults
from .common import KEY, ROWS

pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")


def run_with(callback: Any) -> Any:
    held = [
        proxvi.Proximity(statistic, magnitude=optax.exponential_decay(1.0, 10, 1e-10))
        for statistic in (proxvi.entropy, proxvi.mean_variance)
    ]
    svi = proxvi.ProximitySVI(faults.model, AutoNormal(faults.model), optax.adam(0.05), Trace_ELBO(), held)
    return proxvi.fit(svi, KEY, 40, ROWS, reporting=proxvi.Reporting(every=20, callback=callback))


def events(folder: Path) -> dict[tuple[str, int], float]:
    """What TensorBoard's files say: records of a length, its checksum, an event and its checksum."""
    from tensorboardX.proto import event_pb2

    parse = event_pb2.Event.FromString  # pyright: ignore[reportAttributeAccessIssue]
    found = {}
    for file in folder.glob("events.*"):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = parse(content[12 : 12 + length])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            content = content[16 + length :]
    return found


@pytest.mark.slow
def test_tensorboard_has_every_metric_of_every_report(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    result = run_with(trackers.to_tensorboard(tmp_path))
    found = events(tmp_path)
    assert found["elbo", 20] == pytest.approx(-float(result.losses[:20].mean()), rel=1e-5)
    assert {name for name, step in found if step == 40} >= {"elbo", "share/0", "share/1", "magnitude/0", "skipped"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_weights_and_biases_offline(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="proxvi", mode="offline", dir=tmp_path)
    result = run_with(trackers.to_wandb(run))
    assert run.summary["elbo"] == pytest.approx(-float(result.losses[20:].mean()), rel=1e-5)
    run.finish()
    (file,) = tmp_path.rglob("*.wandb")
    until = time.monotonic() + 20.0
    while b"share/1" not in file.read_bytes():  # a process of its own writes it, a moment after `finish` at times
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_mlflow_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    with mlflow.start_run() as run:
        result = run_with(trackers.to_mlflow())
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "elbo")
    assert {point.step: point.value for point in history} == pytest.approx(
        {20: -float(result.losses[:20].mean()), 40: -float(result.losses[20:].mean())}, rel=1e-5
    )


@pytest.mark.slow
def test_a_tracker_that_fails_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("the service is down")

    result = run_with(trackers.Tracker("my service", fail))
    assert len(result.losses) == 40
    assert caplog.text.count("my service did not take the metrics of step") == 2
    assert "ConnectionError('the service is down'); the run goes on" in caplog.text


def test_metrics_that_are_not_finite_are_handed_on() -> None:
    taken = {}
    trackers.Tracker("mine", lambda step, scalars: taken.update(scalars))(1, {"share": [math.nan, 0.5], "skipped": 0})
    assert math.isnan(taken["share/0"])
    assert taken["share/1"] == 0.5


def test_what_is_no_run_is_refused_and_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"`run` must be a run of Weights & Biases, got None; pass what `wandb\.init"):
        trackers.to_wandb(None)
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"this tracker needs tensorboardX: pip install 'proxvi\[tensorboard\]'"):
        trackers.to_tensorboard("folder")
