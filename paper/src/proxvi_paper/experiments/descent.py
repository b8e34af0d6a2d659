"""Trials of many starts on an exact ELBO, and how it is optimised: figure 1 and logistic regression."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from proxvi._typing import ParamTree, Tree
from proxvi_paper.experiments import results
from proxvi_paper.experiments.trials import Measurement

__all__ = ["StartsTrial", "descend", "scan"]

TRACE_LENGTH = 200  # ELBOs kept of each run


@dataclass(frozen=True)
class StartsTrial:
    """A method from many starts at once, in one program on all devices.

    Args:
        method: one of the experiment's methods.
    """

    method: str

    all_devices: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The name of its folder."""
        return results.name(self.method, asdict(self))

    @property
    def file_name(self) -> str:
        """The name of its result file."""
        return f"{self.name}.json"

    def figures(self) -> dict[str, Any]:
        """Run all starts."""
        raise NotImplementedError

    def measure(self, folder: Path, *, checkpoint_every: float, progress: bool | None) -> Measurement:
        """Run all starts; it takes seconds to minutes, so there are no checkpoints."""
        del folder, checkpoint_every, progress
        began = time.perf_counter()
        return Measurement(self.figures(), time.perf_counter() - began)


def descend(
    elbo: Callable[[ParamTree, Array | float], Array],
    optimizer: optax.GradientTransformation,
    params: ParamTree,
    steps: int,
    annealing: optax.Schedule | None = None,
) -> tuple[ParamTree, Array]:
    """Any optimiser on an ELBO.

    Args:
        elbo: a function of the parameters and of the temperature; 1 is the true ELBO.
        optimizer: a chain with `proxvi.proximity`, for example.
        params: to start from.
        steps: how many.
        annealing: anneals with the temperature `max(1, |ELBO_0| · annealing(t))`.

    Returns:
        The final parameters, and the true ELBOs during the run with that of the final parameters at the end.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    first = jnp.abs(elbo(params, 1.0))

    def step(carry: Tree, t: Array) -> tuple[Tree, None]:
        params, state = carry
        temperature = 1.0 if annealing is None else jnp.maximum(1.0, first * annealing(t))
        loss, gradient = jax.value_and_grad(lambda p: -elbo(p, temperature))(params)
        updates, state = optimizer.update(gradient, state, params, value=loss)
        return (optax.apply_updates(params, updates), state), None

    return scan(step, (params, optimizer.init(params)), lambda params: elbo(params, 1.0), steps)


def scan(
    step: Callable[[Tree, Array], tuple[Tree, None]], carry: Tree, elbo: Callable[[ParamTree], Array], steps: int
) -> tuple[ParamTree, Array]:
    """Run `step`, whose carry begins with the parameters; returns what `descend` returns."""
    every = max(1, steps // TRACE_LENGTH)

    def stretch(carry: Tree, t: Array) -> tuple[Tree, Array]:
        return jax.lax.scan(step, carry, t + jnp.arange(every))[0], elbo(carry[0])

    carry, elbos = jax.lax.scan(stretch, carry, jnp.arange(0, steps - every + 1, every))
    carry, _ = jax.lax.scan(step, carry, jnp.arange(steps - steps % every, steps))
    return carry[0], jnp.append(elbos, elbo(carry[0]))
