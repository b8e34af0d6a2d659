"""Table 3: the variational autoencoder on binarised MNIST, with the orthogonal constraint and with others."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO

import proxvi
from proxvi import plots
from proxvi._validation import check_known, check_number
from proxvi.datasets import BinarizedMNIST
from proxvi.experiments import results, tables
from proxvi.experiments.methods import held
from proxvi.experiments.sweeps import Options
from proxvi.experiments.trials import active_units, approximation, decode, encode
from proxvi.models.vae import autoencoder, encoder_weights

__all__ = ["METHODS", "STEPS", "Grid", "Trial", "report", "reproduce_table_3"]

STEPS = 50_000  # the paper's
ORTHOGONAL = "PVI, orthogonal"  # methods whose names begin so take the magnitude
SAMPLED = ", sampled KL"
SHOWN = 12  # digits whose reconstructions are kept


@dataclass(frozen=True)
class Trial:
    """One row of the table.

    Args:
        method: one of `METHODS`.
        magnitude: of the orthogonal constraint, which does not fall; nothing to the other methods.
        steps: of Adam.
        gamma: the factor by which the magnitude of the other constraints falls.
        decay: of the moving average.
        learning_rate: of Adam.
        batch_size: digits in a batch.
        latents: dimensions of the latent variable.
        hidden: units of the hidden layers.
        seed: of everything.
    """

    method: str
    magnitude: float = 0.0
    steps: int = STEPS
    gamma: float = 1e-10
    decay: float = 0.9999
    learning_rate: float = 1e-3
    batch_size: int = 128
    latents: int = 100
    hidden: tuple[int, ...] = (200, 200)
    seed: int = 0

    @property
    def name(self) -> str:
        """What its files are called."""
        return results.name(f"{self.method} {self.magnitude:g}" if self.magnitude else self.method, asdict(self))

    def svi(self, digits: BinarizedMNIST) -> proxvi.ProximitySVI:
        """What is trained."""
        key = jax.random.fold_in(jax.random.key(self.seed), 1_000_033)  # a role of its own, as in `trials.run`
        pair = autoencoder(key, pixels=digits.train.shape[1], latents=self.latents, hidden=self.hidden)
        return proxvi.ProximitySVI(*pair, optax.adam(self.learning_rate), *METHODS[self.method](self))

    def measure(self, svi: Any, params: dict[str, Any], digits: np.ndarray) -> dict[str, Any]:
        """Entropy of the approximation, and its divergence from the prior, in nats of a digit."""
        q = approximation(svi, params, digits, "z")
        return {"entropy": jnp.mean(q.entropy()), "kl": jnp.mean(jnp.sum(_divergences(q), axis=-1))}

    def describe(self, svi: Any, params: dict[str, Any], digits: np.ndarray) -> dict[str, Any]:
        """Whether dimensions have collapsed, and some reconstructions."""
        q = approximation(svi, params, digits, "z")
        first = digits[:SHOWN]
        model = handlers.substitute(svi.model, {**params, "z": q.mean[:SHOWN]})
        means = handlers.trace(model).get_trace(first)["x"]["fn"].mean
        return {
            "active_units": active_units(q.mean),
            "kl_per_dimension": np.mean(_divergences(q), axis=0),
            "digits": [encode(image) for image in first],
            "reconstructions": [encode(image) for image in np.asarray(means)],
        }


def _divergences(q: Any) -> Any:
    """`KL(q ‖ p)` of each row and dimension."""
    return dist.kl_divergence(q.base_dist, dist.Normal(0.0, 1.0))


def _orthogonal(trial: Trial) -> proxvi.Proximity:
    return proxvi.Proximity(
        lambda q, params: proxvi.orthogonal(encoder_weights(params)),
        magnitude=trial.magnitude,
        relative=False,
        reference=proxvi.statistic_average(trial.decay),
    )


def _warm_up(trial: Trial) -> proxvi.WarmUpELBO:
    return proxvi.WarmUpELBO(TraceMeanField_ELBO(), optax.linear_schedule(0.0, 1.0, max(1, trial.steps // 5)))


METHODS: dict[str, Callable[[Trial], tuple[Any, Any]]] = {
    "VI": lambda trial: (TraceMeanField_ELBO(), ()),
    # The divergence by samples, too, is noise of a hundred dimensions, most of which the model does not use.
    f"VI{SAMPLED}": lambda trial: (Trace_ELBO(), ()),
    "VI, KL warm-up": lambda trial: (_warm_up(trial), ()),
    ORTHOGONAL: lambda trial: (TraceMeanField_ELBO(), _orthogonal(trial)),
    f"{ORTHOGONAL}{SAMPLED}": lambda trial: (Trace_ELBO(), _orthogonal(trial)),
    "PVI, entropy": lambda trial: (TraceMeanField_ELBO(), held(proxvi.entropy, trial)),
    "PVI, KL": lambda trial: (TraceMeanField_ELBO(), held(proxvi.kl_to_prior, trial)),
    "PVI, mean/variance": lambda trial: (TraceMeanField_ELBO(), held(proxvi.mean_variance, trial)),
}
# Of the latter the best of all magnitudes. The authors' code samples the divergence; both rows are beside theirs.
PAPER = {"VI": (-101.0, -94.2), ORTHOGONAL: (-100.3, -93.9)}
COLUMN = "ELBO / log likelihood"


@dataclass(frozen=True)
class Grid:
    """Which trials.

    Args:
        scale: share of the paper's 50,000 steps.
        methods: which of `METHODS`.
        magnitudes: of the orthogonal constraint.
        seeds: of everything in a trial.
    """

    scale: float = 1.0
    methods: tuple[str, ...] = tuple(METHODS)
    magnitudes: tuple[float, ...] = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    seeds: tuple[int, ...] = (0, 1, 2)

    def trials(self) -> list[Trial]:
        """All combinations; the magnitude is the orthogonal constraint's alone."""
        check_number("scale", self.scale, above=0.0, remedy="1 is the paper's 50,000 steps")
        check_known("methods", self.methods, METHODS)
        steps = max(1, round(self.scale * STEPS))
        return [
            Trial(method, magnitude, steps, seed=seed)
            for seed in self.seeds
            for method in self.methods
            for magnitude in (self.magnitudes if method.startswith(ORTHOGONAL) else (0.0,))
        ]


def reproduce_table_3(grid: Grid = Grid(), how: Options = Options()) -> str:  # noqa: B008, both are frozen
    """A variational autoencoder on binarised MNIST, by VI and PVI with the orthogonal constraint and others.

    Each trial writes a result file; what is there already is not run again, and what was interrupted goes on from its
    checkpoint. The table and plots are of all result files in the folder.
    """
    how.run("table-3", grid.trials())
    return report(how.results / "table-3")


def report(folder: Path) -> str:
    """The table and the plots of the result files in a folder."""
    records = tables.records(folder)
    if not records:
        return f"no result files in {folder}"

    def row(settings: dict[str, Any]) -> str:
        return settings["method"] + (f", k {settings['magnitude']:g}" if settings["magnitude"] else "")

    order = list(METHODS)
    records.sort(key=lambda r: (order.index(r["settings"]["method"]), -r["settings"]["magnitude"]))
    figures = tables.grouped(records, row, lambda settings: COLUMN)
    means = {name: np.mean([seed["elbo"] for seed in cells[COLUMN]]) for name, cells in figures.items()}
    paper: dict[str, Any] = {}
    for kind in ("", SAMPLED):
        paper["VI" + kind] = {COLUMN: PAPER["VI"]}
        magnitudes = [name for name in means if name.startswith(f"{ORTHOGONAL}{kind}, k") and " (" not in name]
        if magnitudes:  # the paper reports the best of them
            paper[max(magnitudes, key=means.__getitem__)] = {COLUMN: PAPER[ORTHOGONAL]}
    common = tables.usual(records)
    caption = (
        f"Validation ELBO / log likelihood in nats, mean ± standard deviation over seeds; {common['steps']:,} steps, "
        f"{common['digits']:,} digits, {common['samples']:,} samples"
    )
    lines = ["| method | active units | KL of a digit, nats | largest KL of a dimension |", "| --- | --- | --- | --- |"]
    for name, cells in figures.items():
        divergences = np.array([seed["kl_per_dimension"] for seed in cells[COLUMN]])  # seeds × dimensions, in any order
        active = ", ".join(str(seed["active_units"]) for seed in cells[COLUMN])
        lines.append(f"| {name} | {active} | {divergences.sum(1).mean():.1f} | {divergences.max(1).mean():.2f} |")
    text = "\n\n".join([caption, tables.table(figures, [COLUMN], paper), "\n".join(lines)])
    (folder / "table.md").write_text(text + "\n")
    plots.curves({name: {"": cells[COLUMN]} for name, cells in figures.items()}, folder / "curves.png", upper=8.0)
    drawn = {"digits": records[0]["figures"]["digits"]}
    drawn |= {f"{name}, reconstructed": cells[COLUMN][0]["reconstructions"] for name, cells in figures.items()}
    drawn |= {f"{name}, sampled": cells[COLUMN][0]["samples"][:SHOWN] for name, cells in figures.items()}
    decoded = {name: np.array([decode(image) for image in images]) for name, images in drawn.items()}
    plots.digits(decoded, folder / "samples.png")
    return text
