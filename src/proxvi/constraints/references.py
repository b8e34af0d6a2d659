"""The reference `λ̃` that a proximity constraint measures from.

A reference is a set of pure functions, so the constraint does not need to know what is averaged.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from proxvi._typing import Int, ParamTree, Scalar, Tree
from proxvi._validation import check_number

__all__ = ["Reference", "parameter_average", "statistic_average"]


class Reference(NamedTuple):
    """What a constraint keeps close to, as pure functions over a state of fixed structure.

    Attributes:
        init: `(params, describe) -> state`; `describe()` gives the shapes and dtypes of the statistic.
        update: `(state, params, value, step) -> state` adds the iterate `λ_t` and its statistic `f(λ_t)`.
        value: `(state, statistic, value, step) -> f(λ̃)`, where `statistic` evaluates `f` at any parameters.
        read_first: whether Algorithm 2 reads the reference before it is updated. Needed where the reference is the
            latest iterate alone: otherwise it would always equal the current one, and the constraint would be void.

    Example:
        Stay near the initial parameters:

        >>> anchor = Reference(
        ...     init=lambda params, describe: params,
        ...     update=lambda state, params, value, step: state,
        ...     value=lambda state, statistic, value, step: statistic(state),
        ... )
    """

    init: Callable[[ParamTree, Callable[[], Tree]], Any]
    update: Callable[[Any, ParamTree, Tree, Array], Any]
    value: Callable[[Any, Callable[[ParamTree], Tree], Tree, Array], Tree]
    read_first: bool = False

    def advance(
        self,
        state: Tree,
        params: ParamTree,
        value: Tree,
        step: Int[Array, ""],
        statistic: Callable[[ParamTree], Tree],
        *,
        read_first: bool,
    ) -> tuple[Tree, Tree]:
        """`f(λ̃_t)`, and the state that holds `λ_t`; with `read_first` the former does not hold it yet."""
        after = self.update(state, params, value, step)
        return self.value(state if read_first else after, statistic, value, step), after


class Average(NamedTuple):
    """A moving average that small steps move.

    In float32 an average near 100 with a decay of 0.9999 stops 0.04 short of its target: the steps are below half of
    the last bit. So what rounding took from each step is added to the next (compensated summation).

    Attributes:
        value: the average.
        lost: what rounding took from it, in half of its precision: it only has to be right to a few bits.
    """

    value: Tree
    lost: Tree

    @classmethod
    def of(cls, value: Tree) -> "Average":
        """Begin with `value`."""
        return cls(value, jax.tree.map(lambda x: jnp.zeros_like(x, dtype=_half(x)), value))

    def move(self, target: Tree, weight: float | Scalar) -> "Average":
        """Move by `weight · (target − value)`; leaves that cannot be averaged (masks) become those of the target."""

        def move(value: Array, lost: Array, target: Array) -> tuple[Array, Array]:
            if not jnp.issubdtype(value.dtype, jnp.inexact):
                return jnp.asarray(target), lost
            step = (weight * (jnp.asarray(target, value.dtype) - value)).astype(value.dtype) + lost.astype(value.dtype)
            moved = value + step
            return moved, (step - (moved - value)).astype(lost.dtype)

        values, structure = jax.tree.flatten(self.value)
        moved = [move(*leaf) for leaf in zip(values, jax.tree.leaves(self.lost), jax.tree.leaves(target), strict=True)]
        return Average(*(jax.tree.unflatten(structure, [pair[i] for pair in moved]) for i in (0, 1)))


def parameter_average(decay: float = 0.9999) -> Reference:
    """Moving average of the parameters, as in the text of the paper; the statistic is evaluated at it.

        λ̃ ← α λ̃ + (1 − α) λ_{t+1},    λ̃_0 = λ_0

    The average is kept in float32 or wider, with what rounding took from it (`Average`): otherwise small steps are
    lost, in bfloat16 with a decay of 0.999 all of them. It costs one and a half copies of the parameters and, at each
    step, one forward pass of the statistic. To keep only the parameters that the statistic reads, give the others an
    optimiser of their own by `optax.partition`.

    Args:
        decay: `α` in [0, 1). The average holds the current iterate with weight 1 − α, as in the paper, so a small `α`
            is a weak constraint. 0 is special: it means the previous step.

    Returns:
        The reference, for `Proximity(..., reference=...)`.

    Example:
        >>> reference = parameter_average(0.99)
    """
    _check_decay(decay)

    def init(params: ParamTree, _describe: Callable[[], Tree]) -> Tree:
        # A copy, so that a loop may donate the buffers of the parameters and of the state together.
        return Average.of(jax.tree.map(lambda p: jnp.array(p, dtype=_wide(p), copy=True), params))

    def update(state: Average, params: ParamTree, _value: Tree, _step: Int[Array, ""]) -> Average:
        return state.move(params, 1.0 - decay)

    def value(state: Average, statistic: Callable[[ParamTree], Tree], _value: Tree, _step: Int[Array, ""]) -> Tree:
        return statistic(state.value)

    return Reference(init, update, value, read_first=decay == 0.0)


def statistic_average(decay: float = 0.9999) -> Reference:
    """Bias-corrected moving average of the statistic itself, as in the authors' experiments.

        f̃_t = Σ_{i ≤ t} α^{t−i} f(λ_i) / Σ_{i ≤ t} α^{t−i}

    It needs no copy of the parameters and no second forward pass. With a statistic of the batch, each value is that of
    its own batch. A statistic that is not finite stays in the average: wrap the optimiser in `optax.apply_if_finite`.

    Args:
        decay: as for `parameter_average`.

    Returns:
        The reference, for `Proximity(..., reference=...)`.

    Example:
        >>> reference = statistic_average(0.99)
    """
    _check_decay(decay)
    log_decay = math.log(decay) if decay else -math.inf

    def init(_params: ParamTree, describe: Callable[[], Tree]) -> Tree:
        return Average.of(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _wide(leaf)), describe()))

    def update(state: Average, _params: ParamTree, value: Tree, step: Int[Array, ""]) -> Average:
        # The recursive form of the bias-corrected average: each value moves it by (1 − α) / (1 − αⁿ) of the gap.
        _check_unchanged(state.value, value)
        count = jnp.asarray(step, jnp.result_type(float)) + 1.0  # of a float: the largest int32 plus 1 is negative
        moved = state.move(value, (1.0 - decay) / -jnp.expm1(count * log_decay))
        return moved._replace(value=_exact_at_first(value, moved.value, step))

    def value(state: Average, _statistic: Callable[[ParamTree], Tree], value: Tree, step: Int[Array, ""]) -> Tree:
        return _exact_at_first(value, state.value, step)

    return Reference(init, update, value, read_first=decay == 0.0)


def _exact_at_first(value: Tree, average: Tree, step: Int[Array, ""]) -> Tree:
    """The value itself at step 0, to the last bit: the inverse Huber distance feels even a rounding error."""
    return jax.tree.map(lambda v, a: jnp.where(step == 0, jnp.asarray(v, a.dtype), a), value, average)


def _check_unchanged(average: Tree, value: Tree) -> None:
    before, now = (
        jax.tree_util.tree_leaves_with_path(jax.tree.map(jnp.shape, tree), is_leaf=lambda node: isinstance(node, tuple))
        for tree in (average, value)
    )
    if before != now:
        raise ValueError(
            f"`statistic` must return the same structure and shapes at every step, got {now} where the average holds "
            f"{before}; average over the batch, and give `example` the shapes of a real batch."
        )


def _wide(leaf: Any) -> Any:
    """The dtype that a moving average of `leaf` needs: float32 at least."""
    dtype = jnp.result_type(leaf)
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _half(leaf: Array) -> Any:
    """The dtype of what rounding takes from `leaf`."""
    return {jnp.dtype("float32"): jnp.bfloat16, jnp.dtype("float64"): jnp.float32}.get(leaf.dtype, leaf.dtype)


def _check_decay(decay: float) -> None:
    remedy = "0 keeps close to the previous step, 0.9999 to an average over about 10,000"
    check_number("decay", decay, at_least=0.0, below=1.0, kind="number", remedy=remedy)
