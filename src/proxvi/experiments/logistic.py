"""The paper's footnote: Bayesian logistic regression has one mode, so that every method must end at the same ELBO."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from scipy.optimize import minimize

import proxvi
from proxvi.experiments import results
from proxvi.experiments.descent import descend
from proxvi.models import logistic
from proxvi.models.logistic import Weights
from proxvi.starts import multistart

__all__ = ["METHODS", "Settings", "reproduce"]


@dataclass(frozen=True)
class Settings:
    """What one method is run with.

    Args:
        method: its name, one of `METHODS`.
        starts: how many, at random.
        steps: of Adam.
        learning_rate: of Adam, at the start; it falls to 0 as a cosine.
        gamma: the magnitude falls by this factor by half-time, as does the temperature of annealing.
        seed: of the starts.
    """

    method: str
    starts: int = 10
    steps: int = 5_000
    learning_rate: float = 0.05
    gamma: float = 1e-10
    seed: int = 0


Data = tuple[Array, Array]
Method = Callable[[Settings, Weights, Data], tuple[Weights, Array]]


def _adam(s: Settings) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(s.learning_rate, s.steps), b2=0.99)


def _decay(s: Settings) -> optax.Schedule:
    return optax.exponential_decay(1.0, s.steps // 2, s.gamma)


def _run(
    s: Settings, optimizer: optax.GradientTransformation, params: Weights, data: Data, temperature: Any = None
) -> tuple[Weights, Array]:
    return descend(lambda p, heat: logistic.elbo(p, *data, heat), optimizer, params, s.steps, temperature)


def _annealing(s: Settings, params: Weights, data: Data) -> tuple[Weights, Array]:
    first, decay = jnp.abs(logistic.elbo(params, *data)), _decay(s)
    return _run(s, _adam(s), params, data, lambda t: jnp.maximum(1.0, first * decay(t)))


def _proximity(statistic: Callable[[Any], Any], **options: Any) -> Method:
    def method(s: Settings, params: Weights, data: Data) -> tuple[Weights, Array]:
        link = proxvi.proximity(statistic, magnitude=_decay(s), **options)
        return _run(s, optax.chain(link, _adam(s)), params, data)

    return method


METHODS: dict[str, Method] = {
    "VI": lambda s, params, data: _run(s, _adam(s), params, data),
    "annealing": _annealing,
    "PVI, entropy": _proximity(lambda params: proxvi.entropy(logistic.posterior(params))),
    "PVI, KL": _proximity(lambda params: proxvi.kl_to_prior(logistic.posterior(params), logistic.prior(params))),
    "PVI, mean/variance": _proximity(lambda params: proxvi.mean_variance(logistic.posterior(params))),
    "PVI, parameters": _proximity(proxvi.identity),
    "KL-proximal steps": _proximity(logistic.posterior, distance=proxvi.kl),
}


def data() -> Data:
    """The breast cancer data of scikit-learn, our choice: 569 rows of 30 standardised features and a constant."""
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError as error:
        raise ImportError("the data come with scikit-learn: pip install 'proxvi[cli]'.") from error
    found: Any = load_breast_cancer()
    x = (found.data - found.data.mean(0)) / found.data.std(0)
    return jnp.asarray(np.column_stack([x, np.ones(len(x))]), jnp.float32), jnp.asarray(found.target, jnp.float32)


def measure(s: Settings) -> dict[str, Any]:
    """The final ELBOs of one method."""
    rows = data()
    mean_key, scale_key = jax.random.split(jax.random.key(s.seed))
    shape = (s.starts, rows[0].shape[1])
    starts = Weights(3.0 * jax.random.normal(mean_key, shape), jax.random.normal(scale_key, shape) - 1.0)
    return {"elbos": np.asarray(multistart(lambda start: METHODS[s.method](s, start, rows), starts).elbos)}


def best_known() -> float:
    """The optimum by another road: L-BFGS in double precision, from the prior."""
    with jax.enable_x64(True):
        x, y = (jnp.asarray(part, jnp.float64) for part in data())
        width = x.shape[1]
        loss = jax.jit(jax.value_and_grad(lambda v: -logistic.elbo(Weights(v[:width], v[width:]), x, y)))
        found = minimize(loss, np.zeros(2 * width), jac=True, method="L-BFGS-B", options={"gtol": 1e-9, "ftol": 0.0})
    return -float(found.fun)


def reproduce(
    folder: Path = Path("results/logistic-regression"), *, starts: int = 10, steps: int = 5_000, seed: int = 0
) -> str:
    """Bayesian logistic regression, the control case: one mode, at which all methods must meet.

    Args:
        folder: where the table and the result files go; what is there already is not run again.
        starts: how many, at random.
        steps: of Adam.
        seed: of the starts.

    Returns:
        The table.
    """
    s = Settings("VI", starts=starts, steps=steps, seed=seed)
    figures = results.measured(folder, [replace(s, method=name) for name in METHODS], measure)
    best = best_known()
    lines = ["| method | starts | best ELBO | worst ELBO | worst below L-BFGS |", "|---|---|---|---|---|"]
    for name, elbos in zip(METHODS, (one["elbos"] for one in figures), strict=True):
        row = " | ".join(_signed(x) for x in (np.max(elbos), np.min(elbos), best - np.min(elbos)))
        lines.append(f"| {name} | {len(elbos)} | {row} |")
    title = f"569 rows, 31 weights, {steps:,} steps; L-BFGS in double precision ends at {_signed(best)}"
    text = "\n".join([title, "", *lines])
    (folder / "table.md").write_text(text + "\n")
    return text


def _signed(x: float) -> str:
    return f"{round(x, 3) + 0.0:.3f}".replace("-", "−")  # no minus before 0
