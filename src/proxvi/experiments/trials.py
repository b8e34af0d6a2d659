"""Trials: train, evaluate, write one result file; killed at any time, each goes on where it was."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult

import proxvi
from proxvi.datasets import BinarizedMNIST, binarized_mnist
from proxvi.experiments import results

__all__ = [
    "Trial",
    "active_units",
    "approximation",
    "decode",
    "encode",
    "finished",
    "metrics",
    "run",
    "train",
]

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
    def gamma(self) -> float:
        """The factor by which a magnitude or temperature falls over the steps."""
        ...

    @property
    def decay(self) -> float:
        """Of the moving average that a constraint holds on to."""
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
    trial: Trial, digits: BinarizedMNIST, runs: Path, *, checkpoint_every: float = 300.0, progress: bool | None = None
) -> tuple[SVI, SVIRunResult]:
    """Train; resumes from its checkpoint if there is one.

    Args:
        trial: what to train.
        digits: to train on, and to look at on the way.
        runs: checkpoints and metrics go to a folder of the trial's name in it.
        checkpoint_every: seconds.
        progress: as for `fit`.
    """
    svi, watched = trial.svi(digits), digits.valid[:WATCHED]
    result = proxvi.fit(
        svi,
        jax.random.key(trial.seed),
        trial.steps,
        digits.train,
        batch_size=trial.batch_size,
        checkpointing=proxvi.Checkpointing(
            runs / trial.name / "checkpoints", every=checkpoint_every, keep=2, configuration=asdict(trial)
        ),
        reporting=proxvi.Reporting(
            every=max(LEAST, trial.steps // REPORTS),
            progress=progress,
            measure=jax.jit(lambda params: trial.measure(svi, params, watched)),
            metrics_file=runs / trial.name / "metrics.jsonl",
        ),
        validation=proxvi.Validation(watched),
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
        data = binarized_mnist()
        svi, result = train(trial, data, runs, checkpoint_every=checkpoint_every, progress=progress)
        started = time.perf_counter()
        # Training takes the seed's own key, and JAX's `split` is a `fold_in` of small numbers: this is none of them.
        key, sample_key = jax.random.split(jax.random.fold_in(jax.random.key(trial.seed), 1_000_003))
        valid = data.valid[:digits]
        evaluation = proxvi.evaluate(
            key, svi.model, svi.guide, result.params, valid, num_samples=samples, progress=progress
        )
        reports = [line for line in metrics(trial, runs) if "elbo" in line]
        figures = {
            **{name: getattr(evaluation, name) for name in IN_FILE},
            # Means may hang on a few digits, such as those with a pixel that was never on in training.
            "elbo_quantiles": {q: float(np.quantile(evaluation.elbos, float(q))) for q in QUANTILES},
            "curves": {
                name: np.array([line[name] for line in reports], float) for name in CURVES if name in reports[-1]
            },
            **trial.describe(svi, result.params, valid),
            "samples": [encode(image) for image in draw(sample_key, svi, result.params, valid[:DRAWN])],
        }
        return results.save(
            _path(trial, folder, samples, digits),
            _settings(trial, samples, digits),
            figures,
            seconds=reports[-1]["seconds"] + time.perf_counter() - started,
            by=command,
        )


def finished(trial: Trial, folder: Path, *, samples: int = 5_000, digits: int = 10_000) -> dict[str, Any] | None:
    """The figures in a trial's result file, None if it has not been run."""
    return results.read(_path(trial, folder, samples, digits), _settings(trial, samples, digits))


def draw(key: Any, svi: SVI, params: dict[str, Any], like: np.ndarray) -> np.ndarray:
    """Probabilities of the pixels of as many digits, sampled from the trained model, as `like` has."""
    model = handlers.substitute(handlers.seed(handlers.uncondition(svi.model), key), data=params)
    with jax.numpy_rank_promotion("allow"):  # NumPyro broadcasts a prior over the rows
        return np.asarray(handlers.trace(model).get_trace(like)["x"]["fn"].mean)


def approximation(svi: SVI, params: dict[str, Any], digits: np.ndarray, site: str) -> Any:
    """The distribution of a site of the trained guide; of layers above the first, given a sample of those below."""
    guide = handlers.substitute(handlers.seed(svi.guide, jax.random.key(0)), data=params)
    return handlers.trace(guide).get_trace(digits)[site]["fn"]


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


def metrics(trial: Trial, runs: Path) -> list[dict[str, Any]]:
    """What training has reported so far, a line each."""
    path = runs / trial.name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here; the lock goes with the process that holds it, however that ends."""
    import fcntl  # not on Windows, where the rest of the command line runs

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
