"""Says on standard error what a command is doing: a line that is overwritten, or lines of a log, never far apart."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from types import TracebackType
from typing import TextIO

from tezo.progress.meter import OTHER, Meter, Work

LONGEST_SILENCE = 4.0
"""Seconds without a line after which another one says what goes on."""
REDRAWN = 0.5
"""Seconds between two states of a line that is overwritten."""


class StatusLine:
    """Shows the work of a meter; a context manager.

    On a terminal and in a notebook it is one line, which is overwritten and disappears at the end. Elsewhere, as in a
    log file, there is a line when a phase begins for the first time, and another one when nothing else was printed for
    `silence` seconds.

    Args:
        meter: whose work is shown.
        stream: where to; None: standard error.
        silence: longest time between two lines, in seconds.
        write: writes a line elsewhere, above the bar of a loop of others for example. Nothing is overwritten then, and
            nothing is said outside of phases.

    Attributes:
        figures: name of a phase -> what is shown beside how far it is.
    """

    def __init__(
        self,
        meter: Meter,
        stream: TextIO | None = None,
        *,
        silence: float = LONGEST_SILENCE,
        write: Callable[[str], object] | None = None,
    ) -> None:
        self.meter = meter
        self.figures: dict[str, str] = {}
        self._stream = sys.stderr if stream is None else stream
        self._write = write
        self._overwrites = write is None and (self._stream.isatty() or "ipykernel" in sys.modules)
        self._silence = REDRAWN if self._overwrites else silence
        self._begun: set[str] = set()
        self._shown = OTHER
        self._width = 0
        self._last = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tezo status", daemon=True)

    def __enter__(self) -> "StatusLine":
        self.meter.told.append(self._told)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        self._over.set()
        self._thread.join()
        self.meter.told.remove(self._told)
        with self._lock:
            self._clear()

    def print(self, text: str) -> None:
        """Prints a line that stays."""
        with self._lock:
            self._clear()
            if self._write is not None:
                self._write(text)
            else:
                self._put(text + "\n")
            self._last = time.monotonic()

    def _told(self, work: Work) -> None:
        if work.name in (OTHER, self._shown):
            if work.name == OTHER and self._overwrites:  # what a command prints stands on a line of its own
                with self._lock:
                    self._clear()
            return
        self._shown = work.name
        if self._overwrites:
            self._redraw()
        elif work.name not in self._begun:
            self._begun.add(work.name)
            self.print(work.name)

    def _watch(self) -> None:
        while not self._over.wait(self._silence / 8):
            if time.monotonic() - self._last < self._silence:
                continue
            if self.meter.work.name == OTHER and (self._overwrites or self._write is not None):
                continue
            if self._overwrites:
                self._redraw()
            else:
                self.print(self._text())

    def _text(self) -> str:
        work = self.meter.work
        return work_text(work, self.figures.get(work.name, ""))

    def _redraw(self) -> None:
        with self._lock:
            text = self._text()[: get_terminal_size().columns - 1]
            self._put("\r" + text.ljust(self._width))
            self._width, self._last = len(text), time.monotonic()

    def _clear(self) -> None:
        if self._width:
            self._put("\r" + " " * self._width + "\r")
            self._width = 0

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # it is closed, or nobody reads it: that ends no run
            return


@contextmanager
def showing(
    wanted: bool = True, started: float | None = None, write: Callable[[str], object] | None = None
) -> Iterator[StatusLine | None]:
    """A meter for a command, while this is open, and the line that shows its work.

    None where that is not wanted, and in all but the first of the processes that torchrun starts.

    Args:
        wanted: whether to show it.
        started: `time.perf_counter()` when the command began; None: now.
        write: see `StatusLine`.
    """
    with Meter(time.perf_counter() if started is None else started) as meter:
        if not wanted or int(os.environ.get("RANK", "0")) > 0:
            yield None
            return
        with StatusLine(meter, write=write) as line:
            yield line


def work_text(work: Work, figures: str = "") -> str:
    """What is done, how far it is and what is left: "steps, 40 of 200, loss 2.3, 1 min 10 s, about 5 min 00 s left"."""
    parts = [work.name]
    if work.total:
        parts.append(f"{work.done:,} of {work.total:,}" + (f" {work.unit}" if work.unit != work.name else ""))
    elif work.passes >= 2:
        parts.append(f"{work.passes:,.0f} forward passes")
    parts += [figures] * bool(figures)
    parts.append(duration_text(work.seconds))
    if work.left is not None and work.done < work.total:
        parts.append(f"about {duration_text(work.left)} left")
    return ", ".join(parts)


def duration_text(seconds: float) -> str:
    """Seconds as "4.2 s", "3 min 20 s" or "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    return f"{hours} h {minutes_of_hour:02d} min" if hours else f"{minutes} min {rest:02d} s"
