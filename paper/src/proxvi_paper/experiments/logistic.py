"""The paper's footnote: Bayesian logistic regression has one mode, so that every method must end at the same ELBO."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer

import proxvi
from proxvi._typing import Statistic
from proxvi_paper.experiments import tables
from proxvi_paper.experiments.descent import StartsTrial, descend
from proxvi_paper.models import logistic
from proxvi_paper.models.logistic import Weights

__all__ = ["METHODS", "Grid", "Trial", "report"]


@dataclass(frozen=True)
class Trial(StartsTrial):
    """One method from all starts.

    Args:
        method: one of `METHODS`.
        starts: how many, at random.
        steps: of Adam.
        learning_rate: of Adam, at the start; it falls to 0 as a cosine.
        gamma: the magnitude falls by this factor in the first half of the run, as does the temperature of annealing.
        seed: of the starts.
    """

    starts: int = 10
    steps: int = 5_000
    learning_rate: float = 0.05
    gamma: float = 1e-10
    seed: int = 0

    def figures(self) -> dict[str, Any]:
        """The final ELBOs."""
        rows = data()
        mean_key, scale_key = jax.random.split(jax.random.key(self.seed))
        shape = (self.starts, rows[0].shape[1])
        starts = Weights(3.0 * jax.random.normal(mean_key, shape), jax.random.normal(scale_key, shape) - 1.0)
        return {"elbos": proxvi.luck(lambda start: METHODS[self.method](self, start, rows), starts=starts).elbos}


Data = tuple[Array, Array]
Method = Callable[[Trial, Weights, Data], tuple[Weights, Array]]


def _decay(trial: Trial) -> optax.Schedule:
    return optax.exponential_decay(1.0, trial.steps // 2, trial.gamma)


def _descend(
    trial: Trial,
    params: Weights,
    data: Data,
    *constraints: proxvi.Proximity,
    annealing: optax.Schedule | None = None,
) -> tuple[Weights, Array]:
    """Adam with these constraints."""
    adam = optax.adam(optax.cosine_decay_schedule(trial.learning_rate, trial.steps), b2=0.99)
    optimizer = proxvi.proximity(adam, constraints) if constraints else adam
    return descend(lambda p, heat: logistic.elbo(p, *data, heat), optimizer, params, trial.steps, annealing)


def _proximity(statistic: Statistic, **options: Any) -> Method:
    def method(trial: Trial, params: Weights, data: Data) -> tuple[Weights, Array]:
        return _descend(trial, params, data, proxvi.Proximity(statistic, magnitude=_decay(trial), **options))

    return method


METHODS: dict[str, Method] = {
    "VI": _descend,
    "annealing": lambda trial, params, data: _descend(trial, params, data, annealing=_decay(trial)),
    "PVI, entropy": _proximity(lambda params: proxvi.entropy(logistic.posterior(params))),
    "PVI, KL": _proximity(lambda params: proxvi.kl_to_prior(logistic.posterior(params), logistic.prior(params))),
    "PVI, mean/variance": _proximity(lambda params: proxvi.mean_variance(logistic.posterior(params))),
    "PVI, parameters": _proximity(proxvi.identity),
    "KL-proximal steps": _proximity(logistic.posterior, distance=proxvi.kl),
}


def data() -> Data:
    """The breast cancer data of scikit-learn, our choice: 569 rows of 30 standardised features and a constant."""
    found: Any = load_breast_cancer()
    x = (found.data - found.data.mean(0)) / found.data.std(0)
    return jnp.asarray(np.column_stack([x, np.ones(len(x))]), jnp.float32), jnp.asarray(found.target, jnp.float32)


def best_known() -> float:
    """The optimum by another optimiser: L-BFGS in double precision, from the prior."""
    with jax.enable_x64(True):
        x, y = (jnp.asarray(part, jnp.float64) for part in data())
        width = x.shape[1]
        loss = jax.jit(jax.value_and_grad(lambda v: -logistic.elbo(Weights(v[:width], v[width:]), x, y)))
        found = minimize(loss, np.zeros(2 * width), jac=True, method="L-BFGS-B", options={"gtol": 1e-9, "ftol": 0.0})
    return -float(found.fun)


@dataclass(frozen=True)
class Grid:
    """Bayesian logistic regression, the control case: one mode, at which all methods must end.

    Args:
        starts: how many, at random.
        steps: of Adam.
        seed: of the starts.
    """

    starts: int = 10
    steps: int = 5_000
    seed: int = 0

    def trials(self) -> list[Trial]:
        """One for each method."""
        return [Trial(name, self.starts, self.steps, seed=self.seed) for name in METHODS]


@tables.report
def report(records: list[tables.Record], folder: Path) -> str:
    """The best and the worst ELBO of each method, beside that of L-BFGS."""
    del folder  # no pictures
    common, best, rows = tables.usual(records, varied=["method"]), best_known(), []
    order = list(METHODS)
    for record in sorted(records, key=lambda record: order.index(record["settings"]["method"])):
        settings, elbos = record["settings"], record["figures"]["elbos"]
        ends = (_signed(x) for x in (np.max(elbos), np.min(elbos), best - np.min(elbos)))
        rows.append((settings["method"] + tables.unusual(settings, common), str(len(elbos)), *ends))
    title = f"569 rows, 31 weights, {common['steps']:,} steps; L-BFGS in double precision ends at {_signed(best)}"
    return f"{title}\n\n{tables.markdown(('method', 'starts', 'best ELBO', 'worst ELBO', 'worst below L-BFGS'), rows)}"


def _signed(x: float) -> str:
    return f"{round(x, 3) + 0.0:.3f}".replace("-", "−")  # no minus before 0
