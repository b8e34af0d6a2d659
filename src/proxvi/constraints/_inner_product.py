"""The inner product of two trees, for both constraints."""

import jax
import jax.numpy as jnp
from jax import Array

from proxvi._typing import ParamTree, Scalar
from proxvi._validation import is_sharded


def inner_products(a: ParamTree, b: ParamTree) -> ParamTree:
    """The inner product of each pair of leaves."""

    def product(x: Array, y: Array) -> Array:
        wide = jnp.result_type(float)
        if is_sharded(x) or is_sharded(y):  # and cannot be flattened
            return jnp.sum(x.astype(wide) * y.astype(wide))
        # A dot product runs at memory speed on every backend, where a sum of products does not on CPU.
        return jnp.vdot(x, y, preferred_element_type=wide)

    return jax.tree.map(product, a, b)


def inner_product(a: ParamTree, b: ParamTree) -> Scalar:
    """The inner product of two trees."""
    return sum(jax.tree.leaves(inner_products(a, b)), start=jnp.zeros(()))
