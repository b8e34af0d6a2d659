"""Trials of tables 1 to 3: train a model of binarised MNIST, evaluate it, keep its curves and samples."""

import base64
import difflib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult

import proxvi
from proxvi._typing import Params, Statistic
from proxvi._validation import check_integer, check_number
from proxvi_paper.datasets import BinarizedMNIST, binarized_mnist
from proxvi_paper.experiments import results
from proxvi_paper.experiments.trials import Measurement, metrics

__all__ = ["DigitGrid", "DigitTrial", "active_units", "approximation", "check_known", "decode", "encode", "train"]

REPORTS, LEAST = 200, 500  # reports in a run, and steps between two: a report costs as much as about twenty steps
SPEED_LIMIT = "PVI, speed limit"  # a method that the paper does not have
WATCHED = 1_000  # validation digits whose ELBO and statistics are reported during training
CURVES = ("step", "elbo", "validation_elbo", "entropy", "magnitude", "distance", "share", "pull", "shortfall")
EVALUATED = (
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
SAMPLED = 20  # samples of the trained model in the result file


@dataclass(frozen=True, kw_only=True)
class DigitTrial:
    """What the trials of tables 1 to 3 have in common. A subclass adds the settings of its model.

    Args:
        method: one of the table's methods.
        steps: of Adam; the decay of the magnitude or temperature is spread over them.
        gamma: the factor by which the magnitude or temperature falls over a run.
        decay: of the moving average.
        learning_rate: of Adam.
        batch_size: digits in a batch.
        seed: of everything.
        samples: of the guide for each digit, in the evaluation.
        digits: of the validation set, from the first, in the evaluation.
    """

    all_devices: ClassVar[bool] = False
    training_settings: ClassVar[tuple[str, ...]]  # all but `samples` and `digits`; file names hash them in this order

    method: str
    steps: int
    gamma: float = 1e-10
    decay: float = 0.9999
    learning_rate: float = 1e-3
    batch_size: int
    seed: int = 0
    samples: int = 5_000
    digits: int = 10_000

    @property
    def title(self) -> str:
        """The first part of its name."""
        raise NotImplementedError

    def svi(self, digits: BinarizedMNIST) -> SVI:
        """What is trained; the model has the digits at the site `x`."""
        raise NotImplementedError

    def watch(self, svi: SVI, params: Params, digits: np.ndarray) -> dict[str, Any]:
        """Values for the curves of training, `entropy` among them."""
        raise NotImplementedError

    def describe(self, svi: SVI, params: Params, digits: np.ndarray) -> dict[str, Any]:
        """More figures of the trained model, for the result file."""
        raise NotImplementedError

    @property
    def training(self) -> dict[str, Any]:
        """The settings that training depends on."""
        return {name: getattr(self, name) for name in self.training_settings}

    @property
    def name(self) -> str:
        """The name of its folder; trials that differ only in their evaluation share the checkpoints."""
        return results.name(self.title, self.training)

    @property
    def file_name(self) -> str:
        """The name of its result file."""
        return f"{self.name}-{self.digits}x{self.samples}.json"

    def schedule(self) -> optax.Schedule:
        """The paper's schedule of the magnitude or temperature: `γ^{t/T}`."""
        return optax.exponential_decay(1.0, self.steps, self.gamma)

    def proximity(self, statistic: Statistic) -> proxvi.Proximity:
        """The constraint of the paper's experiments: in units of `|ELBO_0|`, close to the statistic's own average."""
        return proxvi.Proximity(statistic, magnitude=self.schedule(), reference=proxvi.statistic_average(self.decay))

    def measure(self, folder: Path, *, checkpoint_every: float, progress: bool | None) -> Measurement:
        """Train, then evaluate."""
        data = binarized_mnist()
        svi, trained = train(self, data, folder, checkpoint_every=checkpoint_every, progress=progress)
        reports = self._reports(folder)
        began = time.perf_counter()
        # Training uses the key of the seed itself, and JAX's `split` is a `fold_in` of small numbers. This is another.
        key, sample_key = jax.random.split(jax.random.fold_in(jax.random.key(self.seed), 1_000_003))
        valid = data.valid[: self.digits]
        evaluation = proxvi.evaluate(
            key, svi.model, svi.guide, trained.params, valid, num_samples=self.samples, progress=progress
        )
        figures = {
            **{name: getattr(evaluation, name) for name in EVALUATED},
            # A mean may depend on a few digits, such as those with a pixel that was never on in training.
            "elbo_quantiles": {q: float(np.quantile(evaluation.elbos, float(q))) for q in QUANTILES},
            "curves": {
                name: np.array([line[name] for line in reports], float) for name in CURVES if name in reports[-1]
            },
            **self.describe(svi, trained.params, valid),
            "samples": [encode(image) for image in _draw(sample_key, svi, trained.params, valid[:SAMPLED])],
        }
        return Measurement(figures, reports[-1]["seconds"] + time.perf_counter() - began)

    @property
    def report_every(self) -> int:
        """Steps from one report to the next."""
        return max(LEAST, self.steps // REPORTS)

    def _reports(self, folder: Path) -> list[dict[str, Any]]:
        """The reports of a finished training, which have the curves."""
        reports, wanted = [line for line in metrics(folder) if "elbo" in line], -(-self.steps // self.report_every)
        if len(reports) < wanted:
            raise OSError(
                f"`runs` must hold the metrics of a trial beside its checkpoints, got {len(reports)} of {wanted} "
                f"reports in {folder / 'metrics.jsonl'}; put the file back, or remove the folder to train again."
            )
        return reports


def train(
    trial: DigitTrial, digits: BinarizedMNIST, folder: Path, *, checkpoint_every: float, progress: bool | None
) -> tuple[SVI, SVIRunResult]:
    """Train, or resume from the checkpoint in `folder` if there is one."""
    svi, watched = trial.svi(digits), digits.valid[:WATCHED]
    result = proxvi.fit(
        svi,
        jax.random.key(trial.seed),
        trial.steps,
        digits.train,
        batch_size=trial.batch_size,
        checkpointing=proxvi.Checkpointing(
            folder / "checkpoints", every=checkpoint_every, keep=2, configuration=trial.training
        ),
        reporting=proxvi.Reporting(
            every=trial.report_every,
            progress=progress,
            measure=jax.jit(lambda params: trial.watch(svi, params, watched)),
            metrics_file=folder / "metrics.jsonl",
        ),
        validation=proxvi.Validation(watched),
    )
    return svi, result


@dataclass(frozen=True, kw_only=True)
class DigitGrid:
    """The options that tables 1 to 3 have in common.

    Args:
        scale: share of the paper's number of steps; the decay of the magnitude is spread over them.
        methods: which methods.
        seeds: of everything in a trial.
        samples: of the guide for each digit, in the evaluation.
        digits: of the validation set, from the first, in the evaluation.
    """

    known_methods: ClassVar[Mapping[str, Any]]
    full_steps: ClassVar[int]  # the paper's

    scale: float = 1.0
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    samples: int = 5_000
    digits: int = 10_000

    def __post_init__(self) -> None:
        """Check the options before hours of training."""
        check_number("scale", self.scale, above=0.0, remedy=f"1 is the paper's {self.full_steps:,} steps")
        check_known("methods", self.methods, self.known_methods)
        check_integer("samples", self.samples, at_least=2, remedy="the error comes from their spread")
        check_integer("digits", self.digits, remedy="10,000 is all of the validation set")
        if self.digits > 10_000:
            raise ValueError(
                f"`digits` must be at most 10,000, all of the validation set, got {self.digits}; lower it."
            )

    @property
    def common(self) -> dict[str, Any]:
        """The settings that all trials of the grid share."""
        return {
            "steps": max(1, round(self.scale * self.full_steps)),
            "samples": self.samples,
            "digits": self.digits,
        }


def check_known(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that are not among the known ones."""
    by_lower_case = {word.lower(): word for word in known}
    for word in given:
        if word not in by_lower_case.values():
            near = difflib.get_close_matches(word.lower(), by_lower_case, n=1)
            guess = f"did you mean {by_lower_case[near[0]]!r}?" if near else "mind the case."
            raise ValueError(f"`{name}` must be of {list(known)}, got {word!r}; {guess}")


def approximation(svi: SVI, params: Params, digits: np.ndarray, site: str) -> Any:
    """The distribution of a site of the trained guide; above the first layer, given a sample of the layers below."""
    guide = handlers.substitute(handlers.seed(svi.guide, jax.random.key(0)), data=params)
    return handlers.trace(guide).get_trace(digits)[site]["fn"]


def active_units(means: ArrayLike) -> int:
    """How many latent variables depend on the data: the variance of their means over rows is above 0.01 (Burda)."""
    return int(np.sum(np.var(np.asarray(means), axis=0) > 0.01))


def decode(images: Iterable[str]) -> np.ndarray:
    """Images of a result file as probabilities, a row each."""
    return np.array([np.frombuffer(base64.b64decode(image), np.uint8) / 255 for image in images])


def encode(image: np.ndarray) -> str:
    """An image of probabilities for a result file, a byte for each pixel."""
    return base64.b64encode(np.round(255 * image).astype(np.uint8).tobytes()).decode()


def _draw(key: Array, svi: SVI, params: Params, like: np.ndarray) -> np.ndarray:
    """Probabilities of the pixels of samples from the trained model, as many as `like` has rows."""
    model = handlers.substitute(handlers.seed(handlers.uncondition(svi.model), key), data=params)
    with jax.numpy_rank_promotion("allow"):  # NumPyro broadcasts a prior over the rows
        return np.asarray(handlers.trace(model).get_trace(like)["x"]["fn"].mean)
