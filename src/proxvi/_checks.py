"""What a number given as an argument must be."""

import math
from typing import Any

import jax.core


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
    """Refuse what is not a real scalar within the bounds; of a traced value only the shape can be checked."""
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
        bound = f"of at least {at_least:g}" if at_least is not None else f"above {above:g}"
        if below < math.inf:
            bound += f" and below {below:g}"
        raise ValueError(f"`{name}` must be a {kind} {bound}, got {value!r}; {remedy}.")
