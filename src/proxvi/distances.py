"""Distances `d(f(λ̃), f(λ))` between the statistic of the reference and the current one.

A distance is a function of two trees of the same structure, reference first. It returns a scalar that is never
negative. Where the two agree, value and slope are 0.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from proxvi import _distributions
from proxvi._typing import Distribution, Float, Scalar, Tree

__all__ = ["inverse_huber", "kl", "squared"]


def inverse_huber(reference: Tree, current: Tree) -> Scalar:
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


def _inverse_huber(gap: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    size = gap * jax.lax.stop_gradient(jnp.sign(gap))  # |gap|, with slope 0 at 0: jnp.abs has slope 1 there
    return jnp.where(size < 1.0, size, 0.5 * (gap**2 + 1.0))


def squared(reference: Tree, current: Tree) -> Scalar:
    """Squared Euclidean distance; with the `identity` statistic, the proximity term of gradient descent.

        d(x, y) = Σᵢ (xᵢ − yᵢ)²

    Args:
        reference: as for `inverse_huber`.
        current: as for `inverse_huber`.

    Returns:
        The scalar distance, summed over all entries of all leaves.

    Example:
        >>> import jax.numpy as jnp
        >>> print(squared({"a": jnp.array([0.0, 1.0])}, {"a": jnp.array([2.0, 1.0])}))
        4.0
    """
    return _sum_over_gaps(jnp.square, reference, current, name="squared")


def kl(reference: Tree, current: Tree) -> Scalar:
    """Divergence between distributions; with the identity statistic this is KL-proximal, or trust-region, VI.

        d(q̃, q) = KL(q ‖ q̃)

    Batch axes are averaged and latent axes summed, as everywhere in proxvi. The divergence must have a closed form or a
    finite support. For other families, constrain a statistic.

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
    total = jnp.zeros(())
    for at, q_reference, q in _paired(reference, current, name="kl"):
        if not (isinstance(q_reference, Distribution) and isinstance(q, Distribution)):
            raise TypeError(
                f"`kl` compares distributions, got {type(q).__name__} at {at}; use the `identity` statistic of a "
                "distribution, or `inverse_huber` for arrays."
            )
        try:
            divergence = jnp.sum(_distributions.average_divergence(q, q_reference))
        except NotImplementedError as error:
            raise NotImplementedError(
                f"`kl` needs a closed form, got {type(_distributions.innermost(q_reference)).__name__}, which has "
                "none; constrain a statistic of it instead (`entropy` with a key)."
            ) from error
        # Rounding can leave −1e−8 where the two agree: clip the value, keep the slope.
        total = total + (divergence + jax.lax.stop_gradient(jnp.maximum(divergence, 0.0) - divergence))
    return total


def _sum_over_gaps(function: Callable[[Array], Array], reference: Tree, current: Tree, *, name: str) -> Scalar:
    total = jnp.zeros(())
    for at, x, y in _paired(reference, current, name=name):
        if isinstance(x, Distribution) or isinstance(y, Distribution):
            raise TypeError(
                f"`{name}` compares arrays, got {type(y).__name__} at {at}; use the distance `kl`, or a statistic of "
                "the distribution such as `entropy`."
            )
        total = total + jnp.sum(function(jnp.asarray(y) - jnp.asarray(x)))
    return total


def _paired(reference: Tree, current: Tree, *, name: str) -> Iterator[tuple[str, Any, Any]]:
    """The name of each leaf, and the leaf in both trees; trees that cannot be compared are refused."""
    (then, before), (pairs, now) = (
        jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, Distribution))
        for tree in (reference, current)
    )
    if before != now:
        raise ValueError(
            f"`{name}` compares trees of one structure, got {before} for the reference and {now} now; a statistic must "
            "return the same structure at every step."
        )
    if not pairs:
        raise ValueError(
            f"`{name}` needs at least one leaf to compare, got an empty tree; let the statistic return something."
        )
    for (_, x), (path, y) in zip(then, pairs, strict=True):
        at = jax.tree_util.keystr(path) or "the tree itself"
        shapes = [leaf.shape() if isinstance(leaf, Distribution) else jnp.shape(leaf) for leaf in (x, y)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"`{name}` compares equal shapes, got {shapes[0]} for the reference and {shapes[1]} now at {at}; a "
                "statistic must return the same shape at every step (average over the batch)."
            )
        yield at, x, y
