"""The progress bar of `fit`."""

import sys

import jax
import tqdm

from proxvi._typing import Metrics

FORMATS = {"elbo": ".5g", "validation_elbo": ".5g", "magnitude": ".1e", "distance": ".2g"}


def progress_bar(wanted: bool | None, num_steps: int, step: int) -> tqdm.tqdm:
    """A bar that stands at `step`; None shows it on a terminal. Only process 0 shows one."""
    shown = (sys.stderr.isatty() if wanted is None else wanted) and jax.process_index() == 0
    return tqdm.tqdm(total=num_steps, initial=step, disable=not shown, unit="step", dynamic_ncols=True)


def postfix(metrics: Metrics) -> str:
    """The metrics that the bar shows; those of several constraints would be too long."""
    shown = {name: metrics[name] for name in FORMATS if isinstance(metrics.get(name), float)}
    return " ".join(f"{name} {value:{FORMATS[name]}}" for name, value in shown.items())
