"""What `fit` does between two compiled chunks: it looks at the clock, writes down, and hears whether to stop."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


class Clock:
    """How many steps make a second: the loop looks up about that often, to show, to save or to be stopped."""

    def __init__(self, longest: int) -> None:
        alone = jax.process_count() == 1  # several processes must take the same number of steps at a time
        self._longest, self.length, self._ticks = longest, min(10, longest) if alone else longest, 0
        self.rate, self._adapts, self._saved = 0.0, alone, time.monotonic()

    @contextmanager
    def timed(self) -> Iterator[Callable[[int], None]]:
        """Time what is done within; call what it yields with the number of steps."""
        started, lengths = time.perf_counter(), []
        yield lengths.append
        self._ticks += 1
        self.rate = sum(lengths) / (time.perf_counter() - started)
        if self._adapts and self._ticks > 1:  # the first one compiles
            self.length = max(1, min(self._longest, int(self.rate)))

    def since_save(self) -> float:
        return time.monotonic() - self._saved

    def saved(self) -> None:
        self._saved = time.monotonic()


class Record:
    """Metrics, to a file of JSON lines and to a callback; process 0 speaks for all."""

    def __init__(self, path: Any, callback: Any) -> None:
        speaks = jax.process_index() == 0
        self._path, self._callback = Path(path) if path is not None and speaks else None, callback if speaks else None

    def resume(self, step: int) -> None:
        """Forget what was reported after `step`, which will be reported again."""
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

    def report(self, step: int, metrics: dict[str, Any]) -> None:
        self.write({"step": step, **metrics})
        if self._callback is not None:
            self._callback(step, metrics)

    def saved(self, checkpoint: tuple[int, Path] | None) -> None:
        """Note that a checkpoint is safely on disk."""
        if checkpoint is not None:
            step, path = checkpoint
            self.write({"step": step, "checkpoint": str(path)})

    def write(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({name: _plain(value) for name, value in line.items()}) + "\n")


def _plain(value: Any) -> Any:
    """What JSON can hold: it knows no NaN and no infinity."""
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


@contextmanager
def signals(wanted: bool) -> Iterator[list[int]]:
    """A list that fills with the signals that ask to stop; a second one of a kind acts at once."""
    told: list[int] = []
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield told
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def hear(number: int, _: Any) -> None:
        told.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, hear)
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def agree(told_to_stop: bool, time_to_save: bool) -> tuple[bool, bool]:
    """Whether to stop, as soon as any process was told to, and whether to save, for which process 0 has the clock."""
    # JAX's own `reached_preemption_sync_point` does not serve: Orbax asks it too, with another count, at every save.
    if jax.process_count() == 1:
        return told_to_stop, time_to_save
    all_of_them = multihost_utils.process_allgather(np.asarray([told_to_stop, time_to_save]))
    return bool(all_of_them[:, 0].any()), bool(all_of_them[0, 1])
