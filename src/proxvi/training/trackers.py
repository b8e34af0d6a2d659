"""Trackers: callbacks that hand the metrics of a run to TensorBoard, Weights & Biases or MLflow."""

import importlib
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

from proxvi._typing import Metrics

__all__ = ["Tracker", "to_mlflow", "to_tensorboard", "to_wandb"]

LOG = logging.getLogger("proxvi")
Scalars = dict[str, float]


class Tracker:
    """A callback of `Reporting` that never ends a run: if it cannot write, the log says so, and the run goes on.

    The metrics of several constraints are lists; `share` of the first becomes `share/0`.

    Args:
        name: of the tracker, for the log.
        write: takes the step and the metrics, one number each.

    Example:
        >>> import proxvi
        >>> from proxvi.training import trackers
        >>> mine = trackers.Tracker("my notebook", lambda step, scalars: print(step, scalars))
        >>> mine(100, {"elbo": -3.5, "share": [0.1, 0.2]})
        100 {'elbo': -3.5, 'share/0': 0.1, 'share/1': 0.2}
        >>> proxvi.Reporting(every=100, callback=mine).every
        100
    """

    def __init__(self, name: str, write: Callable[[int, Scalars], object]) -> None:
        self._name, self._write = name, write

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a report."""
        scalars: Scalars = {}
        for name, value in metrics.items():
            if isinstance(value, list):
                scalars |= {f"{name}/{i}": float(x) for i, x in enumerate(value)}
            else:
                scalars[name] = float(value)
        try:
            self._write(step, scalars)
        except Exception as error:  # a network, a disk, a service: anything, and none is worth the run
            LOG.warning("%s did not take the metrics of step %d: %r; the run goes on", self._name, step, error)


def to_tensorboard(folder: str | os.PathLike[str]) -> Tracker:
    """Metrics to TensorBoard; needs tensorboardX.

    Args:
        folder: for its event files; `tensorboard --logdir` shows them.

    Example:
        >>> import tempfile
        >>> from proxvi.training import trackers
        >>> tracker = trackers.to_tensorboard(tempfile.mkdtemp())
        >>> tracker(100, {"elbo": -3.5})
    """
    # It writes in a thread of its own: every second, and when the tracker or the process ends.
    writer = _library("tensorboardX", "tensorboard").SummaryWriter(os.fspath(folder), flush_secs=1)

    def write(step: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    tracker = Tracker("TensorBoard", write)
    weakref.finalize(tracker, writer.close)
    return tracker


def to_wandb(run: Any) -> Tracker:
    """Metrics to a run of Weights & Biases.

    Args:
        run: what `wandb.init()` returned. `wandb.init(id=…, resume="allow")` goes on with the same run after a restart.

    Example:
        ::

            run = wandb.init(project="digits")
            proxvi.fit(svi, key, 10_000, x, reporting=proxvi.Reporting(callback=trackers.to_wandb(run)))
            run.finish()
    """
    if not callable(getattr(run, "log", None)):
        raise TypeError(f"`run` must be a run of Weights & Biases, got {run!r}; pass what `wandb.init()` returned.")
    return Tracker("Weights & Biases", lambda step, scalars: run.log(scalars, step=step, commit=True))


def to_mlflow(run_id: str | None = None) -> Tracker:
    """Metrics to MLflow; needs mlflow or mlflow-skinny.

    Args:
        run_id: of the run; None takes the active one of this moment, and starts one if there is none.

    Example:
        ::

            with mlflow.start_run():
                proxvi.fit(svi, key, 10_000, x, reporting=proxvi.Reporting(callback=trackers.to_mlflow()))
    """
    mlflow = _library("mlflow", "mlflow")
    if run_id is None:
        run_id = str((mlflow.active_run() or mlflow.start_run()).info.run_id)
    return Tracker("MLflow", lambda step, scalars: mlflow.log_metrics(scalars, step=step, run_id=run_id))


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"this tracker needs {name}: pip install 'proxvi[{extra}]'.") from error
