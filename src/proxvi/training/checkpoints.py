"""Checkpoints that are verified before they are used."""

import contextlib
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from proxvi._typing import Json, Leaves, Tree
from proxvi.training._devices import is_key, local
from proxvi.training._run_fingerprint import signature

__all__ = ["ConfigurationError"]


class ConfigurationError(ValueError):
    """A checkpoint is intact, but belongs to another run: its configuration, a shape or a dtype differs.

    Example:
        >>> issubclass(ConfigurationError, ValueError)
        True
    """


@runtime_checkable
class CheckpointStore(Protocol):
    """Where checkpoints are kept: for each step, arrays by name and a JSON header. It need not notice damage.

    Attributes:
        location: of the store, for messages.
    """

    location: str

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints."""
        ...

    def save(self, step: int, leaves: Leaves, header: Json) -> bool:
        """Begin to save; False if the store has a checkpoint of a later step."""
        ...

    def is_saving(self) -> bool:
        """Whether a save is not complete yet."""
        ...

    def wait(self) -> None:
        """Wait until the latest save is complete; raises its error, if any."""
        ...

    def header(self, step: int) -> object:
        """The header of a checkpoint; if it is damaged, this may be anything."""
        ...

    def load(self, step: int, like: Leaves) -> Leaves:
        """The leaves of a checkpoint, with the shardings of `like`."""
        ...

    def mark_damaged(self, step: int) -> str:
        """Rename a damaged checkpoint, so that `steps` leaves it out; returns its new name."""
        ...

    def damaged(self) -> list[str]:
        """The names of damaged checkpoints."""
        ...

    def close(self) -> None:
        """Stop background work, and let others use the store."""
        ...


class Restored(NamedTuple):
    """What a checkpoint held: the step, the tree, and the notes beside it."""

    step: int
    tree: Tree
    notes: Json


class Checkpoints:
    """The checkpoints of one run, verified when they are loaded.

    Each has two SHA-256 digests: of its leaves (name, dtype, shape, bytes), and of its header, which holds the
    configuration of the run and the first digest. If a checkpoint cannot be read, or does not match its digests, the
    one before it is loaded, and the damaged one is renamed, with a warning. If none can be read, nothing is renamed:
    the cause may be elsewhere. An intact checkpoint with another configuration is refused.

    Args:
        store: where they are kept.
        configuration: what a checkpoint must agree with to belong to this run; JSON.
        every: seconds between two of them.
    """

    def __init__(self, store: CheckpointStore, configuration: Json, every: float = 300.0) -> None:
        self._store, self._every = store, every
        self._configuration = json.loads(json.dumps(configuration))
        self._pending: int | None = None  # the step of a save that was begun
        self._failed = False
        self._last_save = time.monotonic()

    @property
    def location(self) -> str:
        """Where they are kept."""
        return self._store.location

    def restore(self, like: Callable[[int], Tree]) -> Restored | None:
        """The newest checkpoint that is intact, in the structure of `like(step)`; None if there is none."""
        failures: dict[int, str] = {}
        for step in sorted(self._store.steps(), reverse=True):
            try:
                restored = self._read(step, like(step))
            except (ConfigurationError, MemoryError, PermissionError):  # the checkpoint is not the cause
                raise
            except Exception as error:  # a damaged file can raise anything: json, tensorstore, zstd, OSError, …
                if "barrier" in str(error).lower():  # another process did not come: the checkpoint may be intact
                    raise
                failures[step] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            else:
                for damaged, reason in failures.items():
                    name = self._store.mark_damaged(damaged)
                    warnings.warn(
                        f"checkpoint {damaged} in {self.location} is damaged ({reason}). It is renamed to {name}, and "
                        "the one before it is loaded.",
                        stacklevel=4,
                    )
                return restored
        unread = [f"{step} ({reason})" for step, reason in failures.items()] + self._store.damaged()
        if unread:
            raise OSError(
                f"`Checkpointing.folder` must have an intact checkpoint or none at all, got {self.location!r} with "
                f"nothing but {', '.join(unread)}; look at them, or use another folder to start again."
            )
        return None

    def save(self, step: int, tree: Tree, notes: Json) -> None:
        """Begin to save; `saved` tells when it is complete."""
        self.wait()
        leaves = _leaves(tree)
        header = {
            "step": step,
            "configuration": self._configuration,
            "leaves": {name: signature(local(x)) for name, x in leaves.items()},
            "notes": json.loads(json.dumps(notes)),  # a copy: the caller's may change before the writing is done
            "digest": _digest(leaves),
        }
        header["header_digest"] = _header_digest(header)
        with self._explained(step):
            begun = self._store.save(step, leaves, header)
        if not begun:
            raise OSError(f"checkpoint {step} was not saved: {self.location} holds a later one; use another folder.")
        self._pending = step
        self._last_save = time.monotonic()

    def saved(self) -> tuple[int, str] | None:
        """The step and path of a checkpoint that was completed since the last call; None if there is none."""
        return None if self._pending is None or self._store.is_saving() else self.wait()

    def wait(self) -> tuple[int, str] | None:
        """Wait until the latest save is complete; its step and path."""
        if self._pending is None:
            return None
        step, self._pending = self._pending, None
        with self._explained(step):
            self._store.wait()
        return step, f"{self.location}/{step}"

    def latest(self) -> int | None:
        """The newest step that is complete."""
        return max(self._store.steps(), default=None)

    def is_due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self._last_save >= self._every

    def close(self) -> None:
        """Close the store; an error of a save was raised before."""
        with contextlib.suppress(Exception) if self._failed else contextlib.nullcontext():
            self._store.close()

    def _read(self, step: int, like: Tree) -> Restored:
        header = self._store.header(step)
        # A damaged header must not be taken for that of another run.
        if not isinstance(header, dict) or header.get("header_digest") != _header_digest(header):
            raise ValueError("its header does not match its digest")
        self._check_agrees(step, header["configuration"], self._configuration)
        leaves = _leaves(like)
        self._check_agrees(step, header["leaves"], {name: signature(local(x)) for name, x in leaves.items()})
        loaded = self._store.load(step, leaves)
        if _digest(loaded) != header["digest"]:
            raise ValueError("its contents do not match its digest")
        return Restored(step, _with_leaves(like, loaded), header["notes"])

    def _check_agrees(self, step: int, theirs: Json, ours: Json) -> None:
        for name in sorted(theirs.keys() | ours.keys()):
            there, here = theirs.get(name), ours.get(name)
            if there != here:
                raise ConfigurationError(
                    f"checkpoint {step} in {self.location} has {there!r} for `{name}`, this run {here!r}; use another "
                    "folder, or the settings of the checkpoint."
                )

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Turn an error of the store into one that names the checkpoint and the remedy."""
        try:
            yield
        except Exception as error:
            self._failed = True
            raise OSError(
                f"checkpoint {step} could not be written to {self.location}: {error}. Earlier checkpoints are intact; "
                "make room or choose another folder, and start again to resume from them."
            ) from error


def _leaves(tree: Tree) -> Leaves:
    """The leaves by name; keys as their bits, and nothing of size 0, which has no bytes to keep."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path): jax.random.key_data(x) if is_key(x) else x for path, x in named}
    return {name: x for name, x in leaves.items() if np.size(x)}


def _with_leaves(tree: Tree, leaves: Leaves) -> Tree:
    """The tree with other leaves; the inverse of `_leaves`."""

    def one(path: jax.tree_util.KeyPath, x: Tree) -> Tree:
        saved: Tree = leaves.get(jax.tree_util.keystr(path))
        if saved is None:
            return x
        return jax.random.wrap_key_data(saved, impl=jax.random.key_impl(x)) if is_key(x) else saved

    return jax.tree_util.tree_map_with_path(one, tree)


def _digest(leaves: Leaves) -> str:
    total = hashlib.sha256()
    for name in sorted(leaves):
        leaf = local(leaves[name])
        total.update(f"{name} {signature(leaf)}\n".encode())
        total.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return total.hexdigest()


def _header_digest(header: Json) -> str:
    content = {name: value for name, value in header.items() if name != "header_digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
