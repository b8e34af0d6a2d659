"""A lock on a folder, so that it belongs to one run at a time."""

import logging
import time
from pathlib import Path
from typing import TextIO

LOG = logging.getLogger("proxvi")
LONGEST_WAIT = 60  # seconds for another run to leave the folder


def lock_folder(folder: Path) -> TextIO:
    """The lock file, open: no other process can lock the folder until it is closed, or until this process ends.

    Orbax removes unfinished checkpoints when it opens a folder, so two runs must not share one. A run that received
    SIGTERM may still be saving when it is started again. Then the new one waits.
    """
    file = (folder / ".lock").open("w")
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
