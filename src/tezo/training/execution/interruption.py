"""Handling of SIGTERM and SIGINT: the current step is finished, the run is saved, and the process ends."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """Context manager that records the first SIGTERM or SIGINT; a second signal has its usual effect.

    Attributes:
        signal: the name of the recorded signal, or None.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # Python sets signal handlers only there
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        self._restore()
