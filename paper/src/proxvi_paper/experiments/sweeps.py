"""Sweeps: many trials on any executor, with one progress bar over all of them."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any

import jax
import tqdm

from proxvi._validation import check_integer
from proxvi_paper.experiments import results
from proxvi_paper.experiments.trials import Trial, finished, metrics, run

__all__ = ["OneCoreEach", "Options", "sweep"]

SHOWN = 2  # names of trials beside the progress bar
RESTARTS = 3  # of the local workers, after one of them was killed; Dask has the same default
# For all workers to begin to save, once one has stopped: where it ends, the pool breaks, which stops the others again.
SECONDS_TO_SAVE = 60.0


@dataclass(frozen=True)
class Options:
    """Where and how the trials of an experiment are run.

    Args:
        results: folder for result files, tables and plots. Each experiment has a subfolder.
        runs: folder for checkpoints and metrics, the same.
        checkpoint_every: seconds between checkpoints.
        workers: processes on this machine, one core each. None: one for each core, or, for figure 1 and logistic
            regression, this process with all cores.
        dask: address of the scheduler of a Dask cluster, to run on its workers.
        resume: whether to resume trials that were interrupted; otherwise they are refused.
    """

    results: Path = Path("results")
    runs: Path = Path("runs")
    checkpoint_every: float = 300.0
    workers: int | None = None
    dask: str | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        """Check the options before any trial is run."""
        if self.workers is not None:
            check_integer("workers", self.workers, remedy="leave it out for as many as cores")
            if self.dask is not None:
                raise ValueError(
                    f"`workers` must be left out with `dask`, got {self.workers}; the cluster has workers of its own."
                )

    def run(self, name: str, trials: Iterable[Trial]) -> dict[Trial, dict[str, Any]]:
        """Run the trials of the experiment of that name."""
        folder, runs, trials = self.results / name, self.runs / name, list(dict.fromkeys(trials))
        todo = [trial for trial in trials if finished(trial, folder) is None]
        begun = [trial.name for trial in todo if (runs / trial.name).exists()]
        if begun and not self.resume:
            raise ValueError(f"`resume` must be True to go on with {begun} in {runs}, got False; or take other `runs`.")
        if len(todo) < len(trials):  # or a reader may take old figures for a reproduction
            print(
                f"{len(trials) - len(todo)} of {len(trials)} results are in {folder} already and are not made again; "
                "name another folder to make them afresh.",
                file=sys.stderr,
            )
        if todo:
            going_on = f", {len(begun)} of them resumed" if begun else ""
            print(f"{len(todo)} trials{going_on}; results go to {folder}, checkpoints to {runs}.", file=sys.stderr)
        here = all(trial.all_devices for trial in trials)
        for broken in range(1 + RESTARTS):
            try:
                with self._executor(here) as executor:
                    return sweep(trials, folder, runs, executor, checkpoint_every=self.checkpoint_every)
            except RuntimeError as error:
                killed = any(isinstance(e, BrokenExecutor) for e in (error, error.__cause__))
                if not killed or broken == RESTARTS:
                    raise
                print("a worker was killed; new ones go on from the checkpoints.", file=sys.stderr)
        raise AssertionError

    @contextmanager
    def _executor(self, all_devices: bool) -> Iterator[Any]:
        if self.dask is not None:
            try:
                from distributed import Client
            except ImportError as error:
                raise ImportError("a Dask cluster needs distributed: pip install 'proxvi-paper[sweep]'.") from error
            with Client(self.dask) as client:
                yield client.get_executor()
            return
        others = set(active_children())
        here = all_devices and self.workers is None
        executor = ThreadPoolExecutor(1) if here else OneCoreEach(self.workers or results.cores())
        try:
            yield executor
        except BaseException:  # Ctrl-C, for example: the workers save what they have, and begin nothing more
            executor.shutdown(wait=False, cancel_futures=True)
            for worker in set(active_children()) - others:
                worker.terminate()
            raise
        executor.shutdown()


def sweep(
    trials: Iterable[Trial],
    folder: Path,
    runs: Path,
    executor: Any,
    *,
    checkpoint_every: float = 300.0,
    progress: bool | None = None,
) -> dict[Trial, dict[str, Any]]:
    """Run the trials that are not finished yet on an executor, and wait for all of them.

    Args:
        trials: what to run.
        folder: for the result files; all workers must see it.
        runs: for checkpoints and metrics; all workers must see it.
        executor: has the `submit` of `concurrent.futures`: a pool of processes, `dask.distributed`'s
            `client.get_executor()`, submitit's `AutoExecutor`.
        checkpoint_every: seconds between checkpoints.
        progress: whether to show a progress bar over the steps of all trials; None shows it on a terminal.

    Returns:
        The figures of each trial.

    Raises:
        RuntimeError: if some trials did not finish. The others did, and a second sweep resumes the rest.
    """
    figures = {trial: finished(trial, folder) for trial in dict.fromkeys(trials)}
    options = {"checkpoint_every": checkpoint_every, "progress": False, "command": results.command()}
    jobs = {
        trial: executor.submit(run, trial, folder.absolute(), runs.absolute(), **options)
        for trial, known in figures.items()
        if known is None
    }
    failed: dict[str, BaseException] = {}
    with tqdm.tqdm(
        total=sum(trial.steps for trial in figures), unit="step", disable=None if progress is None else not progress
    ) as bar:
        while True:
            for trial in [trial for trial, job in jobs.items() if job.done()]:
                try:
                    figures[trial] = jobs.pop(trial).result()
                except (Exception, CancelledError) as error:
                    failed[trial.name] = error
            done = sum(
                _steps_so_far(runs / trial.name) if known is None else trial.steps for trial, known in figures.items()
            )
            bar.update(done - bar.n)
            running = [trial.name for trial, job in jobs.items() if _is_running(job)]
            count = f"{sum(f is not None for f in figures.values())} of {len(figures)} trials finished"
            bar.set_postfix_str(f"{count}, now {', '.join(running[:SHOWN])}" if running else count)
            if not jobs:
                break
            time.sleep(1.0)
    if failed:
        listed = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failed.items())
        raise RuntimeError(
            f"{len(failed)} of {len(figures)} trials did not finish ({listed}); those that were interrupted go on "
            "from their checkpoints when you start the same again."
        ) from next((e for e in failed.values() if isinstance(e, BrokenExecutor)), next(iter(failed.values())))
    return {trial: known for trial, known in figures.items() if known is not None}


def _is_running(job: Any) -> bool:
    """Whether an executor has begun with a job, if it can tell."""
    return hasattr(job, "running") and job.running()


def _steps_so_far(folder: Path) -> int:
    return max((line["step"] for line in metrics(folder)), default=0)


class OneCoreEach(ProcessPoolExecutor):
    """Processes on this machine that compute with one thread each: as many as cores keep all of them busy."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, mp_context=get_context("spawn"), initializer=_start_worker)

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As in `concurrent.futures`. A worker that received a signal to stop runs nothing more."""
        job = super().submit(_unless_stopped, SECONDS_TO_SAVE, fn, *args, **kwargs)
        # The pool watches the workers that ran when it last had news. Without more news, it would not see that the
        # worker which it has just started was killed.
        super().submit(int)
        return job


_stop_received = threading.Event()  # in a worker


def _unless_stopped(seconds: float, function: Any, *args: Any, **kwargs: Any) -> Any:
    # A worker that exits here would break the pool, which then kills the others while they save.
    if _stop_received.is_set():
        raise RuntimeError("received a signal to stop")
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit) as error:
        _stop_received.set()
        # If the pool is broken, it tells nobody to end, but waits for all.
        timer = threading.Timer(seconds, os._exit, [1])
        timer.daemon = True
        timer.start()
        raise RuntimeError("received a signal to stop") from error


def _start_worker() -> None:
    # XLA reads this before the first computation; JAX has read its own settings already.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    # The flag keeps one operation on one thread. Independent operations still go to a pool with a thread for each core,
    # where workers would compete; NPROC sets the size of that pool.
    os.environ["NPROC"] = "1"
    jax.config.update("jax_num_cpu_devices", 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=_stop_with_the_driver, daemon=True).start()


def _stop_with_the_driver() -> None:
    """Stop this worker when the driver was killed; otherwise it would wait for work forever."""
    driver = parent_process()
    assert driver is not None
    driver.join()
    os.kill(os.getpid(), signal.SIGTERM)  # training saves
    time.sleep(30.0)
    os._exit(1)
