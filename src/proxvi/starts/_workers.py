"""Lanes that are advanced by the workers of a `concurrent.futures.Executor`, on this machine or on others."""

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from proxvi._typing import Float, Tree

__all__ = ["Workers"]

PARTS = 16  # tasks that a round is cut into, at most


class _Keys(NamedTuple):
    """Random keys as numbers: JAX's own cannot be sent to another process."""

    implementation: str
    numbers: np.ndarray


class Workers:
    """The workers of an executor, who build what they need at their first task, and keep it.

    Args:
        executor: of any kind; what is sent is pickled by it.
        build: makes what advances lanes; called in a worker.
        recipe: its arguments.
    """

    def __init__(self, executor: Executor, build: Callable[..., Any], *recipe: Any) -> None:
        self._executor, self._build = executor, build
        self._recipe = to_host(recipe)
        self._name = uuid.uuid4().hex

    def advance(self, states: Tree, *stage: Any) -> tuple[Tree, Float[np.ndarray, " lanes"]]:
        """Take the steps of a stage in every lane; the same bits as without workers."""
        count = jax.tree.leaves(states)[0].shape[0]
        states = to_host(states)
        parts = np.array_split(np.arange(count), min(PARTS, count))
        futures = [
            self._executor.submit(_advance, self._name, self._build, self._recipe, _rows(states, part), stage)
            for part in parts
        ]
        done, losses = zip(*(future.result() for future in futures), strict=True)
        joined = jax.tree.map(lambda *x: jnp.concatenate(x), *map(from_host, done))
        return joined, np.concatenate(losses)


_built: dict[str, Any] = {}
_lock = threading.Lock()  # a worker may have several threads


def _advance(name: str, build: Callable[..., Any], recipe: Any, states: Tree, stage: Any) -> tuple[Tree, np.ndarray]:
    """What a worker does."""
    with _lock:
        if name not in _built:
            _built.clear()  # of an earlier call
            _built[name] = build(*from_host(recipe))
        states, loss = _built[name].advance(from_host(states), *stage)
    return to_host(states), np.asarray(loss)


def to_host(tree: Any) -> Any:
    """Arrays of NumPy in place of those of JAX."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return _Keys(str(jax.random.key_impl(x)), np.asarray(jax.random.key_data(x)))
        return np.asarray(x)

    return jax.tree.map(leaf, tree)


def from_host(tree: Any) -> Any:
    """Undo `to_host`, but for arrays, which JAX takes as they are."""

    def leaf(x: Any) -> Any:
        if isinstance(x, _Keys):
            return jax.random.wrap_key_data(jnp.asarray(x.numbers), impl=x.implementation)
        return x

    return jax.tree.map(leaf, tree, is_leaf=_is_keys)


def _is_keys(x: Any) -> bool:
    return isinstance(x, _Keys)


def _rows(tree: Any, rows: np.ndarray) -> Any:
    def leaf(x: Any) -> Any:
        return _Keys(x.implementation, x.numbers[rows]) if isinstance(x, _Keys) else x[rows]

    return jax.tree.map(leaf, tree, is_leaf=_is_keys)
