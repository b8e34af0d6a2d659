"""The progress of a run: its losses, its metrics log and its progress bar."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
import tqdm
import tqdm.auto

from proxvi._typing import Json, Metrics
from proxvi.training._convergence import has_converged, is_time_to_ask

LOG = logging.getLogger("proxvi")
LINE = ("step", "resumed", "checkpoint")  # words of the metrics file, beside the metrics
FORMATS = {"elbo": ".5g", "validation_elbo": ".5g", "magnitude": ".1e", "distance": ".2g", "pull": ".2g"}


@dataclass
class Progress:
    """What a checkpoint holds beside the state of the inference.

    Attributes:
        losses: of all steps of the run; those after `step` are not known yet.
        held_out: digests of the validation data, those of each process; None without them.
        step: steps taken.
        best: the best validation ELBO; None before the first.
        waited: reports since then.
        held_until: the last report at which a constraint, annealing or KL warm-up was active.
        limited: updates that speed limits had changed until the latest report.
        started: when the run would have started if it had never been interrupted.
    """

    losses: np.ndarray
    held_out: list[str] | None = None
    step: int = 0
    best: float | None = None
    waited: int = 0
    held_until: int = 0
    limited: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time spent on the run, including that before a restart."""
        return time.monotonic() - self.started

    @property
    def losses_so_far(self) -> np.ndarray:
        """Of the steps taken."""
        return self.losses[: self.step]

    def add(self, losses: np.ndarray) -> None:
        """Count a chunk of steps."""
        self.losses[self.step : self.step + len(losses)] = losses
        self.step += len(losses)

    def mean_elbo(self, since: int) -> float:
        """The mean of the steps since `since` whose loss was finite; NaN if none was."""
        losses = self.losses_so_far[since:]
        mean = losses.mean(dtype=np.float64)
        if not np.isfinite(mean):
            finite = losses[np.isfinite(losses)]
            mean = finite.mean(dtype=np.float64) if finite.size else np.nan
        return -float(mean)

    def hold(self, active: bool, limited: int) -> bool:
        """Whether anything but the ELBO has moved the run since the report before.

        Args:
            active: whether a constraint, annealing or KL warm-up was active.
            limited: updates that speed limits have changed so far. With batches these are most, but not all.
        """
        held = active or limited != self.limited  # less, if the limit began afresh
        self.held_until, self.limited = self.step if held else self.held_until, limited
        return held

    def validate(self, elbo: float, *, held: bool) -> None:
        """Count a report: is its validation ELBO the best so far?

        Args:
            elbo: of the held-out data.
            held: what `hold` says. Then the ELBO may fall, and that is no reason to stop.
        """
        better = bool(np.isfinite(elbo)) and (self.best is None or elbo > self.best)
        self.waited = 0 if better or held else self.waited + 1
        self.best = elbo if better else self.best

    def has_converged(self, report_before: int, within: float) -> bool:
        """Whether the run may stop at this report, by its losses since a constraint was active."""
        before, now = (max(step - self.held_until, 0) for step in (report_before, self.step))
        return now > 0 and is_time_to_ask(before, now) and has_converged(self.losses_so_far[-now:], within)

    def notes(self) -> Json:
        """All but the losses, for the header of a checkpoint."""
        names = ("held_out", "best", "waited", "held_until", "limited", "seconds")
        return {name: getattr(self, name) for name in names}

    def resume(self, step: int, losses: np.ndarray, notes: Json) -> None:
        """Go on from a checkpoint."""
        self.losses[:step] = losses
        self.step, self.held_until, self.limited = step, notes["held_until"], notes.get("limited", 0)
        if self.held_out in (None, notes.get("held_out")):
            self.held_out, self.best, self.waited = notes.get("held_out"), notes["best"], notes["waited"]
        elif notes["best"] is not None:
            LOG.warning("`validation` has other data than before step %d, so early stopping starts afresh", step)
        self.started = time.monotonic() - notes["seconds"]


class MetricsLog:
    """Writes the metrics of a run; only process 0 does.

    Args:
        path: of a file of JSON lines; None writes no file.
        callback: called with the step and the metrics.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, callback: Callable[[int, Metrics], object] | None = None
    ) -> None:
        writes = jax.process_index() == 0
        self._path = Path(path).resolve() if path is not None and writes else None  # a link stays one
        self._callback = callback if writes else None

    def start(self, step: int) -> None:
        """Remove the lines after `step`, whose steps will be taken again, and those that a crash has garbled.

        Raises:
            ValueError: if the file is there and is not one of ours. Nothing is changed.
        """
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line + "\n" for number, line in self._lines() if number <= step]
        if step:
            kept.append(json.dumps({"step": step, "resumed": True}) + "\n")
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        fresh.write_text("".join(kept))
        fresh.replace(self._path)

    def _lines(self) -> list[tuple[int, str]]:
        """The lines of the file, each with its step."""
        if self._path is None or not self._path.exists():
            return []
        if not self._path.is_file():
            raise ValueError(
                f"`metrics_file` must be a regular file, got {str(self._path)!r}, which is something else; choose "
                "another name."
            )
        found = []
        for number, line in enumerate(self._path.read_bytes().splitlines()):
            try:
                found.append((int(json.loads(line)["step"]), line.decode()))
            except (ValueError, TypeError, KeyError) as error:  # garbled by a crash, unless it is the first
                if number == 0 and not line.startswith(b'{"step": '):
                    raise ValueError(
                        f"`metrics_file` must be a new file or one that `fit` wrote, got {str(self._path)!r}, whose "
                        f"first line is {line[:40]!r}; choose another name, or move the file away."
                    ) from error
        return found

    def report(self, step: int, metrics: Metrics) -> None:
        """Write the metrics, and hand them to the callback."""
        self._write({"step": step, **metrics})
        if self._callback is not None:
            self._callback(step, metrics)

    def saved(self, checkpoint: tuple[int, str] | None) -> None:
        """Write a line for a checkpoint that is complete on disk: its step and path."""
        if checkpoint is not None:
            step, path = checkpoint
            self._write({"step": step, "checkpoint": path})

    def _write(self, line: Json) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({name: _plain(value) for name, value in line.items()}) + "\n")


def _plain(value: object) -> object:
    """JSON has no NaN and no infinity."""
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def progress_bar(wanted: bool | None, num_steps: int, step: int) -> tqdm.tqdm:
    """A progress bar, at `step`. None shows it on a terminal and in a notebook; only process 0 shows it."""
    ipython = sys.modules.get("IPython")  # a script may have imported it, or ipykernel, without being a notebook
    watched = sys.stderr.isatty() or hasattr(ipython and ipython.get_ipython(), "kernel")
    shown = (watched if wanted is None else wanted) and jax.process_index() == 0
    return tqdm.auto.tqdm(total=num_steps, initial=step, disable=not shown, unit="step", dynamic_ncols=True)


def postfix(metrics: Metrics) -> str:
    """The metrics that the bar shows; those of several constraints would be too long."""
    shown = {name: metrics[name] for name in FORMATS if isinstance(metrics.get(name), float)}
    return " ".join(f"{name} {value:{FORMATS[name]}}" for name, value in shown.items())
