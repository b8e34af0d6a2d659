"""The problems of the benchmark, a file each. A new one is a file here with a function `problem(scale)`."""

import csv
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import ELBO, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Problem:
    """An inference whose result may depend on its start.

    Args:
        model: of NumPyro.
        data: its arguments.
        guide: None for `AutoNormal`.
        scale: a factor for the spread of a start: of `AutoNormal`, its initial standard deviations, and not the places
            of its means; of a guide of its own, the spread with which weights or means are drawn.
        steps: gradient steps of one user's whole procedure.
        rate: of Adam, with a cosine decay over a run.
        batch_size: None for all rows.
        loss: minus the ELBO, and its gradient.
        statistic: what the constraints hold.
        particles: samples for the final ELBO.
        control: whether this is a problem without luck, where a remedy should cost nothing.
    """

    model: Callable[..., None]
    data: tuple[Any, ...] = ()
    guide: Callable[..., Any] | None = None
    scale: float = 1.0
    steps: int = 12_000
    rate: float = 0.02
    batch_size: int | None = None
    loss: ELBO = field(default_factory=Trace_ELBO)
    statistic: Callable[..., Any] = proxvi.entropy
    particles: int = 1_000
    control: bool = False

    def new_guide(self, **options: Any) -> Any:
        """A guide that was never called."""
        return self.guide or AutoNormal(self.model, init_scale=0.1 * self.scale, **options)


def names() -> list[str]:
    """All problems."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str, scale: float = 1.0) -> Problem:
    """A problem by the name of its file."""
    return importlib.import_module(f"{__name__}.{name}").problem(scale)


def about(name: str) -> str:
    """What its file says of a problem, without the full stop."""
    return (importlib.import_module(f"{__name__}.{name}").__doc__ or "").strip().removesuffix(".")


def columns(file: str, *wanted: str) -> list[np.ndarray]:
    """Columns of numbers in a CSV file, all of them if none is named."""
    with (DATA / file).open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [np.array([float(row[name]) for row in rows]) for name in wanted or rows[0]]


def standardized(x: np.ndarray) -> jax.Array:
    """With mean 0 and standard deviation 1."""
    return jnp.asarray((x - x.mean(0)) / x.std(0))


def unit_interval(x: np.ndarray) -> jax.Array:
    """From 0 to 1."""
    return jnp.asarray((x - x.min()) / (x.max() - x.min()))


def digits() -> jax.Array:
    """1,500 handwritten digits of 64 binary pixels."""
    packed = [np.frombuffer(bytes.fromhex(line), np.uint8) for line in (DATA / "digits.txt").read_text().split()]
    return jnp.asarray(np.unpackbits(np.array(packed), axis=1), jnp.float32)[:1_500]


def reuters(words: int) -> jax.Array:
    """Counts of the most common words in 320 of 395 articles."""
    lines = (DATA / "reuters.ldac").read_text().splitlines()
    counts = np.zeros((len(lines), 4_258))
    for row, line in enumerate(lines):
        for pair in line.split()[1:]:
            word, count = pair.split(":")
            counts[row, int(word)] = int(count)
    common = jnp.asarray(counts[:, np.argsort(-counts.sum(0), kind="stable")[:words]], jnp.float32)
    order = np.random.default_rng(0).permutation(len(lines))
    return common[order[:320]]
