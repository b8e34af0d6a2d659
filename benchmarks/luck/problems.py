"""Real problems on which plain mean-field variational inference depends on its start.

Each function reads its data from a folder and returns a NumPyro model without arguments.
"""

import csv
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

Model = Callable[[], None]


def column(path: Path, name: str) -> np.ndarray:
    """A column of numbers in a CSV file."""
    with path.open(newline="") as file:
        return np.array([float(row[name]) for row in csv.DictReader(file)])


def standardized(x: np.ndarray) -> jax.Array:
    """With mean 0 and standard deviation 1."""
    return jnp.asarray((x - x.mean()) / x.std())


def theoph(folder: Path) -> Model:
    """One-compartment pharmacokinetics of 12 subjects who took theophylline."""
    path = folder / "theoph.csv"
    time, concentration, dose = (jnp.asarray(column(path, name)) for name in ("Time", "conc", "Dose"))
    subject = np.unique(column(path, "Subject"), return_inverse=True)[1]

    def model() -> None:
        population = jnp.asarray(numpyro.sample("population", dist.Normal(0, 1.5).expand([3]).to_event(1)))
        spread = jnp.asarray(numpyro.sample("spread", dist.LogNormal(-1, 0.7).expand([3]).to_event(1)))
        z = jnp.asarray(numpyro.sample("z", dist.Normal(0, 1).expand([12, 3]).to_event(2)))
        sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1))
        absorption, clearance, volume = jnp.exp(population + spread * z)[subject].T  # logs of the three are normal
        elimination = clearance / volume
        gap = absorption - elimination
        gap = jnp.where(jnp.abs(gap) < 1e-3, 1e-3, gap)
        decay = jnp.exp(-elimination * time) - jnp.exp(-absorption * time)
        numpyro.sample("conc", dist.Normal(dose * absorption / (volume * gap) * decay, sigma), obs=concentration)

    return model


def mcycle(folder: Path) -> Model:
    """Acceleration of a helmet after a crash: a line with four kinks."""
    path = folder / "mcycle.csv"
    times, y = column(path, "times"), standardized(column(path, "accel"))
    x = jnp.asarray((times - times.min()) / (times.max() - times.min()))

    def model() -> None:
        at = jnp.asarray(numpyro.sample("at", dist.Uniform(0, 1).expand([4]).to_event(1)))
        b = jnp.asarray(numpyro.sample("b", dist.Normal(0, 2).expand([6]).to_event(1)))
        sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1))
        kinks = jnp.sum(b[2:] * jax.nn.relu(x[:, None] - at), axis=1)
        numpyro.sample("y", dist.Normal(b[0] + b[1] * x + 5 * kinks, sigma), obs=y)

    return model


def sunspots(folder: Path) -> Model:
    """Sunspots of three centuries: three waves."""
    y = standardized(column(folder / "sunspots.csv", "SUNACTIVITY"))
    t = jnp.arange(len(y))

    def model() -> None:
        period = jnp.asarray(numpyro.sample("period", dist.LogNormal(jnp.log(15.0), 0.6).expand([3]).to_event(1)))
        a = jnp.asarray(numpyro.sample("a", dist.Normal(0, 1).expand([3, 2]).to_event(2)))
        sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1))
        phase = 2 * jnp.pi * t[:, None] / period
        mean = jnp.sum(a[:, 0] * jnp.sin(phase) + a[:, 1] * jnp.cos(phase), axis=1)
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)

    return model


def galaxies(folder: Path) -> Model:
    """Speeds of 82 galaxies: a mixture of six normal distributions."""
    x = standardized(column(folder / "galaxies.csv", "dat"))

    def model() -> None:
        w = jnp.asarray(numpyro.sample("w", dist.Dirichlet(jnp.ones(6))))
        mu = numpyro.sample("mu", dist.Normal(0, 2).expand([6]).to_event(1))
        s = numpyro.sample("s", dist.LogNormal(-1, 0.5).expand([6]).to_event(1))
        numpyro.factor("x", jnp.sum(logsumexp(jnp.log(w) + dist.Normal(mu, s).log_prob(x[:, None]), axis=1)))

    return model


PROBLEMS: dict[str, Callable[[Path], Model]] = {
    "theoph": theoph,
    "mcycle": mcycle,
    "sunspots": sunspots,
    "galaxies": galaxies,
}
