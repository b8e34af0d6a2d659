"""How far: distances `d(f(λ̃), f(λ))` between a statistic of the reference and the current one.

A distance is a function of two trees of the same structure, reference first, that returns a scalar, is never
negative, and is 0 with slope 0 where they agree.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from proxvi import _distributions

__all__ = ["inverse_huber", "kl", "squared"]


def inverse_huber(reference: Any, current: Any) -> Array:
    """Linear below 1, quadratic above: the paper's distance (its footnote 3), which also feels small gaps.

        d(x, y) = Σᵢ |xᵢ − yᵢ|                if |xᵢ − yᵢ| < 1
                     ½ (xᵢ − yᵢ)² + ½        otherwise

    Value and slope are continuous at 1. At 0 the slope is taken to be 0, as the paper requires of a distance.

    Args:
        reference: the statistic of the reference, a tree of arrays.
        current: the current statistic, a tree of the same structure and shapes.

    Returns:
        The scalar distance, summed over all entries of all leaves.

    Example:
        >>> import jax.numpy as jnp
        >>> print(inverse_huber(jnp.array([0.0, 0.0]), jnp.array([0.5, 3.0])))
        5.5
    """
    return _sum_over_gaps(_inverse_huber, reference, current, name="inverse_huber")


def _inverse_huber(gap: Array) -> Array:
    size = gap * jax.lax.stop_gradient(jnp.sign(gap))  # |gap|, with slope 0 at 0: jnp.abs has slope 1 there
    return jnp.where(size < 1.0, size, 0.5 * (gap**2 + 1.0))


def squared(reference: Any, current: Any) -> Array:
    """Squared Euclidean distance; with the identity statistic it is the proximity of gradient descent itself.

        d(x, y) = Σᵢ (xᵢ − yᵢ)²

    Args:
        reference: the statistic of the reference, a tree of arrays.
        current: the current statistic, a tree of the same structure and shapes.

    Returns:
        The scalar distance, summed over all entries of all leaves.

    Example:
        >>> import jax.numpy as jnp
        >>> print(squared({"a": jnp.array([0.0, 1.0])}, {"a": jnp.array([2.0, 1.0])}))
        4.0
    """
    return _sum_over_gaps(jnp.square, reference, current, name="squared")


def kl(reference: Any, current: Any) -> Array:
    """Divergence between distributions; with the identity statistic this is KL-proximal, or trust-region, VI.

        d(q̃, q) = KL(q ‖ q̃)

    Batch axes are averaged and latent axes summed, as everywhere in proxvi. The divergence must have a closed form
    or a finite support; families without one are constrained through a statistic instead.

    Args:
        reference: a distribution or a tree of distributions.
        current: a tree of the same structure, of the same families.

    Returns:
        The scalar divergence, summed over the distributions of the tree.

    Example:
        >>> import numpyro.distributions as dist
        >>> print(kl(dist.Normal(0.0, 1.0), dist.Normal(2.0, 1.0)))
        2.0
    """
    pairs = _paired(reference, current, name="kl")
    total = jnp.zeros(())
    for name, q_reference, q in pairs:
        if not (_distributions.is_distribution(q_reference) and _distributions.is_distribution(q)):
            raise TypeError(
                f"`kl` compares distributions, got {type(q).__name__} at {name}; use the `identity` statistic of "
                "a distribution, or `inverse_huber` for arrays."
            )
        total = total + _divergence(q_reference, q)
    return total


def _divergence(q_reference: Any, q: Any) -> Array:
    inner = _distributions.innermost(q_reference)
    try:
        divergence = _distributions.average_over_batch(q, lambda base: _distributions.kl(base, inner, None, 0))
    except NotImplementedError as error:
        raise NotImplementedError(
            f"`kl` needs a closed form, got {type(inner).__name__}, which has none; constrain a statistic of it "
            "instead (`entropy` with a key)."
        ) from error
    divergence = jnp.sum(divergence)
    # Rounding can leave −1e−8 where the two agree: clip the value, keep the slope.
    return divergence + jax.lax.stop_gradient(jnp.maximum(divergence, 0.0) - divergence)


def _sum_over_gaps(function: Callable[[Array], Array], reference: Any, current: Any, *, name: str) -> Array:
    total = jnp.zeros(())
    for leaf, x, y in _paired(reference, current, name=name):
        for side in (x, y):
            if _distributions.is_distribution(side):
                raise TypeError(
                    f"`{name}` compares arrays, got {type(side).__name__} at {leaf}; use the distance `kl`, or a "
                    "statistic of the distribution such as `entropy`."
                )
        total = total + jnp.sum(function(jnp.asarray(y) - jnp.asarray(x)))
    return total


def _paired(reference: Any, current: Any, *, name: str) -> list[tuple[str, Any, Any]]:
    """The leaves of both trees side by side, after checking that they can be compared."""
    structures = [jax.tree.structure(tree, is_leaf=_distributions.is_distribution) for tree in (reference, current)]
    if structures[0] != structures[1]:
        raise ValueError(
            f"`{name}` compares trees of one structure, got {structures[0]} for the reference and "
            f"{structures[1]} now; a statistic must return the same structure at every step."
        )
    named = _distributions.leaves_with_names(current)
    if not named:
        raise ValueError(
            f"`{name}` needs at least one leaf to compare, got an empty tree; let the statistic return something."
        )
    pairs = [(leaf, x, y) for (leaf, y), (_, x) in zip(named, _distributions.leaves_with_names(reference), strict=True)]
    for leaf, x, y in pairs:
        if _shape(x) != _shape(y):
            raise ValueError(
                f"`{name}` compares equal shapes, got {_shape(x)} for the reference and {_shape(y)} now at {leaf}; "
                "a statistic must return the same shape at every step (average over the batch)."
            )
    return pairs


def _shape(leaf: Any) -> tuple[int, ...]:
    return leaf.shape() if _distributions.is_distribution(leaf) else jnp.shape(leaf)
