"""What several processes need to act as one; a single process does none of it."""

import json

import jax
import numpy as np
from jax.experimental import multihost_utils

from proxvi._typing import Batch, Json, Tree


def agree(stop: bool, save: bool) -> tuple[bool, bool]:
    """Whether to stop, if any process wants to, and whether to save, which process 0 decides by its clock."""
    # JAX's own `reached_preemption_sync_point` does not serve: Orbax asks it too, with another count, at every save.
    if jax.process_count() == 1:
        return stop, save
    everyone = multihost_utils.process_allgather(np.asarray([stop, save]))
    return bool(everyone[:, 0].any()), bool(everyone[0, 1])


def everyones(value: Json | str | None) -> list[Json | str | None]:
    """The `value` of every process, in each of them."""
    if jax.process_count() == 1:
        return [value]
    own = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.asarray(own.size)))
    padded = np.pad(own, (0, int(sizes.max()) - own.size))
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def from_process_zero(batch: Batch) -> Batch:
    """The batch of process 0, in each of them."""
    return batch if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(batch)


def local(x: Tree) -> Tree:
    """The copy of a replicated array that this process holds; anything else as it is."""
    return x.addressable_data(0) if isinstance(x, jax.Array) and not x.is_fully_addressable else x
