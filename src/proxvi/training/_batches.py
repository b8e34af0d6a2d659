"""Sources of batches: arrays in memory, or a stream that can be resumed."""

import base64
import copy
import itertools
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from proxvi._typing import Batch, Json, Tree
from proxvi._validation import check_arrays, common_length
from proxvi.training._devices import Placement, gather, local
from proxvi.training._run_fingerprint import digest, signature
from proxvi.training.checkpoints import ConfigurationError

LOG = logging.getLogger("proxvi")
STREAM_BYTES = 64 * 2**20  # of batches that a stream hands to the device at once
ORDERED_ROWS = 2**20  # in the epochs whose orders are made at once, which takes a second or two


def make_source(
    data: tuple[Tree, ...], batch_size: int | None, key: Array, longest: int, placement: Placement
) -> "Arrays | Stream":
    """A source of batches: a `Stream` for one iterable that is no array, `Arrays` for anything else."""
    if (
        len(data) == 1
        and hasattr(data[0], "__iter__")
        and not (hasattr(data[0], "dtype") or isinstance(data[0], tuple | dict))
    ):
        if batch_size is not None:
            raise ValueError(
                f"`batch_size` must be None where `data` is an iterable, got {batch_size}; the iterable makes its "
                "own batches."
            )
        source = Stream(data[0], longest, placement.shard_stack)
        _check_divides("data", source.first(), placement.num_parts, jax.process_count())
        return source
    source = Arrays(placement.replicate(data), batch_size, key, longest, placement.shard)
    if batch_size is None:
        _check_divides("data", data, placement.num_parts)
    else:
        _check_divides("batch_size", np.empty(batch_size), placement.num_parts)
    return source


def _check_divides(name: str, batch: Tree, parts: int, processes: int = 1) -> None:
    """Refuse a batch whose rows cannot be dealt evenly to the devices; a scalar goes to all of them."""
    for rows in (np.shape(x)[0] * processes for x in jax.tree.leaves(batch) if np.ndim(x)):
        if rows % parts:
            raise ValueError(
                f"`{name}` must be a multiple of the {parts} devices along the first axis of `mesh`, got {rows} rows; "
                "change one of them."
            )


class Arrays:
    """Arrays in memory; every epoch visits each row once, in an order that depends on the key and the epoch only.

    The batch of step t is rows `order_e[B i : B (i + 1)]`, where `e, i = divmod(t, N // B)` and `order_e` is
    `jax.random.permutation(fold_in(key, e), N)`. So a resumed run sees the same batches, and there is nothing to save.
    The `N % B` rows that an epoch drops differ from epoch to epoch.

    Args:
        arrays: with a common leading axis.
        batch_size: rows of a batch; None takes the whole arrays as one batch.
        key: for the order.
        longest: the most steps of one feed.
        shard: a function that shards a batch over devices.
    """

    def __init__(
        self,
        arrays: tuple[Tree, ...],
        batch_size: int | None,
        key: Array,
        longest: int,
        shard: Callable[[Tree], Tree] = lambda batch: batch,
    ) -> None:
        check_arrays(arrays, batch_size)
        self.rows = 0 if batch_size is None else common_length("data", arrays, "it is the rows' axis")
        self.arrays, self.batch_size, self.key, self._shard = arrays, batch_size, key, shard
        self.longest = longest
        self.steps_per_epoch = 1 if batch_size is None else self.rows // batch_size
        # Orders are made for whole blocks of epochs, so that short epochs do not mean short feeds.
        self._epochs = max(1, min(longest // self.steps_per_epoch, ORDERED_ROWS // max(self.rows, 1)))
        self._block, self._orders = -1, jnp.zeros(())
        self._make = jax.jit(self._make_orders)

    def _make_orders(self, key: Array, first: Array) -> Array:
        def order(epoch: Array) -> Array:
            return jax.random.permutation(jax.random.fold_in(key, epoch), self.rows).astype(jnp.int32)

        return jax.lax.map(order, first + jnp.arange(self._epochs))

    def feed(self, step: int, limit: int) -> tuple[Tree, int]:
        """The input of `pick` from `step` on, and for how many steps it lasts, at most `limit`."""
        if self.batch_size is None:
            return (self.arrays, self._orders), limit
        block, start = divmod(step, self._epochs * self.steps_per_epoch)
        if block != self._block:
            self._block, self._orders = block, self._make(self.key, jnp.asarray(block * self._epochs))
        return (self.arrays, self._orders), min(limit, self._epochs * self.steps_per_epoch - start)

    def first(self) -> Batch:
        """The batch of step 0, for `init`."""
        arrays = jax.tree.map(local, self.arrays)
        if self.batch_size is None:
            return arrays
        (_, orders), _ = self.feed(0, 1)
        rows = np.asarray(orders)[0, : self.batch_size]
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), arrays)

    def pick(self, feed: Tree, step: Array, i: Array) -> Batch:
        """The batch of `step`, the `i`-th of its feed; runs on the device."""
        del i
        arrays, orders = feed
        if self.batch_size is None:
            return self._shard(arrays)
        epoch, place = jnp.divmod(step, self.steps_per_epoch)
        start = (epoch % self._epochs, place * self.batch_size)
        rows = jax.lax.dynamic_slice(orders, start, (1, self.batch_size))[0]
        return self._shard(jax.tree.map(lambda x: jnp.take(x, rows, axis=0), arrays))

    def state(self, step: int) -> None:
        """None: a batch depends on its step only."""

    def seek(self, step: int, state: object, *, accept_changes: bool) -> None:
        """Go to `step`; nothing to do."""

    def fetch_ahead(self, step: int, limit: int) -> int:
        """Prepare the next feed; nothing to do."""
        del step, limit
        return 0

    def describe(self) -> Json:
        """What a checkpoint must agree with, contents included."""
        arrays = jax.tree.map(local, self.arrays)
        return {"batch_size": self.batch_size, "data": signature(arrays), "data_digest": digest(arrays)}


class Stream:
    """Batches from an iterable, such as a Grain loader; the device gets a few at a time.

    An iterator with `get_state` and `set_state`, such as Grain's, resumes from its state. Any other is started again,
    and the batches that were used before are dropped. An iterable that ends is started again.

    Args:
        batches: an iterable of batches; a tuple or list (as of a PyTorch loader) is several arguments of the model.
        longest: the most steps of one feed.
        shard: a function that shards a stack of batches over devices.
    """

    def __init__(
        self, batches: Iterable[Tree], longest: int, shard: Callable[[Tree], Tree] = lambda stack: stack
    ) -> None:
        self._batches, self._shard = batches, shard
        self._iterator, self._epoch, self._pulled = iter(batches), 0, 0
        # For a checkpoint: by the step after a feed, the position of the iterator then, and a witness of its contents:
        # the step and the digest of the first batch of the feed, and the position before it.
        self._states: dict[int, Json] = {0: {"position": self._position(), "witness": None}}
        self._first = first = self._next()
        size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(first))
        self.longest = max(1, min(longest, STREAM_BYTES // max(size, 1)))
        self._pending = [first]  # pulled, and not yet part of a feed
        self._feed: tuple[int, Tree, int] | None = None

    def _position(self) -> Json | None:
        if not hasattr(self._iterator, "get_state"):
            return None
        state = self._iterator.get_state()  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(state, bytes):
            return {"epoch": self._epoch, "base64": base64.b64encode(state).decode()}
        return {"epoch": self._epoch, "state": copy.deepcopy(state)}  # the iterator's own may change as it goes on

    def _next(self) -> Batch:
        batch = next(self._iterator, None)
        if batch is None:
            self._epoch += 1
            self._iterator = iter(self._batches)
            batch = next(self._iterator, None)
        if batch is None:
            raise ValueError(
                f"`data` ended after {self._pulled} batches and cannot be started again; pass an iterable that can, "
                "not a generator, or one that is long enough."
            )
        self._pulled += 1
        batch = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        if not any(np.ndim(x) for x in jax.tree.leaves(batch)):
            raise ValueError(
                f"`data` must be arrays or an iterable of batches, got batches of {batch!r}; pass an array."
            )
        return batch

    def first(self) -> Batch:
        """The batch of step 0, for `init`; in several processes the part of this one."""
        return self._first

    def feed(self, step: int, limit: int) -> tuple[Tree, int]:
        """A stack of batches from `step` on, and how many there are."""
        if self._feed is None or self._feed[0] != step:
            self.fetch_ahead(step, limit)
        assert self._feed is not None
        _, stack, length = self._feed
        return stack, length

    def fetch_ahead(self, step: int, limit: int) -> int:
        """Prepare the next feed while the device is busy with this one; returns the number of its batches."""
        if limit < 1:
            return 0
        if self._feed is not None and self._feed[0] == step:
            return self._feed[2]
        length = min(limit, self.longest)
        before = None if self._pending else self._position()
        batches = self._pending + [self._next() for _ in range(length - len(self._pending))]
        self._pending = []
        witness = {"step": step, "digest": digest(batches[0]), "position": before}
        self._states[step + length] = {"position": self._position(), "witness": witness}
        self._states = dict(itertools.islice(self._states.items(), max(0, len(self._states) - 3), None))
        batches += [batches[-1]] * (self.longest - length)  # one shape, so one compilation
        try:
            stack = jax.tree.map(lambda *x: np.stack(x), *batches)
        except ValueError as error:
            raise ValueError(
                f"`data` must yield batches of one shape, got {sorted({signature(batch) for batch in batches})}; drop "
                "the short one at the end of an epoch (`drop_remainder=True` in Grain)."
            ) from error
        self._feed = (step, self._shard(stack), length)
        return length

    def pick(self, feed: Tree, step: Array, i: Array) -> Batch:
        """The `i`-th batch of a feed; runs on the device."""
        del step
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), feed)

    def state(self, step: int) -> list[Json]:
        """For each process, the position of its iterator before the batch of `step`, and a witness of its contents."""
        return gather(self._states[step])

    def seek(self, step: int, states: object, *, accept_changes: bool) -> None:
        """Go from the start to `step`: by the iterator's own state, or by counting.

        Args:
            step: to go to.
            states: what `state` returned.
            accept_changes: whether other data are only said in the log.

        Raises:
            ConfigurationError: if the batch of the witness is another one now, and changes are not accepted.
        """
        state: Json = {"position": None, "witness": None}
        if isinstance(states, list) and len(states) == jax.process_count():  # otherwise the data are others
            state = states[jax.process_index()]
        witness: Any = state["witness"]
        found: str | None = None
        if state["position"] is None or not hasattr(self._iterator, "set_state"):
            for i in range(step):
                batch = self._pending.pop() if self._pending else self._next()
                if witness is not None and i == witness["step"]:
                    found = digest(batch)
        else:
            if witness is not None and witness["position"] is not None:
                self._go_to(witness["position"])
                found = digest(self._next())
            self._go_to(state["position"])
        if witness is not None and found not in (None, witness["digest"]):
            if not accept_changes:
                raise ConfigurationError(
                    f"`data` must yield the batches that it yielded before the checkpoint of step {step}, got another "
                    f"one at step {witness['step']}; use another folder, or the data of the checkpoint, or go on by "
                    "`Checkpointing(..., accept_changes=True)`."
                )
            LOG.warning("`data` yields other batches than before: that of step %d is another one", witness["step"])
        self._feed, self._states = None, {step: state}

    def _go_to(self, position: Json) -> None:
        self._pending, self._epoch = [], position["epoch"]
        saved = base64.b64decode(position["base64"]) if "base64" in position else position["state"]
        self._iterator.set_state(saved)  # pyright: ignore[reportAttributeAccessIssue]

    def describe(self) -> Json:
        """What a checkpoint must agree with.

        Raises:
            TypeError: if the position of the iterator is nothing that a checkpoint can hold.
        """
        try:
            json.dumps(self._states[0])
        except TypeError as error:
            raise TypeError(
                "`data` must have a `get_state` that returns JSON or bytes, for checkpoints, got "
                f"{self._states[0]['position']!r}, and {error}; write `int(...)` and `.tolist()` where it has NumPy's."
            ) from error
        return {"batch": signature(self._first), "batch_digest": gather(digest(self._first))}
