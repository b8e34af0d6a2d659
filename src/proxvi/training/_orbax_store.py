"""A store of checkpoints: a folder that Orbax writes to."""

import logging
import os
import time
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO

import jax

from proxvi._typing import Json, Leaves
from proxvi.training._devices import gather
from proxvi.training.checkpoints import CheckpointStore, in_short, signals_wait

LOG = logging.getLogger("proxvi")
ATTEMPTS = 3  # to write a checkpoint
LONGEST_WAIT = 60  # seconds for another run to leave the folder


class OrbaxStore(CheckpointStore):
    """A folder that Orbax writes to. A checkpoint is complete or does not exist.

    Args:
        folder: created if it does not exist.
        keep: how many of the latest checkpoints to keep.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int) -> None:
        try:
            from orbax.checkpoint import v1
        except ImportError as error:
            raise ImportError("`checkpointing` needs Orbax: pip install 'proxvi[checkpoint]'.") from error
        self._training: Any = v1.training
        self._read_metadata: Any = v1.metadata
        self._folder, self._keep = Path(folder).absolute(), keep
        self.location = str(self._folder)
        with ExitStack() as resources:  # a folder that could not be opened is left at once
            try:
                if jax.process_index() == 0:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    resources.enter_context(lock_folder(self._folder))
                with signals_wait():
                    self._orbax = self._open()
                    # Before the folder is free: a thread may still clear it. Raises again what went wrong.
                    resources.callback(lambda: self._orbax.close())
            except OSError as error:
                raise OSError(
                    f"`Checkpointing.folder` must be a folder that can be written to, got {self.location!r} ({error}); "
                    "choose another, or make room."
                ) from error
            self._resources = resources.pop_all()

    def _open(self) -> Any:
        try:
            return self._new_checkpointer()
        except OSError:
            raise
        except Exception as error:  # Orbax reads the metadata of all checkpoints first; those of one may be damaged
            self._set_unreadable_aside(error)
            return self._new_checkpointer()

    def _set_unreadable_aside(self, error: Exception) -> None:
        """Rename the checkpoints whose metadata cannot be read now either; there may be none, after a hiccup."""
        found = [path.name for path in self._folder.iterdir() if path.is_dir() and path.name.isdecimal()]
        reasons = {step: self._why_unreadable(step) for step in sorted(map(int, found))}
        damaged = {step: reason for step, reason in reasons.items() if reason}
        # One of several processes, of which some may have opened the folder, cannot act on its own.
        if not damaged and jax.process_count() > 1:
            raise error
        # If none can be read, the cause may be elsewhere: another version of Orbax.
        if damaged and (len(damaged) == len(reasons) or jax.process_count() > 1):
            listed = ", ".join(f"{step} ({reason})" for step, reason in damaged.items())
            raise RuntimeError(
                f"`Checkpointing.folder` must have checkpoints that Orbax can read, got {self.location!r} with "
                f"{listed}; use the version of Orbax that wrote them, move them away, or choose another folder."
            ) from error
        for step, reason in damaged.items():
            name = self._set_aside(step)
            warnings.warn(
                f"checkpoint {step} in {self.location} is damaged ({reason}). It is renamed to {name}.",
                stacklevel=6,
            )

    def _why_unreadable(self, step: int) -> str | None:
        """What is wrong with the metadata of a checkpoint; None if nothing is."""
        try:
            self._read_metadata(self._folder / str(step))
        except (OSError, MemoryError):
            raise
        except Exception as error:
            return in_short(error)
        return None

    def _new_checkpointer(self) -> Any:
        return self._training.Checkpointer(
            self._folder,
            preservation_policy=self._training.preservation_policies.LatestN(self._keep),
            # which step is worth saving is the caller's to decide
            save_decision_policy=self._training.save_decision_policies.FixedIntervalPolicy(1),
            cleanup_tmp_directories=True,
        )

    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def save(self, step: int, leaves: Leaves, header: Json) -> bool:
        for attempt in range(1, ATTEMPTS):
            try:
                return self._orbax.save(step, leaves, custom_metadata=header, overwrite=attempt > 1)
            except Exception as error:  # a network disk that hiccups, or a clock that jumped past a time-out of Orbax
                if jax.process_count() > 1:  # the others do not know
                    raise
                LOG.warning("checkpoint %d was not written at attempt %d: %s", step, attempt, error)
            with suppress(Exception):
                self._orbax.close()  # an Orbax that has failed fails again, for the same reason
            time.sleep(attempt)  # its threads may still be writing
            with suppress(Exception):
                self._orbax = self._open()  # removes what they have left
        # What failed may have been what comes after writing, so there may be a checkpoint of this step.
        return self._orbax.save(step, leaves, custom_metadata=header, overwrite=True)

    def header(self, step: int) -> object:
        return self._orbax.metadata(step).custom_metadata

    def load(self, step: int, like: Leaves) -> Leaves:
        abstract = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x
            for name, x in like.items()
        }
        return self._orbax.load(step, abstract)

    def mark_damaged(self, step: int) -> str:
        name = self._set_aside(step)
        self._orbax.reload()
        return name

    def _set_aside(self, step: int) -> str:
        name, number = f"{step}.damaged", 0
        if jax.process_index() == 0:
            while (self._folder / name).exists():
                number += 1
                name = f"{step}.damaged.{number}"
            (self._folder / str(step)).rename(self._folder / name)
        name, *_ = gather(name)  # the others look at the folder after it was renamed
        return name

    def damaged(self) -> list[str]:
        return sorted(path.name for path in self._folder.glob("*.damaged*"))

    def close(self) -> None:
        self._resources.close()


def lock_folder(folder: Path) -> TextIO:
    """The open lock file: no other process can lock the folder until it is closed, or until this process ends.

    Orbax removes unfinished checkpoints when it opens a folder, so two runs must not share one. A run that received
    SIGTERM may still be saving when it is started again, so the new one waits.
    """
    # A link in its place is not followed, and nothing is cut off: the file may be somebody else's.
    path, flags = folder / ".lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    file = os.fdopen(os.open(path, flags, 0o666), "r+")
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
            LOG.warning("waiting for another run to leave %s", folder)
        if waited == LONGEST_WAIT:
            file.close()
            raise RuntimeError(
                f"`Checkpointing.folder` must be a folder that no other run uses, got {str(folder)!r}, which another "
                f"run has used for {LONGEST_WAIT} seconds; stop that run, or choose another folder."
            )
        time.sleep(1.0)
        waited += 1
