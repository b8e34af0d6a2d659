"""The metrics log: a file of JSON lines and a callback."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from proxvi._typing import Json, Metrics


class MetricsLog:
    """Metrics of a run, written by process 0 for all.

    Args:
        path: of the file of JSON lines; None writes none.
        callback: called with the step and the metrics.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, callback: Callable[[int, Metrics], object] | None = None
    ) -> None:
        writes = jax.process_index() == 0
        self._path = Path(path) if path is not None and writes else None
        self._callback = callback if writes else None

    def start(self, step: int) -> None:
        """Remove the lines after `step`, whose steps will be taken again."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        for line in self._path.read_text().splitlines() if self._path.exists() else []:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except json.JSONDecodeError:
                pass  # cut off by a crash
        if step:
            kept.append(json.dumps({"step": step, "resumed": True}) + "\n")
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.write_text("".join(kept))
        fresh.replace(self._path)

    def report(self, step: int, metrics: Metrics) -> None:
        """Write the metrics, and hand them to the callback."""
        self._write({"step": step, **metrics})
        if self._callback is not None:
            self._callback(step, metrics)

    def saved(self, checkpoint: tuple[int, str] | None) -> None:
        """Note a checkpoint that is complete on disk: its step and where it is."""
        if checkpoint is not None:
            step, path = checkpoint
            self._write({"step": step, "checkpoint": path})

    def _write(self, line: Json) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({name: _plain(value) for name, value in line.items()}) + "\n")


def _plain(value: object) -> object:
    """What JSON can hold: it knows no NaN and no infinity."""
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
