"""Signals that ask a run to stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals(*, caught: bool) -> Iterator[list[int]]:
    """A list that fills with the signals received; a second signal of one kind acts at once.

    Python allows only the main thread to catch signals. In any other thread the list stays empty.

    Args:
        caught: whether to catch them at all.
    """
    received: list[int] = []
    if not caught or threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def on_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
