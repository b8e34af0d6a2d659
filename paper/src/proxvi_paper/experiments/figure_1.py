"""Figure 1: the Bernoulli factor model from a ring of starts, by every method."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jax import Array
from jax.typing import ArrayLike

import proxvi
from proxvi._typing import Statistic, Tree
from proxvi_paper import plots
from proxvi_paper.experiments import tables
from proxvi_paper.experiments.descent import StartsTrial, descend, scan
from proxvi_paper.models import factor
from proxvi_paper.models.factor import Factor

__all__ = ["METHODS", "Grid", "SettingsGrid", "Trial", "report", "report_settings"]

TRUTH = jnp.array([5.0, 5.0])
RADIUS = 100.0
SLOW = ("PVI, entropy, Algorithm 1",)  # ten inner iterations a step: on a tenth of the data sets


@dataclass(frozen=True)
class Trial(StartsTrial):
    """One method from all starts on all data sets.

    Args:
        method: one of `METHODS` or `VARIANTS`.
        data_sets: how many data sets of 100 points.
        starts: how many starts on the ring, for each data set.
        steps: of the optimiser.
        learning_rate: of Adam; for Algorithm 1, which is gradient descent, a tenth of it.
        gamma: the magnitude falls by this factor over the run, as does the temperature of annealing.
        seed: of the data sets.
    """

    data_sets: int = 10
    starts: int = 100
    steps: int = 10_000
    learning_rate: float = 0.1
    gamma: float = 1e-10
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the number of starts."""
        # Of a multiple of 8, two starts have equal means: a saddle point that no gradient leaves.
        if self.starts % 8 == 0:
            other = self.starts + 1
            raise ValueError(
                f"`starts` must not be a multiple of 8, got {self.starts}; {other} has no start on the saddle."
            )

    def figures(self) -> dict[str, Any]:
        """Where all starts end, and the shares that end well."""
        method, x = (METHODS | VARIANTS)[self.method], data_sets(self)
        means = jnp.tile(ring(self.starts), (self.data_sets, 1))
        ended = proxvi.luck(
            lambda start: method(self, factor.start(start[0]), start[1]),
            starts=(means, jnp.repeat(x, self.starts, axis=0)),
        )
        shape = (self.data_sets, self.starts)
        elbos, means = ended.elbos.astype(np.float32).reshape(shape), np.asarray(ended.params.means).reshape(*shape, -1)
        reference = np.asarray(from_the_truth(replace(self, method="VI")))
        return {**judge(elbos, means, reference), "reference": reference, "elbos": elbos, "means": means}


Method = Callable[[Trial, Factor, Array], tuple[Factor, Array]]


def _adam(trial: Trial, b2: float = 0.99) -> optax.GradientTransformation:
    # With Adam's default b2 of 0.999 the large early gradients of the constraint keep the steps small for thousands of
    # steps. In a run of ten thousand the last assignments then do not arrive: see the study of the settings.
    return optax.adam(trial.learning_rate, b2=b2)


def _decay(trial: Trial) -> optax.Schedule:
    return optax.exponential_decay(1.0, trial.steps, trial.gamma)


def _descend(
    trial: Trial,
    optimizer: optax.GradientTransformation,
    params: Factor,
    x: Array,
    annealing: optax.Schedule | None = None,
) -> tuple[Factor, Array]:
    return descend(lambda params, heat: factor.elbo(params, x, heat), optimizer, params, trial.steps, annealing)


def _ascend(trial: Trial, params: Factor, x: Array, magnitude: optax.Schedule) -> tuple[Factor, Array]:
    """Coordinate ascent on the logits, kept close to their moving average; Adam on the means."""
    optimizer, first = _adam(trial), jnp.abs(factor.elbo(params, x))

    def step(carry: Tree, t: Array) -> tuple[Tree, None]:
        params, state, reference = carry
        for k in range(params.means.shape[0]):
            logits = factor.proximal_coordinate_update(params, x, k, reference[k], first * magnitude(t))
            params = params._replace(logits=params.logits.at[k].set(logits))
        updates, state = optimizer.update(-factor.mean_gradient(params, x), state)
        reference = 0.9999 * reference + (1 - 0.9999) * params.logits
        return (params._replace(means=params.means + updates), state, reference), None

    start = (params, optimizer.init(params.means), params.logits)
    return scan(step, start, lambda params: factor.elbo(params, x), trial.steps)


def _proximity(statistic: Statistic, *, b2: float = 0.99, **options: Any) -> Method:
    def method(trial: Trial, params: Factor, x: Array) -> tuple[Factor, Array]:
        constraint = proxvi.Proximity(statistic, magnitude=_decay(trial), **options)
        return _descend(trial, proxvi.proximity(_adam(trial, b2), constraint), params, x)

    return method


def _speed_limit(b2: float) -> Method:
    def method(trial: Trial, params: Factor, x: Array) -> tuple[Factor, Array]:
        limit = proxvi.speed_limit(_entropy, over=trial.steps / 3)
        return _descend(trial, optax.chain(_adam(trial, b2), limit), params, x)

    return method


def _inner_loop(trial: Trial, params: Factor, x: Array) -> tuple[Factor, Array]:
    constraint = proxvi.Proximity(_entropy, magnitude=_decay(trial))
    rate = trial.learning_rate / 10
    return _descend(
        trial, proxvi.proximity_inner_loop(jax.random.key(0), rate, constraint, max_iterations=10), params, x
    )


def _entropy(params: Factor) -> Array:
    return proxvi.entropy(factor.posterior(params))


METHODS: dict[str, Method] = {
    "VI": lambda trial, params, x: _descend(trial, _adam(trial), params, x),
    "coordinate ascent": lambda trial, params, x: _ascend(trial, params, x, lambda t: 0.0),
    "annealing": lambda trial, params, x: _descend(trial, _adam(trial), params, x, _decay(trial)),
    "PVI, entropy": _proximity(_entropy),
    "PVI, entropy, statistic average": _proximity(_entropy, reference=proxvi.statistic_average()),
    "PVI, entropy, Algorithm 1": _inner_loop,
    "PVI, mean/variance": _proximity(lambda params: proxvi.mean_variance(factor.posterior(params))),
    "PVI, KL distance": _proximity(factor.posterior, distance=proxvi.kl),
    "PVI, KL distance, coordinate ascent": lambda trial, params, x: _ascend(trial, params, x, _decay(trial)),
    "PVI, speed limit": _speed_limit(b2=0.99),
    "PVI, speed limit, Adam's default b2": _speed_limit(b2=0.999),
}
# For the study of the settings.
VARIANTS: dict[str, Method] = {
    "PVI, entropy, Adam's default b2": _proximity(_entropy, b2=0.999),
    "PVI, entropy, mean over the points": _proximity(
        lambda params: proxvi.entropy(dist.Bernoulli(logits=params.logits.T).to_event(1))
    ),
}


def ring(count: int) -> Array:
    """Starts on a circle around the truth."""
    angles = 2 * jnp.pi * jnp.arange(count) / count
    return TRUTH[None] + RADIUS * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)


def data_sets(trial: Trial) -> Array:
    """One data set of 100 points a row."""
    keys = jax.random.split(jax.random.key(trial.seed), trial.data_sets)
    return jax.vmap(lambda key: factor.simulate(key, TRUTH))(keys)


@cache  # the same for every method
def from_the_truth(trial: Trial) -> Array:
    """The ELBO of VI started at the truth, one for each data set. Other starts are compared with it.

    From equal means the two features would stay equal forever, which is a saddle point more than a hundred nats lower.
    So the means start 0.002 apart.
    """
    means = TRUTH + jnp.array([1e-3, -1e-3])
    _, traces = jax.jit(jax.vmap(lambda x: METHODS["VI"](trial, factor.start(means), x)))(data_sets(trial))
    return traces[:, -1]


def judge(elbos: ArrayLike, means: ArrayLike, reference: ArrayLike) -> dict[str, float]:
    """How the starts end, compared with VI that started at the truth.

    Returns:
        `near`: the share of starts with both means within 1 of the truth. `free`: the share that is not trapped, that
        is: no more than 2 nats below. `median_gap`, `worst_gap`: nats below.
    """
    off = np.abs(np.asarray(means) - np.asarray(TRUTH)).max(axis=-1)
    gap = np.asarray(reference)[:, None] - np.asarray(elbos)
    return {
        "near": float(np.mean(off <= 1.0)),
        "free": float(np.mean(gap <= 2.0)),
        "median_gap": float(np.median(gap)),
        "worst_gap": float(np.max(gap)),
    }


def table(figures: dict[str, dict[str, Any]]) -> str:
    """A row for each method, in Markdown."""
    head = "method", "starts", "within 1 of the truth", "not trapped", "nats below VI from the truth: median", "worst"
    rows = [
        (
            *(name, f"{np.size(f['elbos']):,}", f"{f['near']:.1%}", f"{f['free']:.1%}"),
            *(f"{f[gap]:.1f}".replace("-", "−") for gap in ("median_gap", "worst_gap")),
        )
        for name, f in figures.items()
    ]
    return tables.markdown(head, rows)


def basins(figures: dict[str, Any], data_set: int = 0) -> str:
    """Where the starts on one data set ended, and a name for each optimum."""
    elbos, means = np.asarray(figures["elbos"])[data_set], np.asarray(figures["means"])[data_set]
    report = proxvi.Luck(elbos, elbos[:, None], means)
    lines = [
        f"{report.share:.0%} of {len(elbos)} starts end within {report.tolerance:g} nats of the best ELBO, "
        f"{report.best:.2f}; median {np.median(elbos):.2f}, worst {np.min(elbos):.2f}"
    ]
    for elbo, starts, *_ in report.basins[:6]:
        low, high = np.sort(means[starts[0]])
        lines.append(f"  {len(starts):4d} starts, ELBO {elbo:9.1f}, means ({low:.1f}, {high:.1f}): {_name(low, high)}")
    if len(report.basins) > 6:
        rest = [start for basin in report.basins[6:] for start in basin.starts]
        lines.append(f"  {len(rest):4d} starts, ELBO {report.basins[6].elbo:9.1f} and less: elsewhere")
    return "\n".join(lines)


def _name(low: float, high: float) -> str:
    if high > 15 or low < -10:
        return "a mean is stranded, its feature switched off or all but"
    if low < 0:
        return "the difference of two features explains the data"
    if high - low < 0.7:
        return "the means stay together, as the true ones are"
    return "the symmetry of the two features is broken"


@dataclass(frozen=True)
class Grid:
    """The Bernoulli factor model from a ring of starts, by VI, coordinate ascent, annealing and PVI.

    Args:
        data_sets: how many data sets of 100 points.
        starts: how many starts on the ring, for each data set.
        steps: of the optimiser.
        seed: of the data sets.
    """

    data_sets: int = 10
    starts: int = 100
    steps: int = 10_000
    seed: int = 0

    def trials(self) -> list[Trial]:
        """One for each method."""
        return [
            Trial(name, _data_sets(name, self.data_sets), self.starts, self.steps, seed=self.seed) for name in METHODS
        ]


def _data_sets(method: str, data_sets: int) -> int:
    return max(1, data_sets // 10) if method in SLOW else data_sets


@tables.report
def report(records: list[tables.Record], folder: Path) -> str:
    """Figure 1, and a table of all methods."""
    common = tables.usual(records, varied=["method"])

    def label(settings: dict[str, Any]) -> str:
        method = settings["method"]
        return method + tables.unusual(settings, common | {"data_sets": _data_sets(method, common["data_sets"])})

    order = list(METHODS)
    records.sort(key=lambda record: order.index(record["settings"]["method"]))
    figures = {label(record["settings"]): record["figures"] for record in records}
    ends = {name: np.asarray(figures[name]["means"])[0] for name in ("VI", "PVI, entropy") if name in figures}
    if ends:
        plots.arrows(ends, np.asarray(ring(common["starts"])), np.asarray(TRUTH), folder / "figure-1.png")
    return "\n\n".join(
        [
            f"{common['data_sets']} data sets of 100 points, {common['starts']} starts each on a ring of radius "
            f"{RADIUS:g} around the truth, {common['steps']:,} steps",
            table(figures),
            "Where the starts on the first data set end:",
            *(f"{name}: {basins(f)}" for name, f in figures.items()),
        ]
    )


STUDY: dict[str, tuple[float, ...]] = {
    "gamma": (1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-20, 1e-30),  # the paper's
    "learning_rate": (0.01, 0.03, 0.1, 0.3),
    "steps": (1_000, 3_000, 10_000, 30_000),
}
STUDIED = ("VI", "annealing", "PVI, entropy", "PVI, entropy, statistic average")


@dataclass(frozen=True)
class SettingsGrid:
    """How figure 1 depends on the decay of the magnitude, the learning rate and the number of steps.

    Args:
        data_sets: how many data sets, others than those of the figure: the settings were chosen on these.
        starts: how many starts on the ring, for each data set.
        scale: of all numbers of steps.
        seed: of the data sets.
    """

    data_sets: int = 2
    starts: int = 20
    scale: float = 1.0
    seed: int = 100

    def trials(self) -> list[Trial]:
        """One setting is varied at a time."""
        base = Trial("VI", self.data_sets, self.starts, int(10_000 * self.scale), seed=self.seed)
        study = {**STUDY, "steps": tuple(int(steps * self.scale) for steps in STUDY["steps"])}
        varied = (
            replace(base, method=method, **{setting: value})
            for setting, values in study.items()
            for value in values
            for method in STUDIED
        )
        return list(dict.fromkeys([*varied, *(replace(base, method=name) for name in ("PVI, entropy", *VARIANTS))]))


@tables.report
def report_settings(records: list[tables.Record], folder: Path) -> str:
    """The share of starts that are not trapped along each setting, and the variants of entropy PVI."""
    base = tables.usual(records, varied=["method"]) | {"gamma": Trial.gamma, "learning_rate": Trial.learning_rate}
    figures: dict[str, dict[tuple[str, Any], Any]] = {setting: {} for setting in STUDY}  # by method and value
    other = 0
    for record in records:
        settings = record["settings"]
        changed = [key for key, value in base.items() if settings[key] != value]
        along = [setting for setting in STUDY if set(changed) <= {setting}]
        for setting in along:
            figures[setting][settings["method"], settings[setting]] = record["figures"]
        other += not along
    values = {
        setting: sorted({value for _, value in found}, reverse=setting == "gamma") for setting, found in figures.items()
    }

    def share(setting: str, method: str, value: int | float) -> float:
        found = figures[setting].get((method, value))
        return np.nan if found is None else found["free"]

    shares = {s: {m: [share(s, m, value) for value in values[s]] for m in STUDIED} for s in STUDY}
    plots.study(values, shares, folder / "settings.png")
    rows = [
        (setting, f"{value:,g}", *("" if np.isnan(x := shares[setting][m][i]) else f"{x:.0%}" for m in STUDIED))
        for setting in STUDY
        for i, value in enumerate(values[setting])
    ]
    at_base = {method: f for (method, steps), f in figures["steps"].items() if steps == base["steps"]}
    variants = {name: at_base[name] for name in ("PVI, entropy", *VARIANTS) if name in at_base}
    text = f"{tables.markdown(('setting', 'value', *STUDIED), rows)}\n\n{table(variants)}"
    return text + (
        f"\n\n{other} result files of other data sets, or with two changed settings, are left out." if other else ""
    )
