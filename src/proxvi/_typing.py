"""Names of types. JAX has no static type for a tree of arrays, so some of these are `Any` under another name."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpyro.distributions as dist
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
else:

    class _Unchecked:
        """`Float[Array, "rows units"]` is just `Array`, unless jaxtyping was imported first, as the tests do."""

        def __class_getitem__(cls, item: Any) -> Any:
            return item[0]

    _jaxtyping = sys.modules.get("jaxtyping")
    Bool, Float, Int = (getattr(_jaxtyping, name, _Unchecked) for name in ("Bool", "Float", "Int"))

Distribution = dist.Distribution
Tree = Any  # arrays, or distributions, nested in any way that JAX knows
ParamTree = Any  # a tree of floating-point arrays: what an Optax optimiser moves
Params = dict[str, Any]  # NumPyro's parameters by name, each a tree of arrays
Batch = tuple[Tree, ...]  # the arguments of a model, in their order
Leaves = dict[str, Array | np.ndarray]  # the arrays of a tree, by their path in it
Json = dict[str, Any]  # what `json.dumps` takes
Metrics = dict[str, int | float | list[float]]  # a list has one number for each constraint
Trace = dict[str, dict[str, Any]]  # NumPyro's sites by name
Model = Callable[..., Any]  # of the data
Guide = Callable[..., Any]
Statistic = Callable[..., Tree]  # of the parameters or of the guide's distributions, and of what else it names
Distance = Callable[[Tree, Tree], Array]  # of the reference's statistic and of the current one
Scalar = Float[Array, ""]
