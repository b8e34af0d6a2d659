"""The options of `fit`, grouped by topic."""

import json
import numbers
import os
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from proxvi._typing import Batch, Json, Metrics, Params, Tree
from proxvi._validation import check_integer
from proxvi.training._orbax_store import OrbaxStore
from proxvi.training.checkpoints import Checkpoints

__all__ = ["Checkpointing", "Reporting", "Validation"]


@dataclass(frozen=True)
class Checkpointing:
    """Where and how often `fit` and `race` save; needs the extra `checkpoint`.

    Args:
        folder: to save to and to resume from; created if it does not exist.
        every: seconds between two checkpoints; 0 saves as often as possible.
        keep: how many of the latest checkpoints to keep.
        configuration: your own settings, as JSON; a checkpoint with other ones is refused.
        accept_changes: go on from a checkpoint of `fit` even if the program, the data, the devices or the version of
            JAX have changed since. Its parameters must fit. The state of the optimiser and of the constraints is taken
            over if it fits, and otherwise starts afresh. The log says what changed.

    Example:
        >>> import proxvi
        >>> proxvi.Checkpointing("runs/mine", every=60.0, configuration={"data": "version 2"}).keep
        3
    """

    folder: str | os.PathLike[str]
    _: KW_ONLY
    every: float = 300.0
    keep: int = 3
    configuration: Json | None = None
    accept_changes: bool = False

    def __post_init__(self) -> None:
        _check_path("folder", self.folder, "leave out `checkpointing` to save nothing")
        if isinstance(self.every, bool) or not isinstance(self.every, numbers.Real) or not self.every >= 0:
            raise ValueError(
                f"`every` must be a number of seconds of at least 0, got {self.every!r}; 0 saves as often as possible."
            )
        check_integer("keep", self.keep, remedy="1 keeps the latest only")
        try:
            json.dumps(self.configuration)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"`configuration` must be JSON, got {self.configuration!r} ({error}); use numbers, strings, lists and "
                "dictionaries."
            ) from error

    def open(self, configuration: Json) -> Checkpoints:
        """The checkpoints of a run with this configuration, beside your own; to be closed."""
        store = OrbaxStore(self.folder, self.keep)
        return Checkpoints(
            store, {**configuration, "user": self.configuration}, self.every, accept_changes=self.accept_changes
        )


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """What `fit` reports, how often, and where to.

    The metrics of a report are `elbo` (mean since the last report; that of a batch, unless the model weights its rows
    to stand for all), `magnitude`, `distance` and `share` of the constraint, or `shortfall`, `pull` and `active` of a
    speed limit (lists, if there are several), `skipped`, `steps_per_second` (of all steps since the last report; the
    first of a process compiles), `seconds` (including those before a restart), and with `Validation` also
    `validation_elbo`.

    Args:
        every: steps between two reports; each includes a validation.
        progress: whether to show a progress bar; None shows it on a terminal and in a notebook.
        measure: metrics of your own: a function of the parameters that returns a dictionary of numbers.
        callback: called with the step and the metrics at each report. If it raises, the run is saved and ends; when it
            goes on, this report is not made again.
        metrics_file: the metrics as JSON lines, with null for what is not finite, and a line for each checkpoint once
            it is complete on disk.

    Example:
        >>> import proxvi
        >>> reporting = proxvi.Reporting(every=100, callback=lambda step, metrics: print(step, metrics["elbo"]))
        >>> reporting.every
        100

        `proxvi.training.trackers` has callbacks for TensorBoard, Weights & Biases and MLflow.
    """

    every: int = 1_000
    progress: bool | None = None
    measure: Callable[[Params], dict[str, Tree]] | None = None
    callback: Callable[[int, Metrics], object] | None = None
    metrics_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_integer("every", self.every, remedy="1 reports after each step")
        for name, function in {"measure": self.measure, "callback": self.callback}.items():
            if function is not None and not callable(function):
                raise TypeError(f"`{name}` must be a function or None, got {function!r}; pass the function itself.")
        if self.metrics_file is not None:
            _check_path("metrics_file", self.metrics_file, "None writes no file")


@dataclass(frozen=True, init=False, eq=False)
class Validation:
    """Held-out data. Each report has its true ELBO, and with `patience` the run stops early.

    Args:
        data: the arguments of the model, as for `fit`.
        patience: stop after this many reports without a better `validation_elbo`. Reports are not counted while a
            constraint steers: it makes up more than 1% of the gradient, or, a speed limit, has changed an update since
            the report before. Nor during annealing or KL warm-up. None never stops early.

    Example:
        >>> import jax.numpy as jnp, proxvi
        >>> proxvi.Validation(jnp.zeros((100, 5)), patience=10).patience
        10
    """

    data: Batch
    patience: int | None

    def __init__(self, *data: Tree, patience: int | None = None) -> None:
        if not data or (len(data) == 1 and isinstance(data[0], tuple)):
            given = f"a tuple of {len(data[0])}" if data else "nothing"
            raise TypeError(
                f"`data` must be the arguments of the model, one after the other, got {given}; "
                "write `Validation(x, y)`."
            )
        if patience is not None:
            check_integer("patience", patience, remedy="None never stops early")
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "patience", patience)


def _check_path(name: str, path: object, remedy: str) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`{name}` must be a path, got {path!r}; {remedy}.")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:[/\\]", os.fspath(path)):  # `pathlib.Path` takes one of two slashes away
        raise ValueError(
            f"`{name}` must be on a file system, got the object store {str(path)!r}, which has no lock to keep two "
            "runs apart, and in which nothing can be appended; mount the bucket (gcsfuse, Mountpoint for Amazon S3), "
            "or copy what is finished to it."
        )
