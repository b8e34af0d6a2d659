"""Checkpoints that are verified before they are used."""

import contextlib
import hashlib
import json
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from proxvi._typing import Json, Leaves, Tree
from proxvi.training._devices import gather, is_key, local
from proxvi.training._run_fingerprint import content, signature

__all__ = ["ConfigurationError"]

LONGEST = 300  # characters of another library's message
STOPPING = ("SIGTERM", "SIGINT", "SIGHUP")  # signals that tell a run to stop; Windows lacks some
EXPLAINED = {
    "program": " (the program of a step: model, guide, estimator, optimiser, constraint or a setting of them)",
    "over": " (of speed limits)",
}


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
        """Save, in whatever thread this is called; False if the store has a checkpoint of a later step."""
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
        """Let others use the store."""
        ...


class Restored(NamedTuple):
    """What a checkpoint held.

    Attributes:
        step: of the checkpoint.
        tree: of the same structure as that which was asked for.
        notes: beside the tree.
        changed: the settings that differ from those of this run.
        fresh: the parts of the tree that did not fit, and are those of `like`.
    """

    step: int
    tree: Tree
    notes: Json
    changed: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run, written in the background, and verified when they are loaded.

    Each has two SHA-256 digests: of its leaves (name, dtype, shape, bytes), and of its header, which holds the
    configuration of the run and the first digest. If a checkpoint cannot be read, or does not match its digests, twice
    in a row, the one before it is loaded, and the damaged one is renamed, with a warning. If none can be read, nothing
    is renamed: the cause may be elsewhere. An intact checkpoint with another configuration is refused.

    Args:
        store: where they are kept.
        configuration: what a checkpoint must agree with to belong to this run; JSON.
        every: seconds between two of them.
        accept_changes: whether to go on from a checkpoint with another configuration.

    Attributes:
        accept_changes: the same.
    """

    def __init__(
        self, store: CheckpointStore, configuration: Json, every: float = 300.0, *, accept_changes: bool = False
    ) -> None:
        self._store, self._every, self.accept_changes = store, every, accept_changes
        self._configuration = json.loads(json.dumps(configuration))
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, Future[None]] | None = None  # a save that was begun, and its step
        self._failed = False
        self._last_save = time.monotonic()

    @property
    def location(self) -> str:
        """Where they are kept."""
        return self._store.location

    def restore(
        self, like: Callable[[int], Tree], part: Callable[[str], str | None] = lambda _: None
    ) -> Restored | None:
        """The newest checkpoint that is intact, in the structure of `like(step)`; None if there is none.

        Args:
            like: of a step.
            part: of a leaf's name, the part of the tree to which it belongs. If changes are accepted, a part that does
                not fit keeps the values of `like`. None: it must fit.
        """
        failures: dict[int, str] = {}
        steps, *_ = gather(self._store.steps())  # a network disk may show another process another list
        for step in sorted(steps, reverse=True):
            restored, failure = self._try(step, like, part)
            if failure is not None:  # once more: a network disk may hiccup
                restored, failure = self._try(step, like, part)
            if failure is not None:
                failures[step] = failure
                continue
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
        """Begin to save; `saved` tells when it is complete. The arrays must not change until then."""
        self.wait()
        notes = json.loads(json.dumps(notes))  # a copy: the caller's may change before the writing is done
        self._pending = step, self._writer.submit(self._write, step, _leaves(tree), notes)
        self._last_save = time.monotonic()
        if jax.process_count() > 1:  # Orbax's barriers would meet those of the training steps
            self._pending[1].exception()

    def _write(self, step: int, leaves: Leaves, notes: Json) -> None:
        header = {
            "step": step,
            "configuration": self._configuration,
            "leaves": {name: signature(local(x)) for name, x in leaves.items()},
            "notes": notes,
            "digest": _digest(leaves),
        }
        header["header_digest"] = _header_digest(header)
        if not self._store.save(step, leaves, header):
            raise OSError("there is one of a later step")

    def saved(self) -> tuple[int, str] | None:
        """The step and path of a checkpoint that was completed since the last call; None if there is none."""
        return None if self._pending is None or not self._pending[1].done() else self.wait()

    def wait(self) -> tuple[int, str] | None:
        """Wait until the latest save is complete; its step and path."""
        if self._pending is None:
            return None
        (step, written), self._pending = self._pending, None
        try:
            written.result()
        except Exception as error:
            self._failed = True
            raise OSError(
                f"checkpoint {step} could not be written to {self.location}: {in_short(error)}. "
                "Earlier checkpoints are intact; make room or choose another folder, and start again to resume."
            ) from error
        return step, f"{self.location}/{step}"

    def latest(self) -> int | None:
        """The newest step that is complete."""
        return max(self._store.steps(), default=None)

    def is_due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self._last_save >= self._every

    def close(self) -> None:
        """Close the store; an error of a save was raised before."""
        self._writer.shutdown()
        with contextlib.suppress(Exception) if self._failed else contextlib.nullcontext():
            self._store.close()

    def _try(
        self, step: int, like: Callable[[int], Tree], part: Callable[[str], str | None]
    ) -> tuple[Restored | None, str | None]:
        """The checkpoint, and why it could not be read in any process."""
        with signals_wait():
            header, failure = _together(partial(self._header, step))
            if failure is not None:
                return None, failure
            return _together(partial(self._read, step, header, like(step), part))

    def _header(self, step: int) -> Json:
        header = self._store.header(step)
        # A damaged header must not be taken for that of another run.
        if not isinstance(header, dict) or header.get("header_digest") != _header_digest(header):
            raise ValueError("its header does not match its digest")
        return header

    def _read(self, step: int, header: Json, like: Tree, part: Callable[[str], str | None]) -> Restored:
        changed = _differences(header["configuration"], self._configuration)
        self._refuse(step, {} if self.accept_changes else changed)
        ours = _leaves(like)
        misfits = _differences(header["leaves"], {name: signature(local(x)) for name, x in ours.items()})
        if not self.accept_changes:
            self._refuse(step, misfits)
        self._refuse(step, {name: values for name, values in misfits.items() if part(name) is None})
        fresh = {part(name) for name in misfits}
        # All of them are loaded, because the digest is of all.
        like_theirs = {name: ours[name] if name not in misfits else _like(of) for name, of in header["leaves"].items()}
        loaded = self._store.load(step, like_theirs)
        if _digest(loaded) != header["digest"]:
            raise ValueError("its contents do not match its digest")
        taken = {name: x for name, x in loaded.items() if part(name) is None or part(name) not in fresh}
        parts = tuple(sorted(name for name in fresh if name is not None))
        return Restored(step, _with_leaves(like, taken), header["notes"], tuple(changed), parts)

    def _refuse(self, step: int, differences: dict[str, tuple[object, object]]) -> None:
        for name, (there, here) in differences.items():
            raise ConfigurationError(
                f"checkpoint {step} in {self.location} has {there!r} for `{name}`{EXPLAINED.get(name, '')}, this run "
                f"{here!r}; use another folder, or the settings of the checkpoint"
                + (
                    "."
                    if self.accept_changes
                    else ", or, with `fit`, go on from it by `Checkpointing(..., accept_changes=True)`."
                )
            )


def _differences(theirs: Json, ours: Json) -> dict[str, tuple[object, object]]:
    names = sorted(theirs.keys() | ours.keys())
    return {name: (theirs.get(name), ours.get(name)) for name in names if theirs.get(name) != ours.get(name)}


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Let Ctrl-C and its like raise at the end of the block: Orbax takes an exception within it for damage."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in STOPPING if hasattr(signal, name)]
    # Those of Python, which may raise; any other ends the process at once, or is ignored.
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    received: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, handlers[signal.Signals(number)])  # a second one does not wait: a disk may hang

    for number in handlers:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


def _together[T](attempt: Callable[[], T]) -> tuple[T, str | None]:
    """The result, and why the attempt failed in any process: all of them must go on from the same checkpoint."""
    result: Any = None
    fatal: Exception | None = None
    reason = None
    try:
        result = attempt()
    except Exception as error:  # a damaged file can raise anything: json, tensorstore, zstd, OSError, …
        reason = in_short(error)
        # Not the fault of the checkpoint; a barrier fails if another process did not come.
        at_barrier = jax.process_count() > 1 and "barrier" in str(error).lower()
        if at_barrier or isinstance(error, ConfigurationError | MemoryError | PermissionError):
            fatal = error
    outcomes = gather({"reason": reason, "fatal": fatal is not None})
    if fatal is not None:
        raise fatal
    failed = [outcome for outcome in outcomes if outcome["reason"] is not None]
    for outcome in failed:
        if outcome["fatal"]:
            raise OSError(f"another process could not resume: {outcome['reason']}")
    return result, failed[0]["reason"] if failed else None


def in_short(error: Exception) -> str:
    """Its first line, without the pages of settings that tensorstore adds."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    for details in (" [os_error_code=", " [tensorstore_spec="):
        first = first.split(details)[0]
    return first if len(first) <= LONGEST else f"{first[: LONGEST // 2]} … {first[-LONGEST // 2 :]}"


def _like(described: str) -> np.ndarray:
    """An array of the shape and dtype that `signature` described."""
    dtype, shape = described.removesuffix("]").split("[")
    return np.empty([int(n) for n in shape.split(", ") if n], jax.numpy.dtype(dtype))


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
        total.update(content(leaf))
    return total.hexdigest()


def _header_digest(header: Json) -> str:
    content = {name: value for name, value in header.items() if name != "header_digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
