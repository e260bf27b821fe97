"""Interrupts during a step: they wait for a moment in which model and optimizer are as before or after the step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_waiting: list[Any] = []
"""While a step is under way, the signal frames of the interrupts that wait; one at most."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context in which the first Ctrl-C waits for `let_interrupt`, or for the end; a second one has its usual effect.

    Python can raise KeyboardInterrupt between any two instructions: between a perturbation and its removal, or between
    the updates of two parameters.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C raises nothing here
        return

    def wait(number: int, frame: FrameType | None) -> None:
        _waiting.append(frame)
        signal.signal(number, before)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
        let_interrupt()
    finally:
        _waiting.clear()
        if signal.getsignal(signal.SIGINT) is wait:
            signal.signal(signal.SIGINT, before)


def let_interrupt() -> None:
    """Has a waiting interrupt take its usual effect: by default, KeyboardInterrupt is raised."""
    if _waiting:
        frame = _waiting.pop()
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(signal.SIGINT, frame)
