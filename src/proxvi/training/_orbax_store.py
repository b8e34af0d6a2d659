"""A store of checkpoints: a folder that Orbax writes to."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from proxvi._typing import Json, Leaves
from proxvi.training._folder_lock import lock_folder


class OrbaxStore:
    """A folder that Orbax writes to: in the background, and a checkpoint is complete or not there at all.

    Args:
        folder: made if it is not there.
        keep: how many of the latest checkpoints to keep.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int) -> None:
        try:
            from orbax.checkpoint import v1
        except ImportError as error:
            raise ImportError("`checkpointing` needs Orbax: pip install 'proxvi[checkpoint]'.") from error
        training: Any = v1.training
        self._folder = Path(folder).absolute()
        self.location = str(self._folder)
        self._response: Any = None  # of a save that was begun
        self._resources = ExitStack()
        try:
            if jax.process_index() == 0:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._resources.enter_context(lock_folder(self._folder))
            self._orbax = training.Checkpointer(
                self._folder,
                preservation_policy=training.preservation_policies.LatestN(keep),
                # which step is worth saving is the caller's to decide
                save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
                cleanup_tmp_directories=True,
            )
        except OSError as error:
            raise OSError(
                f"`Checkpointing.folder` must be a folder that can be written to, got {self.location!r} ({error}); "
                "choose another, or make room."
            ) from error
        self._resources.callback(self._orbax.close)  # raises again what went wrong, if something did

    def steps(self) -> list[int]:
        """Of the complete checkpoints."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def save(self, step: int, leaves: Leaves, header: Json) -> bool:
        """Begin to save; False if there is a checkpoint of a later step."""
        self._response = self._orbax.save_async(step, leaves, custom_metadata=header)
        if self._response is not None and jax.process_count() > 1:
            self.wait()  # Orbax's barriers would meet those of the training steps
        return self._response is not None

    def is_saving(self) -> bool:
        """Whether what was begun is not complete yet."""
        return self._orbax.is_saving_in_progress()

    def wait(self) -> None:
        """Wait until what was begun is complete; raises what went wrong."""
        if self._response is not None:
            self._response.result()

    def header(self, step: int) -> object:
        """What was saved as the header; anything, if the file is damaged."""
        return self._orbax.metadata(step).custom_metadata

    def load(self, step: int, like: Leaves) -> Leaves:
        """The leaves of a checkpoint, with the shardings of `like`."""
        abstract = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x
            for name, x in like.items()
        }
        return self._orbax.load(step, abstract)

    def put_aside(self, step: int) -> str:
        """Rename a damaged checkpoint; returns its new name."""
        taken = len(list(self._folder.glob(f"{step}.damaged*")))
        damaged = self._folder / (f"{step}.damaged" + (f".{taken}" if taken else ""))
        if jax.process_index() == 0:
            (self._folder / str(step)).rename(damaged)
        self._orbax.reload()
        return damaged.name

    def put_aside_before(self) -> list[str]:
        """The names of damaged checkpoints."""
        return sorted(path.name for path in self._folder.glob("*.damaged*"))

    def close(self) -> None:
        """End the background threads, and unlock the folder."""
        self._resources.close()
