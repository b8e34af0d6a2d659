"""What the models of digits have in common: a model and a guide of independent rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax.numpy as jnp
import numpyro
from jax.typing import ArrayLike

__all__ = ["ModelAndGuide", "each_row"]


class ModelAndGuide(NamedTuple):
    """A NumPyro model and guide, in the order in which `SVI` and `ProximitySVI` take them.

    Attributes:
        model: of a batch of rows.
        guide: of the same.
    """

    model: Callable[[ArrayLike], None]
    guide: Callable[[ArrayLike], None]


@contextmanager
def each_row(x: ArrayLike, pixels: int) -> Iterator[None]:
    """A plate over the rows, scaled so that the ELBO is the mean over the rows, for any batch size."""
    if jnp.ndim(x) != 2 or jnp.shape(x)[1] != pixels:
        raise ValueError(f"`x` must be rows of {pixels} pixels, got shape {jnp.shape(x)}; write `x[None]` for one.")
    rows = jnp.shape(x)[0]
    with numpyro.handlers.scale(scale=1.0 / rows), numpyro.plate("data", rows):
        yield
