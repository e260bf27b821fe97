"""Signals that wait while parameters are perturbed or updated, so that a handler never leaves them half changed."""

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # the public one is 80 times as slow
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = tuple(map(int, signal.valid_signals()))
"""All signals of this system."""
_INSISTENT = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals of which a second one does not wait: a closure may hang."""

_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
"""Signal -> the handler in Python that `_wait` stands for."""
_waiting: list[tuple[int, FrameType | None]] = []
"""Signals that came during a step and wait, in order."""
_state = {"waits": False, "commits": False}
"""Whether signals wait, and whether the update has begun, in which a second signal waits too."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Makes the handlers of signals wait for `let_interrupt`, or for the end, while open.

    Python runs a handler between any two instructions. One that raises, as Ctrl-C raises KeyboardInterrupt, would end a
    step between a perturbation and its removal, or between the updates of two parameters. A second SIGINT or SIGTERM
    does not wait, until the update has begun.
    """
    if _state["waits"] or threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread alone
        return
    try:
        _state.update(waits=True, commits=False)
        _take_over()
        yield
        let_interrupt()
    finally:
        _state["waits"] = False
        # where a handler raises in between, `_wait` stays in the place of others, and passes their signals on
        for number, handler in list(_handlers.items()):
            if getsignal(number) is _wait:
                signal.signal(number, handler)
        _handle_waiting()


def let_interrupt(*, last: bool = False) -> None:
    """Runs the handlers that wait; one of them may raise. The `last` one precedes the update, which no signal ends."""
    if _waiting and _state["waits"]:
        _state["waits"] = False
        try:
            _handle_waiting()
        finally:
            _state["waits"] = True
            _take_over()  # from handlers that those that waited have set
    if last:
        _state["commits"] = True


def _take_over() -> None:
    for number in _NUMBERS:
        handler = getsignal(number)
        if callable(handler) and handler is not _wait:
            _handlers[number] = handler
            signal.signal(number, _wait)


def _wait(number: int, frame: FrameType | None) -> None:
    before = [one for one in _waiting if one[0] == number]
    insists = bool(before) and number in _INSISTENT and not _state["commits"]
    if _state["waits"] and not insists:
        _waiting.append((number, frame))
        return
    for one in before:
        _waiting.remove(one)
        _handle(*one)
    _handle(number, frame)


def _handle_waiting() -> None:
    """Runs the handler of each signal that waits; where several raise, the last error has the others as its context."""
    if _waiting:
        one = _waiting.pop(0)
        try:
            _handle(*one)
        finally:
            _handle_waiting()


def _handle(number: int, frame: FrameType | None) -> None:
    current = getsignal(number)
    handler = _handlers.get(number) if current is _wait else current
    if callable(handler):
        handler(number, frame)
    elif current == signal.SIG_DFL:  # set by the handler of the first signal
        signal.raise_signal(number)
