"""What pixels that are rarely on cost a trained belief network of tables 1 and 2.

    python -m proxvi_paper.experiments.rare_pixels runs/table-1/*/checkpoints/*

`proxvi reproduce` leaves the checkpoints there. The pixels are sorted by the share of training digits in which they are
on. For each group of pixels the script prints

- the median weight between a unit of the first layer and such a pixel; in the bad start all are −100;
- the validation digits whose rarest pixel that is on is one of the group, their mean ELBO, and how many units of the
  first layer are on in them;
- the nats that the pixels of the group, on or off, cost a digit, as a mean over all validation digits. Together with
  the divergence of the units from their prior they are −ELBO.
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from proxvi._typing import Json, Params
from proxvi_paper.datasets import BinarizedMNIST, binarized_mnist
from proxvi_paper.experiments import tables
from proxvi_paper.experiments.belief_networks import STARTS
from proxvi_paper.models.model_and_guide import ModelAndGuide
from proxvi_paper.models.sbn import belief_network

__all__ = ["Costs", "costs", "main", "read", "report"]

PARAMETERS = "['state'].optim_state[1][0]"  # where they are in a checkpoint
SHARES = {"0": 0.0, "to 1/10,000": 1e-4, "to 1/1,000": 1e-3, "to 1/100": 1e-2, "more": 1.0}  # the groups' upper ends
HEAD = ("on in training", "pixels", "median weight", "validation digits", "ELBO", "units on", "nats a digit")


class Costs(NamedTuple):
    """What a network makes of each digit; means over samples of the guide.

    Attributes:
        pixels: `−log p(x_i | z)`, digits × pixels.
        divergences: `log q(z | x) − log p(z)` of each digit.
        units: that are on in the first layer, of each digit.
    """

    pixels: Array
    divergences: Array
    units: Array


def costs(network: ModelAndGuide, params: Params, digits: np.ndarray, num_samples: int) -> Costs:
    """Sample the units `num_samples` times, and take the means."""

    def one(key: Array, params: Params, digits: Array) -> Costs:
        guide = handlers.substitute(handlers.seed(network.guide, key), data=params)
        q: Any = handlers.trace(guide).get_trace(digits)
        p: Any = handlers.trace(handlers.replay(handlers.substitute(network.model, params), q)).get_trace(digits)
        layers = [name for name, site in q.items() if site["type"] == "sample"]
        divergence = sum(q[z]["fn"].log_prob(q[z]["value"]) - p[z]["fn"].log_prob(q[z]["value"]) for z in layers)
        return Costs(-p["x"]["fn"].base_dist.log_prob(digits), jnp.asarray(divergence), q["z1"]["value"].sum(1))

    with jax.numpy_rank_promotion("allow"):  # NumPyro broadcasts a prior over the rows
        keys, sample = jax.random.split(jax.random.key(0), num_samples), jax.jit(one)
        draws = [sample(key, params, jnp.asarray(digits)) for key in keys]
    return jax.tree.map(lambda *each: sum(each) / num_samples, *draws)


def report(network: ModelAndGuide, params: Params, digits: BinarizedMNIST, num_samples: int = 10) -> str:
    """The table of one network."""
    group = np.searchsorted(list(SHARES.values()), digits.train.mean(0))
    rarest = np.where(digits.valid == 1, group, len(SHARES) - 1).min(axis=1)
    pixels, divergences, units = map(np.asarray, costs(network, params, digits.valid, num_samples))
    elbos, weights = -pixels.sum(1) - divergences, np.asarray(params["decoder1_weights"])

    def row(name: str, of_pixels: np.ndarray, of_digits: np.ndarray, nats: np.ndarray) -> tuple[str, ...]:
        means = (f"{x[of_digits].mean():.1f}" if of_digits.any() else "" for x in (elbos, units))
        median = f"{np.median(weights[:, of_pixels]):.1f}" if of_pixels.any() else ""
        cells = (name, f"{of_pixels.sum():,}", median, f"{of_digits.sum():,}", *means, f"{nats.mean():.1f}")
        return tuple(cell.replace("-", "−") for cell in cells)

    rows = [row(name, group == i, rarest == i, pixels[:, group == i].sum(1)) for i, name in enumerate(SHARES)]
    divergence = ("divergence", *[""] * (len(HEAD) - 2), f"{divergences.mean():.1f}")
    return tables.markdown(HEAD, [*rows, divergence, row("all", group >= 0, rarest >= 0, -elbos)])


def read(checkpoint: Path) -> tuple[int, Json, Params]:
    """The step, the settings of the trial, and the parameters."""
    from orbax.checkpoint import v1

    header = json.loads((checkpoint / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    with warnings.catch_warnings():  # of devices, which is nothing to a reader of one checkpoint
        warnings.filterwarnings("ignore", "Sharding info not provided", UserWarning)
        leaves: dict[str, Any] = v1.load(str(checkpoint.absolute()), checkpointable_name="state")
    params = {name.removeprefix(PARAMETERS)[2:-2]: x for name, x in leaves.items() if name.startswith(PARAMETERS)}
    return header["step"], header["configuration"]["user"], params


def main() -> None:
    """Print a table for each checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoints", nargs="+", type=Path)
    digits = binarized_mnist()
    for checkpoint in parser.parse_args().checkpoints:
        step, settings, params = read(checkpoint)
        network = belief_network(digits.train.mean(0), units=settings["units"], start=STARTS[settings["start"]])
        layers = ", ".join(map(str, settings["units"]))
        print(f"\n{settings['method']}, {settings['start']} start, step {step:,}; units in each layer: {layers}\n")
        print(report(network, params, digits))


if __name__ == "__main__":
    main()
