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

import proxvi
from proxvi import plots
from proxvi.experiments import results
from proxvi.experiments.descent import descend, scan
from proxvi.models import factor
from proxvi.models.factor import Factor
from proxvi.starts import Starts, multistart

__all__ = ["METHODS", "Settings", "reproduce", "reproduce_settings", "run"]

TRUTH = jnp.array([5.0, 5.0])
RADIUS = 100.0
SLOW = ("PVI, entropy, Algorithm 1",)  # ten inner iterations a step: on a tenth of the data sets


@dataclass(frozen=True)
class Settings:
    """What one method is run with.

    Args:
        method: its name, one of `METHODS`.
        data_sets: how many data sets of 100 points.
        starts: how many starts on the ring, for each data set.
        steps: of the optimiser.
        learning_rate: of Adam; for Algorithm 1, which is gradient descent, a tenth of it.
        gamma: the magnitude falls by this factor over the run, as does the temperature of annealing.
        seed: of the data sets.
    """

    method: str
    data_sets: int = 10
    starts: int = 100
    steps: int = 10_000
    learning_rate: float = 0.1
    gamma: float = 1e-10
    seed: int = 0


def _adam(s: Settings, b2: float = 0.99) -> optax.GradientTransformation:
    # Adam's default b2 of 0.999 remembers for a thousand steps how large the gradient of the constraint was, and in a
    # run of ten thousand the last assignments then do not get where they belong: see the study of the settings.
    return optax.adam(s.learning_rate, b2=b2)


def _decay(s: Settings) -> optax.Schedule:
    return optax.exponential_decay(1.0, s.steps, s.gamma)


def _descend(
    s: Settings, optimizer: optax.GradientTransformation, params: Factor, x: Array, temperature: Any = None
) -> tuple[Factor, Array]:
    return descend(lambda params, heat: factor.elbo(params, x, heat), optimizer, params, s.steps, temperature)


def _ascend(s: Settings, params: Factor, x: Array, magnitude: Callable[[Array], Any]) -> tuple[Factor, Array]:
    """Coordinate ascent on the logits, kept close to their moving average; Adam on the means."""
    optimizer, first = _adam(s), jnp.abs(factor.elbo(params, x))

    def step(carry: Any, t: Array) -> tuple[Any, None]:
        params, state, reference = carry
        for k in range(params.means.shape[0]):
            logits = factor.proximal_coordinate_update(params, x, k, reference[k], first * magnitude(t))
            params = params._replace(logits=params.logits.at[k].set(logits))
        updates, state = optimizer.update(-factor.mean_gradient(params, x), state)
        reference = 0.9999 * reference + (1 - 0.9999) * params.logits
        return (params._replace(means=params.means + updates), state, reference), None

    start = (params, optimizer.init(params.means), params.logits)
    return scan(step, start, lambda params: factor.elbo(params, x), s.steps)


def _annealing(s: Settings, params: Factor, x: Array) -> tuple[Factor, Array]:
    first, decay = jnp.abs(factor.elbo(params, x)), _decay(s)
    return _descend(s, _adam(s), params, x, lambda t: jnp.maximum(1.0, first * decay(t)))


def _proximity(statistic: Callable[[Any], Any], *, b2: float = 0.99, **options: Any) -> Any:
    def method(s: Settings, params: Factor, x: Array) -> tuple[Factor, Array]:
        link = proxvi.proximity(statistic, magnitude=_decay(s), **options)
        return _descend(s, optax.chain(link, _adam(s, b2)), params, x)

    return method


def _inner_loop(s: Settings, params: Factor, x: Array) -> tuple[Factor, Array]:
    constraint = proxvi.Proximity(_entropy, magnitude=_decay(s))
    rate = s.learning_rate / 10
    return _descend(s, proxvi.proximity_inner_loop(jax.random.key(0), rate, constraint, max_iterations=10), params, x)


def _entropy(params: Factor) -> Array:
    return proxvi.entropy(factor.posterior(params))


METHODS: dict[str, Callable[[Settings, Factor, Array], tuple[Factor, Array]]] = {
    "VI": lambda s, params, x: _descend(s, _adam(s), params, x),
    "coordinate ascent": lambda s, params, x: _ascend(s, params, x, lambda t: 0.0),
    "annealing": _annealing,
    "PVI, entropy": _proximity(_entropy),
    "PVI, entropy, statistic average": _proximity(_entropy, reference=proxvi.statistic_average()),
    "PVI, entropy, Algorithm 1": _inner_loop,
    "PVI, mean/variance": _proximity(lambda params: proxvi.mean_variance(factor.posterior(params))),
    "PVI, KL distance": _proximity(factor.posterior, distance=proxvi.kl),
    "PVI, KL distance, coordinate ascent": lambda s, params, x: _ascend(s, params, x, _decay(s)),
}
# What traps some starts after all; in the study of the settings.
VARIANTS: dict[str, Callable[[Settings, Factor, Array], tuple[Factor, Array]]] = {
    "PVI, entropy, Adam's default b2": _proximity(_entropy, b2=0.999),
    "PVI, entropy, mean over the points": _proximity(
        lambda params: proxvi.entropy(dist.Bernoulli(logits=params.logits.T).to_event(1))
    ),
}


def ring(count: int) -> Array:
    """Starts on a circle around the truth; multiples of 8 have two with equal means, a saddle no gradient leaves."""
    if count % 8 == 0:
        raise ValueError(f"`starts` must not be a multiple of 8, got {count}; {count + 1} has no start on the saddle.")
    angles = 2 * jnp.pi * jnp.arange(count) / count
    return TRUTH[None] + RADIUS * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)


def data_sets(s: Settings) -> Array:
    """One data set of 100 points a row."""
    return jax.vmap(lambda key: factor.simulate(key, TRUTH))(jax.random.split(jax.random.key(s.seed), s.data_sets))


def run(s: Settings) -> dict[str, Any]:
    """All starts on all data sets in one program: where they ended, data sets × starts."""
    method, x = (METHODS | VARIANTS)[s.method], data_sets(s)
    means = jnp.tile(ring(s.starts), (s.data_sets, 1))
    ended = multistart(
        lambda start: method(s, factor.start(start[0]), start[1]), (means, jnp.repeat(x, s.starts, axis=0))
    )
    shape = (s.data_sets, s.starts)
    return {"elbos": ended.elbos.reshape(shape), "means": ended.params.means.reshape(*shape, -1)}


@cache  # the same for every method
def from_the_truth(s: Settings) -> Array:
    """The ELBO of VI started at the truth, one for each data set: what a start is measured by.

    From means that are equal to the last bit the two features would stay the same forever, which is a saddle point
    more than a hundred nats lower; so they start a thousandth apart.
    """
    means = TRUTH + jnp.array([1e-3, -1e-3])
    _, traces = jax.jit(jax.vmap(lambda x: METHODS["VI"](s, factor.start(means), x)))(data_sets(s))
    return traces[:, -1]


def judge(elbos: Any, means: Any, reference: Any) -> dict[str, float]:
    """Shares of the starts, and how far they end below VI that started at the truth, in nats.

    `near`: both means within 1 of the truth; as the true means are equal, so are all labels. `free`: not trapped, that
    is: no more than 2 nats below.
    """
    off = np.abs(np.asarray(means) - np.asarray(TRUTH)).max(axis=-1)
    gap = np.asarray(reference)[:, None] - np.asarray(elbos)
    return {
        "near": float(np.mean(off <= 1.0)),
        "free": float(np.mean(gap <= 2.0)),
        "median_gap": float(np.median(gap)),
        "worst_gap": float(np.max(gap)),
    }


def measure(s: Settings) -> dict[str, Any]:
    """The figures of one method."""
    ended, reference = run(s), from_the_truth(replace(s, method="VI"))
    return {
        **judge(ended["elbos"], ended["means"], reference),
        "reference": np.asarray(reference),
        "elbos": np.asarray(ended["elbos"]),
        "means": np.asarray(ended["means"]),
    }


def table(figures: dict[str, dict[str, Any]]) -> str:
    """One row a method, in Markdown."""
    rows = ["| method | starts | within 1 of the truth | not trapped | nats below VI from the truth: median | worst |"]
    rows.append("|---|---|---|---|---|---|")
    for name, f in figures.items():
        shares = f"{np.size(f['elbos']):,} | {f['near']:.1%} | {f['free']:.1%}"
        rows.append(f"| {name} | {shares} | {f['median_gap']:.1f} | {f['worst_gap']:.1f} |".replace("-", "−"))
    return "\n".join(rows)


def basins(figures: dict[str, Any], data_set: int = 0) -> str:
    """Where the starts on one data set ended, and which optimum that is."""
    elbos, means = np.asarray(figures["elbos"])[data_set], np.asarray(figures["means"])[data_set]
    report = Starts(elbos, means, elbos[:, None]).report()
    lines = [str(report).splitlines()[0]]
    for elbo, starts in report.basins[:6]:
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


def reproduce(
    folder: Path = Path("results/figure-1"),
    *,
    data_sets: int = 10,
    starts: int = 100,
    steps: int = 10_000,
    seed: int = 0,
) -> str:
    """The Bernoulli factor model from a ring of starts, by VI, coordinate ascent, annealing and PVI.

    Writes the figure, a table of all methods and a result file for each; what is in the folder already is not run
    again.

    Args:
        folder: where they go.
        data_sets: how many data sets of 100 points.
        starts: how many starts on the ring, for each.
        steps: of the optimiser.
        seed: of the data sets.

    Returns:
        The table.
    """
    s = Settings("VI", data_sets=data_sets, starts=starts, steps=steps, seed=seed)
    fewer = max(1, data_sets // 10)
    trials = [replace(s, method=name, data_sets=fewer if name in SLOW else data_sets) for name in METHODS]
    figures = dict(zip(METHODS, results.measured(folder, trials, measure), strict=True))
    plots.arrows(
        {name: np.asarray(figures[name]["means"])[0] for name in ("VI", "PVI, entropy")},
        np.asarray(ring(starts)),
        np.asarray(TRUTH),
        folder / "figure-1.png",
    )
    text = "\n\n".join(
        [
            f"{data_sets} data sets of 100 points, {starts} starts each on a ring of radius {RADIUS:g} around the "
            f"truth, {steps:,} steps",
            table(figures),
            "Where the starts on the first data set end:",
            *(f"{name}: {basins(f)}" for name, f in figures.items()),
        ]
    )
    (folder / "table.md").write_text(text + "\n")
    return text


GRID: dict[str, tuple[float, ...]] = {
    "gamma": (1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-20, 1e-30),  # the paper's
    "learning_rate": (0.01, 0.03, 0.1, 0.3),
    "steps": (1_000, 3_000, 10_000, 30_000),
}
STUDIED = ("VI", "annealing", "PVI, entropy", "PVI, entropy, statistic average")


def reproduce_settings(
    folder: Path = Path("results/figure-1-settings"),
    *,
    data_sets: int = 2,
    starts: int = 20,
    scale: float = 1.0,
    seed: int = 100,
) -> str:
    """How figure 1 depends on the decay of the magnitude, the learning rate and the number of steps.

    Args:
        folder: where the plot, the table and the result files go; what is there already is not run again.
        data_sets: how many data sets, other ones than those of the figure: on these the settings were chosen.
        starts: how many starts on the ring, for each.
        scale: of all numbers of steps.
        seed: of the data sets.

    Returns:
        The table.
    """
    s = Settings("VI", data_sets=data_sets, starts=starts, steps=int(10_000 * scale), seed=seed)
    shares: dict[str, dict[str, list[float]]] = {name: {m: [] for m in STUDIED} for name in GRID}
    grid = {**GRID, "steps": tuple(int(steps * scale) for steps in GRID["steps"])}
    studied = [(name, value, method) for name, values in grid.items() for value in values for method in STUDIED]
    variants = ("PVI, entropy", *VARIANTS)
    trials = [replace(s, method=method, **{name: value}) for name, value, method in studied]
    trials += [replace(s, method=name) for name in variants]
    figures = results.measured(folder, trials, measure)
    for (name, _, method), one in zip(studied, figures, strict=False):
        shares[name][method].append(one["free"])
    plots.study(grid, shares, folder / "settings.png")
    lines = ["| setting | value | " + " | ".join(STUDIED) + " |", "|---" * (2 + len(STUDIED)) + "|"]
    for name, values in grid.items():
        for i, value in enumerate(values):
            cells = " | ".join(f"{shares[name][m][i]:.0%}" for m in STUDIED)
            lines.append(f"| {name} | {value:g} | {cells} |")
    compared = dict(zip(variants, figures[len(studied) :], strict=True))
    text = "\n".join([*lines, "", table(compared)])
    (folder / "table.md").write_text(text + "\n")
    return text
