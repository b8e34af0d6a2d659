"""Checkpoints that are never loaded wrong: Orbax's, with a digest of what was saved, checked before it is used."""

import contextlib
import hashlib
import json
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from proxvi.training._batches import is_key, local, signature

__all__ = ["ConfigurationError"]

LOG = logging.getLogger("proxvi")
LONGEST_WAIT = 60  # seconds for another run to leave the folder


class ConfigurationError(ValueError):
    """A checkpoint is whole, but of another run: its configuration, a shape or a dtype differs.

    Example:
        >>> issubclass(ConfigurationError, ValueError)
        True
    """


class Restored(NamedTuple):
    """What a checkpoint held: the step, the tree, and what was noted beside it."""

    step: int
    tree: Any
    notes: dict[str, Any]


class Checkpoints:
    """A folder of checkpoints of one run.

    Orbax writes them: in the background, and complete or not at all. What it does not do is notice a flipped bit or
    another dtype, so each carries SHA-256 digests: of its leaves (name, dtype, shape, bytes), and of its header, which
    holds the run's configuration and the first digest. At load, one that cannot be read or does not match is put
    aside, loudly, once an older one has been read: if none can be, it may be no fault of theirs, and they stay as they
    are. One that is whole but of another configuration is refused.

    Args:
        folder: made if it is not there.
        configuration: what a checkpoint must agree with to belong to this run; JSON.
        keep: how many of the latest to keep.
    """

    def __init__(self, folder: Any, configuration: dict[str, Any], keep: int) -> None:
        try:
            from orbax.checkpoint import v1
        except ImportError as error:
            raise ImportError("`checkpoints` needs Orbax: pip install 'proxvi[checkpoint]'.") from error
        training: Any = v1.training
        self.folder = Path(folder).absolute()
        self._configuration = json.loads(json.dumps(configuration))
        self._pending: tuple[int, Any] | None = None
        self._broken = False
        self._lock: Any = None
        try:
            if jax.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = _locked(self.folder / ".lock")
            self._orbax = training.Checkpointer(
                self.folder,
                preservation_policy=training.preservation_policies.LatestN(keep),
                # which step is worth saving is the caller's to decide
                save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
                cleanup_tmp_directories=True,
            )
        except OSError as error:
            raise OSError(
                f"`checkpoints` must be a folder that can be written to, got {str(self.folder)!r} ({error}); choose "
                "another, or make room."
            ) from error

    def restore(self, like: Callable[[int], Any]) -> Restored | None:
        """The newest checkpoint that is intact, in the structure of `like(step)`; None if there is none."""
        steps = sorted((checkpoint.step for checkpoint in self._orbax.checkpoints), reverse=True)
        failures: dict[int, str] = {}
        for step in steps:
            try:
                restored = self._read(step, like(step))
            except (ConfigurationError, MemoryError, PermissionError):  # no fault of the checkpoint
                raise
            except Exception as error:  # whatever a damaged file makes of itself: json, tensorstore, zstd, OSError, …
                if "barrier" in str(error).lower():  # another process did not come: the checkpoint may be whole
                    raise
                failures[step] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            else:
                for damaged, reason in failures.items():
                    self._put_aside(damaged, reason)
                return restored
        unread = [f"{step} ({reason})" for step, reason in failures.items()]
        unread += sorted(path.name for path in self.folder.glob("*.damaged*"))
        if unread:
            raise OSError(
                f"`checkpoints` must be a folder with an intact checkpoint or none at all, got {str(self.folder)!r} "
                f"with nothing but {', '.join(unread)}; look at them, and use another folder to start anew."
            )
        return None

    def save(self, step: int, tree: Any, notes: dict[str, Any]) -> None:
        """Begin to save; `saved` tells when it is done."""
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
        try:
            response = self._orbax.save_async(step, leaves, custom_metadata=header)
        except Exception as error:
            raise self._failed(step, error) from error
        if response is None:  # Orbax's way to say that there is a later one
            raise OSError(f"checkpoint {step} was not saved: {self.folder} holds a later one; use another folder.")
        self._pending = (step, response)
        if jax.process_count() > 1:
            self._finish(step, response)  # Orbax's barriers would meet those of the training steps

    def saved(self) -> tuple[int, Path] | None:
        """The step and folder of what has come to be on disk, whole, since the last call; None if there is none."""
        if self._pending is None or self._orbax.is_saving_in_progress():
            return None
        return self.wait()

    def wait(self) -> tuple[int, Path] | None:
        """Wait until what was begun is on disk; its step and folder."""
        if self._pending is None:
            return None
        (step, response), self._pending = self._pending, None
        self._finish(step, response)
        return step, self.folder / str(step)

    def _finish(self, step: int, response: Any) -> None:
        try:
            response.result()
        except Exception as error:
            raise self._failed(step, error) from error

    def latest(self) -> int | None:
        """The newest step on disk."""
        newest = self._orbax.latest
        return None if newest is None else newest.step

    def close(self) -> None:
        """End the background threads, and let others have the folder."""
        with contextlib.ExitStack() as stack:
            if self._lock is not None:
                stack.enter_context(self._lock)
            stack.enter_context(contextlib.suppress(Exception) if self._broken else contextlib.nullcontext())
            self._orbax.close()  # says again what went wrong, if something did

    def _read(self, step: int, like: Any) -> Restored:
        header: Any = self._orbax.metadata(step).custom_metadata
        # A header that was damaged must not be taken for another run's.
        if not isinstance(header, dict) or header.get("header_digest") != _header_digest(header):
            raise ValueError("its header does not match its digest")
        self._check_agrees(step, header["configuration"], self._configuration)
        leaves = _leaves(like)
        self._check_agrees(step, header["leaves"], {name: signature(local(x)) for name, x in leaves.items()})
        abstract = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x
            for name, x in leaves.items()
        }
        raw = self._orbax.load(step, abstract)
        if _digest(raw) != header["digest"]:
            raise ValueError("its contents do not match its digest")
        return Restored(step, _like(like, raw), header["notes"])

    def _check_agrees(self, step: int, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        for name in sorted(theirs.keys() | ours.keys()):
            there, here = theirs.get(name), ours.get(name)
            if there != here:
                raise ConfigurationError(
                    f"checkpoint {step} in {self.folder} has {there!r} for `{name}`, this run {here!r}; use another "
                    "folder, or the settings of the checkpoint."
                )

    def _put_aside(self, step: int, reason: str) -> None:
        taken = len(list(self.folder.glob(f"{step}.damaged*")))
        damaged = self.folder / (f"{step}.damaged" + (f".{taken}" if taken else ""))
        warnings.warn(
            f"checkpoint {step} in {self.folder} is damaged ({reason}): put aside as {damaged.name}, taking the one "
            "before it.",
            stacklevel=4,
        )
        if jax.process_index() == 0:
            (self.folder / str(step)).rename(damaged)
        self._orbax.reload()

    def _failed(self, step: int, error: Exception) -> OSError:
        self._broken = True
        return OSError(
            f"checkpoint {step} could not be written to {self.folder}: {error}. Earlier checkpoints are intact; make "
            "room or choose another folder, and start again to resume from them."
        )


def _locked(path: Path) -> Any:
    """The file, open, and no other process has it until it is closed: to open a folder removes what is being saved.

    A job that was told to stop may still be saving when it is started again: that one waits. The lock goes with the
    process that holds it, however that ends.
    """
    file = path.open("w")
    try:
        import fcntl
    except ImportError:  # on Windows
        return file
    waited = 0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            pass
        except OSError:  # a file system without locks
            return file
        if waited == 0:
            LOG.warning("waiting for another run to leave %s", path.parent)
        if waited == LONGEST_WAIT:
            file.close()
            raise RuntimeError(
                f"`checkpoints` must be a folder that no other run uses, got {str(path.parent)!r}, which one did for "
                f"all of {LONGEST_WAIT} seconds; stop it, or choose another folder."
            )
        time.sleep(1.0)
        waited += 1


def _leaves(tree: Any) -> dict[str, Any]:
    """The leaves by name; keys as their bits, and nothing of size 0, which has no bytes to keep."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path): jax.random.key_data(x) if is_key(x) else x for path, x in named}
    return {name: x for name, x in leaves.items() if np.size(x)}


def _like(tree: Any, leaves: dict[str, Any]) -> Any:
    """The inverse of `_leaves`."""

    def one(path: Any, x: Any) -> Any:
        saved = leaves.get(jax.tree_util.keystr(path), x)
        if is_key(x):
            return jax.random.wrap_key_data(saved, impl=jax.random.key_impl(x)) if saved is not x else x
        return saved

    return jax.tree_util.tree_map_with_path(one, tree)


def _digest(leaves: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in sorted(leaves):
        leaf = local(leaves[name])
        digest.update(f"{name} {signature(leaf)}\n".encode())
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return digest.hexdigest()


def _header_digest(header: dict[str, Any]) -> str:
    content = {name: value for name, value in header.items() if name != "header_digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
