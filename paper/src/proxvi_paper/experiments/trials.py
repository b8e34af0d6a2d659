"""Trials: each is run once and writes one result file. A trial that was interrupted resumes."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from proxvi_paper.experiments import results

__all__ = ["Measurement", "Trial", "finished", "metrics", "run"]

ONE_AT_A_TIME = threading.Lock()  # NumPyro's handlers are a global stack, which threads would share


class Measurement(NamedTuple):
    """What a trial has measured.

    Attributes:
        figures: for its result file.
        seconds: how long it took, interrupted runs included.
    """

    figures: dict[str, Any]
    seconds: float


@runtime_checkable
class Trial(Protocol):
    """One row of a figure's table, or one cell of a table: a frozen dataclass. Its result depends on its fields only.

    Attributes:
        all_devices: whether it computes on all devices. Such trials run one after another in this process by default,
            the others in a process for each core.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    all_devices: ClassVar[bool]

    @property
    def name(self) -> str:
        """The name of its folder for checkpoints and metrics."""
        ...

    @property
    def file_name(self) -> str:
        """The name of its result file."""
        ...

    @property
    def steps(self) -> int:
        """Steps of the optimiser, for the progress bar."""
        ...

    def measure(self, folder: Path, *, checkpoint_every: float, progress: bool | None) -> Measurement:
        """Run it, with checkpoints in `folder` if it is long."""
        ...


def run(
    trial: Trial,
    folder: Path,
    runs: Path,
    *,
    checkpoint_every: float = 300.0,
    progress: bool | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Run a trial, unless it has a result file already.

    Killed at any time and started again, it resumes from its checkpoint and ends with the same figures. If two
    processes run the same trial at once, one waits and takes the result of the other.

    Args:
        trial: what to run.
        folder: for its result file.
        runs: for its checkpoints and metrics, in a folder of the trial's name.
        checkpoint_every: seconds between checkpoints.
        progress: whether to show progress bars; None shows them on a terminal.
        command: for the result file; None takes the command of this process.

    Returns:
        The figures in the result file.
    """
    with ONE_AT_A_TIME, _locked(runs / trial.name):
        known = finished(trial, folder)
        if known is not None:
            return known
        figures, seconds = trial.measure(runs / trial.name, checkpoint_every=checkpoint_every, progress=progress)
        command = results.command() if command is None else command
        return results.save(folder / trial.file_name, asdict(trial), figures, seconds=seconds, command=command)


def finished(trial: Trial, folder: Path) -> dict[str, Any] | None:
    """The figures in a trial's result file; None if it has not been run."""
    return results.read(folder / trial.file_name, asdict(trial))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the metrics in a trial's folder, so far; a line that is being written is left out."""
    path, found = folder / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process has this folder. The lock ends with the process that holds it."""
    try:
        import fcntl
    except ImportError:  # Windows: two processes may run the same trial, and the later result replaces the earlier
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
