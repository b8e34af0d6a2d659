"""Steps whose loss, gradient or state is not finite: they are skipped, counted, and stop a run if too many follow."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from proxvi._typing import Bool, Int, Scalar, Tree
from proxvi._validation import is_sharded

if TYPE_CHECKING:
    from proxvi.svi.proximity_svi import ProximitySVI, ProximitySVIState

SMALL = 10_000  # numbers of an array
LOSS, STATE = -1, -2  # in `Skipped.parameter`


class Skipped(NamedTuple):
    """Steps that were not taken because the loss or a gradient was not finite.

    Attributes:
        total: number of skipped steps so far.
        in_a_row: number of skipped steps since the latest good one.
        step: where the latest such row began, counting from 0 over good and skipped steps.
        parameter: what was not finite there first, as an index into the sorted names of the parameters; −1 for the
            loss, −2 for the state of the optimiser or of a constraint.

    Example:
        >>> Skipped(total=3, in_a_row=0, step=17, parameter=-1).total
        3
    """

    total: Int[Array, "*starts"] | int
    in_a_row: Int[Array, "*starts"] | int
    step: Int[Array, "*starts"] | int
    parameter: Int[Array, "*starts"] | int

    @classmethod
    def none(cls) -> "Skipped":
        """Before the first step."""
        # Four arrays, not one four times: a loop may donate the state.
        return cls(*(jnp.full((), value, jnp.int32) for value in (0, 0, 0, -1)))

    def count_step(
        self, good: Bool[Array, ""], step: Array, finite: Bool[Array, " parameters"], loss: Scalar
    ) -> "Skipped":
        """Count a step: whether it was good, its number, which gradients are finite, its loss."""
        begins = ~good & (self.in_a_row == 0)
        elsewhere = jnp.where(jnp.isfinite(loss), STATE, LOSS)
        parameter = jnp.where(jnp.all(finite), elsewhere, jnp.argmin(finite) if finite.size else LOSS)
        before_step, before_parameter = jnp.asarray(self.step), jnp.asarray(self.parameter)
        return Skipped(
            self.total + ~good,
            jnp.where(good, 0, self.in_a_row + 1),
            jnp.where(begins, step, before_step).astype(before_step.dtype),
            jnp.where(begins, parameter, before_parameter).astype(before_parameter.dtype),
        )


def guarded_update(
    svi: "ProximitySVI", state: "ProximitySVIState", *args: Any, **kwargs: Any
) -> tuple["ProximitySVIState", Array]:
    """`svi.stable_update`, until `svi.max_skipped_in_a_row` steps were skipped; after that nothing changes."""
    stopped = state.skipped.in_a_row >= svi.max_skipped_in_a_row
    after, loss = svi.stable_update(state, *args, **kwargs)
    return jax.tree.map(lambda new, old: jnp.where(stopped, old, new), after, state), loss


def raise_if_stopped(svi: "ProximitySVI", state: "ProximitySVIState") -> None:
    """Raise `FloatingPointError` if the latest `svi.max_skipped_in_a_row` steps were skipped."""
    skipped = jax.device_get(state.skipped)
    if skipped.in_a_row < svi.max_skipped_in_a_row:
        return
    names = sorted(svi.optim.get_params(state.optim_state))
    what = {LOSS: "the loss", STATE: "the state of the optimiser"}.get(int(skipped.parameter))
    what = what or f"the gradient of `{names[skipped.parameter]}`"
    raise FloatingPointError(
        f"{what} was not finite at step {skipped.step}, nor any step since: {skipped.in_a_row} in a row, where "
        f"`max_skipped_in_a_row` allows {svi.max_skipped_in_a_row - 1}. The parameters are as before them. "
        "Lower the learning rate, clip the gradient, or look at the model for a logarithm of 0."
    )


def stays_finite(before: "ProximitySVIState", after: "ProximitySVIState") -> Bool[Array, ""]:
    """Whether no array that later steps read has become not finite; some are infinite from the start on."""
    became = [
        is_finite(old) & ~is_finite(new)
        for old, new in zip(*(jax.tree.leaves(_read_later(state)) for state in (before, after)), strict=True)
    ]
    return ~jnp.any(jnp.stack(became))


def _read_later(state: "ProximitySVIState") -> Tree:
    return state.optim_state, state.mutable_state, [c.constraint for c in state.constraints]


def is_finite(tree: Tree) -> Bool[Array, ""]:
    """Whether all leaves are finite: a weighted sum is not, if one entry is not."""

    def total(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:  # keys and counters
            return jnp.zeros(())
        if x.size < SMALL or is_sharded(x):  # quick to compile; and what is sharded cannot be reshaped
            return jnp.where(jnp.all(jnp.isfinite(x)), 0.0, jnp.nan)
        # A product with a vector runs at memory speed on CPU, where a reduction takes ten times as long. The small
        # weight keeps the sum of finite numbers finite; that of float16 is taken in float32.
        rows = jnp.reshape(x, (-1, x.shape[-1] if x.ndim else 1))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        weight = jnp.full(rows.shape[-1], 1.0 if x.dtype == jnp.float16 else 2.0**-100, x.dtype)
        return jnp.sum(jnp.matmul(rows, weight, preferred_element_type=wide))

    return jnp.isfinite(sum((total(x) for x in jax.tree.leaves(tree)), start=jnp.zeros(())))
