"""What the tests of this room share."""

from collections.abc import Callable
from typing import Any

import jax

from . import faults

KEY = jax.random.key(0)
ROWS = faults.data()


class CrashError(Exception):
    """Ends a run in the middle."""


def crash_at(step: int) -> Callable[[int, dict[str, Any]], None]:
    """A callback that crashes."""

    def callback(now: int, _: dict[str, Any]) -> None:
        if now == step:
            raise CrashError

    return callback
