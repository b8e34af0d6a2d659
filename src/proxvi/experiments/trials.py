"""Trials: train, evaluate, write one result file; and sweeps over many of them, on any executor."""

import base64
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import numpy as np
import tqdm
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult

import proxvi
from proxvi._checks import check_integer
from proxvi.datasets import BinarizedMNIST, binarized_mnist
from proxvi.experiments import results

__all__ = ["OneCoreEach", "Options", "Trial", "active_units", "decode", "encode", "finished", "run", "sweep", "train"]

REPORTS, LEAST = 200, 500  # reports in a run, and steps between two: one costs as much as some twenty steps
WATCHED = 1_000  # digits of the validation set whose ELBO and statistics are reported during training
CURVES = ("step", "elbo", "validation_elbo", "entropy", "magnitude", "distance", "share")
IN_FILE = (  # of an evaluation
    "elbo",
    "elbo_standard_error",
    "elbo_monte_carlo_error",
    "log_likelihood",
    "log_likelihood_standard_error",
    "log_likelihood_monte_carlo_error",
    "log_likelihood_bias",
    "effective_sample_size",
    "khat_above",
)
QUANTILES = ("0.01", "0.1", "0.5", "0.9", "0.99")  # of the ELBOs of digits
ONE_AT_A_TIME = threading.Lock()  # in a process: NumPyro's handlers are a global stack, which threads would share
DRAWN = 20  # samples of the trained model that are kept to be looked at


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

    def run(self, name: str, trials: "Iterable[Trial]") -> "dict[Trial, dict[str, Any]]":
        """Sweep over the trials of the table of that name."""
        folder, runs, trials = self.results / name, self.runs / name, list(trials)
        size: dict[str, Any] = {"samples": self.samples, "digits": self.digits}
        begun = [t.name for t in trials if (runs / t.name).exists() and finished(t, folder, **size) is None]
        if begun and not self.resume:
            raise ValueError(f"`resume` must be True to go on with {begun} in {runs}, got False; or take other `runs`.")
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


@runtime_checkable
class Trial(Protocol):
    """One cell of a table: a frozen dataclass, whose fields are all that it depends on."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """What its files are called."""
        ...

    @property
    def steps(self) -> int:
        """Of the optimiser."""
        ...

    @property
    def batch_size(self) -> int:
        """Digits in a batch."""
        ...

    @property
    def seed(self) -> int:
        """Of everything."""
        ...

    def svi(self, digits: BinarizedMNIST) -> SVI:
        """What is trained; its model has the digits at the site `x`."""
        ...

    def measure(self, svi: SVI, params: dict[str, Any], digits: np.ndarray) -> dict[str, Any]:
        """What is worth watching during training, `entropy` among it."""
        ...

    def describe(self, svi: SVI, params: dict[str, Any], digits: np.ndarray) -> dict[str, Any]:
        """What else is worth knowing at the end, for the result file."""
        ...


def train(
    trial: Trial, runs: Path, *, checkpoint_every: float = 300.0, progress: bool | None = None
) -> tuple[SVI, SVIRunResult]:
    """Train; resumes from its checkpoint if there is one.

    Args:
        trial: what to train.
        runs: checkpoints and metrics go to a folder of the trial's name in it.
        checkpoint_every: seconds.
        progress: as for `fit`.
    """
    digits = binarized_mnist()
    svi, watched = trial.svi(digits), digits.valid[:WATCHED]
    result = proxvi.fit(
        svi,
        jax.random.key(trial.seed),
        trial.steps,
        digits.train,
        batch_size=trial.batch_size,
        report_every=max(LEAST, trial.steps // REPORTS),
        progress=progress,
        measure=jax.jit(lambda params: trial.measure(svi, params, watched)),
        metrics_file=runs / trial.name / "metrics.jsonl",
        checkpoints=runs / trial.name / "checkpoints",
        checkpoint_every=checkpoint_every,
        keep=2,
        configuration=asdict(trial),
        validation=watched,
    )
    return svi, result


def run(
    trial: Trial,
    folder: Path,
    runs: Path,
    *,
    samples: int = 5_000,
    digits: int = 10_000,
    checkpoint_every: float = 300.0,
    progress: bool | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Train and evaluate one trial, unless its result file is there already.

    Killed at any time and started again, it goes on from its checkpoint and ends with the same figures. Of two that run
    the same trial at once, one waits and takes the other's result.

    Args:
        trial: what to run.
        folder: where its result file goes.
        runs: where its checkpoints go.
        samples: of the guide for each digit.
        digits: of the validation set, from the first.
        checkpoint_every: seconds.
        progress: whether to show a progress bar; None does on a terminal.
        command: to be named in the result file; None for that of this process.

    Returns:
        The figures in the result file.
    """
    with ONE_AT_A_TIME, _alone(runs / trial.name):
        known = finished(trial, folder, samples=samples, digits=digits)
        if known is not None:
            return known
        svi, result = train(trial, runs, checkpoint_every=checkpoint_every, progress=progress)
        started = time.perf_counter()
        # Training takes the seed's own key, and JAX's `split` is a `fold_in` of small numbers: this is none of them.
        key, sample_key = jax.random.split(jax.random.fold_in(jax.random.key(trial.seed), 1_000_003))
        valid = binarized_mnist().valid[:digits]
        evaluation = proxvi.evaluate(
            key, svi.model, svi.guide, result.params, valid, num_samples=samples, progress=progress
        )
        reports = [line for line in _metrics(trial, runs) if "elbo" in line]
        figures = {
            **{name: getattr(evaluation, name) for name in IN_FILE},
            # Means may hang on a few digits, such as those with a pixel that was never on in training.
            "elbo_quantiles": {q: float(np.quantile(evaluation.elbos, float(q))) for q in QUANTILES},
            "curves": {name: np.array([line[name] for line in reports]) for name in CURVES if name in reports[-1]},
            **trial.describe(svi, result.params, valid),
            "samples": [encode(image) for image in draw(sample_key, svi, result.params, valid[:DRAWN])],
        }
        results.save(
            _path(trial, folder, samples, digits),
            _settings(trial, samples, digits),
            figures,
            seconds=reports[-1]["seconds"] + time.perf_counter() - started,
            by=command,
        )
        known = finished(trial, folder, samples=samples, digits=digits)  # as it is in the file
        assert known is not None
        return known


def finished(trial: Trial, folder: Path, *, samples: int = 5_000, digits: int = 10_000) -> dict[str, Any] | None:
    """The figures in a trial's result file, None if it has not been run."""
    return results.read(_path(trial, folder, samples, digits), _settings(trial, samples, digits))


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
            time.sleep(min(1.0, 0.1 * len(jobs)))
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


def draw(key: Any, svi: SVI, params: dict[str, Any], like: np.ndarray) -> np.ndarray:
    """Probabilities of the pixels of as many digits, sampled from the trained model, as `like` has."""
    model = handlers.substitute(handlers.seed(handlers.uncondition(svi.model), key), data=params)
    with jax.numpy_rank_promotion("allow"):  # NumPyro broadcasts a prior over the rows
        return np.asarray(handlers.trace(model).get_trace(like)["x"]["fn"].mean)


def active_units(means: Any) -> int:
    """How many latent variables depend on the data: the variance of their means over rows is above 0.01 (Burda)."""
    return int(np.sum(np.var(np.asarray(means), axis=0) > 0.01))


def decode(image: str) -> np.ndarray:
    """An image of a result file, as probabilities."""
    return np.frombuffer(base64.b64decode(image), np.uint8) / 255


def encode(image: np.ndarray) -> str:
    """An image of probabilities for a result file, a byte a pixel."""
    return base64.b64encode(np.round(255 * image).astype(np.uint8).tobytes()).decode()


def _path(trial: Trial, folder: Path, samples: int, digits: int) -> Path:
    return folder / f"{trial.name}-{digits}x{samples}.json"


def _settings(trial: Trial, samples: int, digits: int) -> dict[str, Any]:
    return {**asdict(trial), "samples": samples, "digits": digits}


def _metrics(trial: Trial, runs: Path) -> list[dict[str, Any]]:
    path = runs / trial.name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _reached(trial: Trial, runs: Path) -> int:
    try:
        return max((line["step"] for line in _metrics(trial, runs)), default=0)
    except json.JSONDecodeError:  # a line is being written
        return 0


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here; the lock goes with the process that holds it, however that ends."""
    import fcntl  # not on Windows, where the rest of the command line runs

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    )
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
