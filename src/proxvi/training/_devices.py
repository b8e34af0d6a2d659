"""Several devices and several processes."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from proxvi._typing import Batch, Tree


class Placement:
    """Parameters are replicated on all devices; batches are sharded along the first axis of a mesh.

    Args:
        mesh: None for one device.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        # XLA propagates the shardings, whatever type the axes of the caller's mesh have.
        self._mesh = None if mesh is None else Mesh(mesh.devices, mesh.axis_names)
        self.num_devices = 1 if mesh is None else mesh.size
        self.num_parts = 1 if mesh is None else mesh.devices.shape[0]  # that a batch is sharded into
        self.replicated = None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())
        self._rows = None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names[0]))

    def connect(self) -> None:
        """Connect the processes, if there are several.

        Gloo, which connects CPUs, gives up if one process comes to their first collective 30 seconds after another.
        Compiling, or reading a batch, can take one of them that much longer.
        """
        if jax.process_count() == 1:
            return
        from_process_zero((np.zeros(1),))  # which connects other groups of devices than a sum over a batch does
        if self._rows is not None:
            zeros = jax.make_array_from_callback((self.num_parts,), self._rows, np.zeros(self.num_parts).__getitem__)
            jax.block_until_ready(jnp.sum(zeros))

    def reach(self, tree: Tree) -> Tree:
        """A tree whose arrays on other devices than those of the mesh are copied to all of these."""
        if self.replicated is None:
            return tree
        devices = self.replicated.device_set

        def is_elsewhere(x: Tree) -> bool:
            return isinstance(x, jax.Array) and x.sharding.device_set != devices

        return jax.tree.map(lambda x: self.replicate(x) if is_elsewhere(x) else x, tree)

    def replicate(self, tree: Tree) -> Tree:
        """Copy a tree to all devices."""
        replicated = self.replicated
        if replicated is None:
            return jax.tree.map(jnp.asarray, tree)

        def one(x: Tree) -> jax.Array:
            if is_key(x):
                return jax.random.wrap_key_data(one(jax.random.key_data(x)), impl=jax.random.key_impl(x))
            return jax.make_array_from_process_local_data(replicated, np.asarray(local(x)), np.shape(x))

        return jax.tree.map(one, tree)

    def shard(self, batch: Tree) -> Tree:
        """Shard a batch; runs on the devices."""
        rows = self._rows
        if rows is None:
            return batch
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows) if jnp.ndim(x) else x, batch)

    def shard_stack(self, stack: Tree) -> Tree:
        """Shard a stack of batches, of which each process has its own part."""
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, stack)
        rows = NamedSharding(self._mesh, PartitionSpec(None, self._mesh.axis_names[0]))
        everywhere = NamedSharding(self._mesh, PartitionSpec())  # for what is a scalar in each batch
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(rows if np.ndim(x) > 1 else everywhere, x), stack
        )


def agree(stop: bool, save: bool, pace: int) -> tuple[bool, bool, int]:
    """Whether to stop, if any process wants to; whether to save, as process 0 says; the steps of the shortest chunk."""
    # JAX's own `reached_preemption_sync_point` does not serve: Orbax asks it too, with another count, at every save.
    if jax.process_count() == 1:
        return stop, save, pace
    everyone = multihost_utils.process_allgather(np.asarray([stop, save, pace], np.int32))
    return bool(everyone[:, 0].any()), bool(everyone[0, 1]), int(everyone[:, 2].min())


def gather(value: Any) -> list[Any]:
    """The list of the values of all processes; each is JSON."""
    if jax.process_count() == 1:
        return [value]
    own = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.asarray(own.size)))
    padded = np.pad(own, (0, int(sizes.max()) - own.size))
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def from_process_zero(batch: Batch) -> Batch:
    """The batch of process 0, broadcast to all."""
    return batch if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(batch)


def local(x: Tree) -> Tree:
    """The copy of a replicated array that this process holds; anything else as it is."""
    return x.addressable_data(0) if isinstance(x, jax.Array) and not x.is_fully_addressable else x


def is_key(x: object) -> bool:
    """Whether these are typed random keys, whose bytes NumPy cannot read."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
