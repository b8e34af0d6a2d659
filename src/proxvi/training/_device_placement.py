"""Where arrays are: on one device, or on a mesh of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from proxvi._typing import Tree
from proxvi.training._processes import local
from proxvi.training._run_fingerprint import is_key


class Placement:
    """Copies of the parameters on every device, and batches split along the first axis of a mesh.

    Args:
        mesh: None for one device.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        # XLA propagates the shardings, whatever type the axes of the caller's mesh have.
        self._mesh = None if mesh is None else Mesh(mesh.devices, mesh.axis_names)

    @property
    def num_devices(self) -> int:
        """All of them."""
        return 1 if self._mesh is None else self._mesh.size

    @property
    def num_parts(self) -> int:
        """Into which a batch is split."""
        return 1 if self._mesh is None else self._mesh.devices.shape[0]

    @property
    def everywhere(self) -> NamedSharding | None:
        """The sharding of an array that is on every device; None without a mesh."""
        return None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())

    def copy(self, tree: Tree) -> Tree:
        """Copy a tree to every device."""
        everywhere = self.everywhere
        if everywhere is None:
            return jax.tree.map(jnp.asarray, tree)

        def one(x: Tree) -> jax.Array:
            if is_key(x):
                return jax.random.wrap_key_data(one(jax.random.key_data(x)), impl=jax.random.key_impl(x))
            return jax.make_array_from_process_local_data(everywhere, np.asarray(local(x)), np.shape(x))

        return jax.tree.map(one, tree)

    def split(self, batch: Tree) -> Tree:
        """Split a batch; runs on the devices."""
        if self._mesh is None:
            return batch
        rows = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names[0]))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows), batch)

    def split_stack(self, stack: Tree) -> Tree:
        """Split a stack of batches, of which each process has its own part."""
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, stack)
        rows = NamedSharding(self._mesh, PartitionSpec(None, self._mesh.axis_names[0]))
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), stack)
