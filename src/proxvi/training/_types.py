"""Types that the modules of this room share."""

from typing import Any

import jax
import numpy as np

PyTree = Any  # arrays, in any containers that JAX knows
Batch = tuple[PyTree, ...]  # the arguments of the model, in their order
Params = dict[str, PyTree]  # by the name of the site
Leaves = dict[str, jax.Array | np.ndarray]  # the arrays of a tree, by their path in it
Json = dict[str, Any]  # what `json.dumps` takes
Metrics = dict[str, int | float | list[float]]  # a list has one number for each constraint
