"""Sweeps: many trials on any executor, with one progress bar over all of them."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any

import jax
import tqdm

from proxvi._validation import check_integer
from proxvi.experiments import results
from proxvi.experiments.trials import Trial, finished, metrics, run

__all__ = ["OneCoreEach", "Options", "sweep"]


@dataclass(frozen=True)
class Options:
    """Where and how the trials of a table are run.

    Args:
        results: the result files, the table and the plots go to a folder of the table's name in it.
        runs: checkpoints and metrics, the same.
        samples: of the guide for each digit of the evaluation.
        digits: of the validation set in the evaluation.
        checkpoint_every: seconds.
        workers: processes on this machine; None for as many as cores.
        dask: address of the scheduler of a Dask cluster to run on, in place of processes.
        resume: go on with trials that were interrupted; otherwise they are refused.
    """

    results: Path = Path("results")
    runs: Path = Path("runs")
    samples: int = 5_000
    digits: int = 10_000
    checkpoint_every: float = 300.0
    workers: int | None = None
    dask: str | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        """Refuse what would fail, or mean something else, after hours of training."""
        check_integer("samples", self.samples, at_least=2, remedy="the error comes from their spread")
        check_integer("digits", self.digits, remedy="10,000 is all of the validation set")
        if self.digits > 10_000:
            raise ValueError(
                f"`digits` must be at most 10,000, all of the validation set, got {self.digits}; lower it."
            )
        if self.workers is not None:
            check_integer("workers", self.workers, remedy="leave it out for as many as cores")
            if self.dask is not None:
                raise ValueError(
                    f"`workers` must be left out with `dask`, got {self.workers}; the cluster has workers of its own."
                )

    def run(self, name: str, trials: Iterable[Trial]) -> dict[Trial, dict[str, Any]]:
        """Sweep over the trials of the table of that name."""
        folder, runs, trials = self.results / name, self.runs / name, list(trials)
        size: dict[str, Any] = {"samples": self.samples, "digits": self.digits}
        known = [finished(trial, folder, **size) is not None for trial in trials]
        begun = [t.name for t, done in zip(trials, known, strict=True) if not done and (runs / t.name).exists()]
        if begun and not self.resume:
            raise ValueError(f"`resume` must be True to go on with {begun} in {runs}, got False; or take other `runs`.")
        results.say_what_is_known(known, folder)
        with self._executor() as executor:
            return sweep(trials, folder, runs, executor, **size, checkpoint_every=self.checkpoint_every)

    @contextmanager
    def _executor(self) -> Iterator[Any]:
        if self.dask is None:
            others = set(active_children())
            executor = OneCoreEach(self.workers or results.cores())
            try:
                yield executor
            except BaseException:  # Ctrl-C, for example: the workers save what they have, and begin nothing more
                executor.shutdown(wait=False, cancel_futures=True)
                for worker in set(active_children()) - others:
                    worker.terminate()
                raise
            executor.shutdown()
        else:
            try:
                from distributed import Client
            except ImportError as error:
                raise ImportError("a Dask cluster needs distributed: pip install 'proxvi[sweep]'.") from error
            with Client(self.dask) as client:
                yield client.get_executor()


def sweep(
    trials: Iterable[Trial],
    folder: Path,
    runs: Path,
    executor: Any,
    *,
    samples: int = 5_000,
    digits: int = 10_000,
    checkpoint_every: float = 300.0,
    progress: bool | None = None,
) -> dict[Trial, dict[str, Any]]:
    """Run trials that are not finished yet on an executor, and wait for all.

    Args:
        trials: what to run.
        folder: where the result files go; all workers must see it.
        runs: where checkpoints go, the same.
        executor: with the `submit` of `concurrent.futures`: a pool of processes, `dask.distributed`'s
            `client.get_executor()`, submitit's `AutoExecutor`.
        samples: as for `run`.
        digits: as for `run`.
        checkpoint_every: as for `run`.
        progress: whether to show a progress bar, over the steps of all trials; None does on a terminal.

    Returns:
        The figures of each.

    Raises:
        RuntimeError: if some did not finish; the others did, and a second sweep goes on with the rest.
    """
    size: dict[str, Any] = {"samples": samples, "digits": digits}
    options = {**size, "checkpoint_every": checkpoint_every, "progress": False, "command": results.command()}
    figures = {trial: finished(trial, folder, **size) for trial in dict.fromkeys(trials)}
    jobs = {
        trial: executor.submit(run, trial, folder.absolute(), runs.absolute(), **options)
        for trial, known in figures.items()
        if known is None
    }
    failed: dict[str, BaseException] = {}
    with tqdm.tqdm(
        total=sum(trial.steps for trial in figures), unit="step", disable=None if progress is None else not progress
    ) as bar:
        while jobs:
            for trial in [trial for trial, job in jobs.items() if job.done()]:
                try:
                    figures[trial] = jobs.pop(trial).result()
                except (Exception, CancelledError) as error:
                    failed[trial.name] = error
            reached = sum(_reached(trial, runs) if known is None else trial.steps for trial, known in figures.items())
            bar.update(reached - bar.n)
            bar.set_postfix_str(f"{sum(f is not None for f in figures.values())} of {len(figures)} trials finished")
            if jobs:
                time.sleep(1.0)
    if failed:
        listed = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failed.items())
        raise RuntimeError(
            f"{len(failed)} of {len(figures)} trials did not finish ({listed}); those that were interrupted go on "
            "from their checkpoints when you start the same again."
        ) from next(iter(failed.values()))
    return {trial: known for trial, known in figures.items() if known is not None}


class OneCoreEach(ProcessPoolExecutor):
    """Processes on this machine that compute with one thread each: as many as cores keep all of them busy."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, mp_context=get_context("spawn"), initializer=_start_worker)

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As in `concurrent.futures`; a worker that is told to stop does."""
        return super().submit(_until_told, fn, *args, **kwargs)


def _reached(trial: Trial, runs: Path) -> int:
    try:
        return max((line["step"] for line in metrics(trial, runs)), default=0)
    except json.JSONDecodeError:  # a line is being written
        return 0


_told = threading.Event()  # in a worker: that it is to begin nothing more


def _until_told(function: Any, *args: Any, **kwargs: Any) -> Any:
    # A worker that ended here would break the pool, which ends the others in the middle of their saving.
    if _told.is_set():
        raise RuntimeError("told to stop")
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit) as error:
        _told.set()
        raise RuntimeError("told to stop") from error


def _start_worker() -> None:
    # Before the first computation, when XLA reads it; JAX itself has read its own settings already.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    # The flag keeps an operation on one thread, but operations that do not wait for each other still go to a pool of
    # as many threads as there are cores, where workers would compete. NPROC is how XLA is told the size of that pool.
    os.environ["NPROC"] = "1"
    jax.config.update("jax_num_cpu_devices", 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=_end_with_the_driver, daemon=True).start()


def _end_with_the_driver() -> None:
    """A worker whose driver was killed would wait for work forever."""
    driver = parent_process()
    assert driver is not None
    driver.join()
    os.kill(os.getpid(), signal.SIGTERM)  # training saves
    time.sleep(30.0)
    os._exit(1)
