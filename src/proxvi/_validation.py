"""Checks of arguments; an error names the argument, the bound, the value and the remedy."""

import math
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpyro.infer import SVI

from proxvi._typing import Distribution, Tree


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float = math.inf,
    kind: str = "finite number",
    remedy: str,
) -> None:
    """Refuse anything but a real scalar within the bounds; of a traced value only the shape can be checked."""
    if isinstance(value, jax.core.Tracer):
        if value.shape != ():
            raise ValueError(f"`{name}` must be a scalar, got shape {value.shape}; use `vmap` for several.")
        return
    try:
        valid = (
            not isinstance(value, bool)
            and math.isfinite(value)
            and value < below
            and (at_least is None or value >= at_least)
            and (above is None or value > above)
        )
    except TypeError:
        valid = False
    if not valid:
        bounds = {"of at least": at_least, "above": above, "below": below if below < math.inf else None}
        bound = " and".join(f" {word} {number:g}" for word, number in bounds.items() if number is not None)
        raise ValueError(f"`{name}` must be a {kind}{bound}, got {value!r}; {remedy}.")


def first_value(name: str, schedule: optax.ScalarOrSchedule) -> Any:
    """The value at step 0 of a schedule; a number itself."""
    if not callable(schedule):
        return schedule
    try:
        return schedule(jnp.zeros((), jnp.int32))
    except TypeError as error:  # most often what makes schedules instead of one
        raise TypeError(
            f"`{name}` must be a number or a schedule, a function of the step alone, got {schedule!r}, which at step 0 "
            f"says: {error}; make a schedule with `optax.exponential_decay(1.0, 10_000, 1e-10)`, for example."
        ) from error


def check_integer(name: str, value: Any, *, at_least: int = 1, remedy: str = "1 is the least") -> None:
    """Refuse anything but an integer within the bound."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < at_least:
        raise ValueError(f"`{name}` must be an integer of at least {at_least}, got {value!r}; {remedy}.")


def check_key(key: object) -> None:
    """Refuse anything but one random key, typed or of the old kind."""
    if isinstance(key, jax.core.Tracer):
        return
    if isinstance(key, jax.Array | np.ndarray):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if (typed and key.ndim == 0) or (key.dtype == np.uint32 and key.ndim == 1):
            return
    shown = f"{key.dtype} of shape {key.shape}" if isinstance(key, jax.Array | np.ndarray) else repr(key)
    raise TypeError(f"`key` must be one random key, got {shown}; write `jax.random.key(0)`.")


def check_inference(name: str, svi: object) -> None:
    """Refuse anything but NumPyro's `SVI` or a subclass."""
    if not isinstance(svi, SVI):
        raise TypeError(f"`{name}` must be a ProximitySVI or NumPyro's SVI, got {svi!r}; write `SVI(model, guide, …)`.")


def check_arrays(data: tuple[Tree, ...], batch_size: Any) -> None:
    """Refuse arrays that no batch can be made of."""
    if len(data) == 1 and isinstance(data[0], tuple):
        raise TypeError(
            f"`data` must be the arguments of the model, one after the other, got a tuple of {len(data[0])}; write "
            "`x, y`, or make the tuple a list if it is a stream of batches."
        )
    empty = [np.shape(x) for x in jax.tree.leaves(data) if np.ndim(x) and np.shape(x)[0] == 0]
    if empty:
        raise ValueError(f"`data` must have at least one row, got shape {empty[0]}; look at how it was selected.")
    if batch_size is None:
        return
    check_integer("batch_size", batch_size, remedy="None uses all rows at every step")
    rows = common_length("data", data, "with `batch_size=None` the arrays are handed on whole")
    if batch_size > rows:
        raise ValueError(
            f"`batch_size` must be at most the {rows} rows of the data, got {batch_size}; None uses all of them at "
            "every step."
        )


def common_length(name: str, tree: Tree, remedy: str) -> int:
    """The length of the leading axis that all leaves have in common."""
    lengths = {np.shape(x)[0] if np.ndim(x) else 0 for x in jax.tree.leaves(tree)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"`{name}` must have one leading axis in common, got lengths {sorted(lengths)}; {remedy}.")
    return lengths.pop()


def check_statistic(value: Tree) -> None:
    """Refuse the value of a statistic that has no gradient: its leaves must be real floating-point arrays."""
    named = named_leaves(value)
    if not named:
        raise ValueError(
            f"`statistic` must return at least one array or distribution, got {value!r}; return what is to be "
            "kept close."
        )
    for name, leaf in named:
        if isinstance(leaf, Distribution):
            continue
        try:
            dtype = jnp.result_type(leaf)
        except TypeError:
            dtype = type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"`statistic` must return real floating-point arrays, got {dtype} at {name}; integers have no "
                "gradient to constrain."
            )


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with a name for an error message; a distribution is one leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, Distribution))
    return [(jax.tree_util.keystr(path) or "the tree itself", leaf) for path, leaf in leaves]


def is_sharded(x: Array) -> bool:
    """Whether `x` is split over a mesh with Explicit axes, `jax.make_mesh`'s default: then no axes may be merged."""
    return any(axes is not None for axes in jax.typeof(x).sharding.spec)
