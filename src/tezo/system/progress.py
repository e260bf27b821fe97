"""The meter of a command: its phase, how far that is, and the seconds and forward passes of each phase.

At any moment exactly one phase counts, the innermost open one, so the seconds of all phases add up to the time since
the meter's start. Forward passes are counted where rows enter the model. A `StatusLine` shows the meter on standard
error.
"""

import os
import sys
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from logging import ERROR, getLogger
from shutil import get_terminal_size
from typing import Any, TextIO, TypeVar

T = TypeVar("T")

LOADING, READING, ENCODING = "loading the model", "reading rows", "encoding rows"
LIBRARIES, CHECKING = "importing torch and transformers", "looking at which parameters the loss depends on"
DIRECTIONS, FEEDBACK = "trying directions for each row", "looking for layers that take feedback steps"
RHO, RATE, BASIS = "measuring rho", "searching the learning rate", "looking at inputs for a basis"
BEFORE, STEPS, BETWEEN, AFTER = "evaluating before", "steps", "evaluating between steps", "evaluating after"
WRITING, EVALUATING, SCORING = "writing answers", "evaluating", "scoring earlier answers again"
FITTING = "fitting a bias and a probe"
SAVING, ASKING_PEFT, UPLOADING = "saving", "checking the adapter in PEFT", "uploading"
SCORER, SETTING_UP, MERGING = "loading the scorer", "setting up the optimizer", "merging the adapter"
FILES, OPENING, OBJECTIVE = "checking files", "opening the run folder", "checking the objective"
DRAWING, HARNESS = "drawing charts", "evaluating in lm-eval"
TIMING = "timing a forward pass"
KEPT, FORECAST = "counting what each method keeps", "forecasting the memory of training without values"
EARLIER, OTHER = "earlier starts", "everything else"
"""Names of phases, as they are shown and as summary.json has them."""

SELDOM = 0.1
"""Shortest time between two reports of a phase's progress to listeners, in seconds."""


@dataclass
class Work:
    """The activity of a command at a moment: a phase, with its costs since it was opened.

    Attributes:
        opened: `time.perf_counter()` when the phase was opened.
        moved: seconds from `counted` to when the last unit was finished.
        begun: units that were finished when counting began; it begins anew where fewer are done than before.
        counted: `time.perf_counter()` then; `counting`: seconds since.
        total: units of the phase; 0: not known.
        unit: of `done` and `total`, in the plural.
        rows: rows that have entered the model.
    """

    name: str
    opened: float
    seconds: float = 0.0
    counted: float = 0.0
    counting: float = 0.0
    moved: float = 0.0
    begun: int = 0
    done: int = 0
    total: int = 0
    unit: str = ""
    rows: int = 0
    passes: float = 0.0

    @property
    def left(self) -> float | None:
        """Seconds of the rest at the pace of finished units; None: not known. A long unit does not make it rise."""
        made, rest = self.done - self.begun, self.total - self.done
        if made <= 0 or not self.total:
            return None
        pace = self.moved / made
        return max(pace * rest - (self.counting - self.moved), pace * (rest - 1))


Told = Callable[[Work], None]


class Meter:
    """Phases of one command. As a context manager it is the one that `current` returns.

    Args:
        started: `time.perf_counter()` when the command began; None: now.

    Attributes:
        rows_per_pass: rows that enter the model in one forward pass of a batch of training rows; the sum over rows is
            divided by it, so that a call for both signs counts twice, and a part of a batch as a part of a pass.
        told: called, in the thread that works, when a phase begins or ends and now and then when it has got further.
    """

    def __init__(self, started: float | None = None) -> None:
        self.started = time.perf_counter() if started is None else started
        self.rows_per_pass = 1.0
        self.told: list[Told] = []
        self._since = self._told_at = self.started
        self._open = [Work(OTHER, self.started)]
        self._seconds: dict[str, float] = defaultdict(float)
        self._rows: Counter[str] = Counter()
        self._earlier = (0.0, 0.0)
        self._watched: list[Any] = []
        self._exit = ExitStack()

    def __enter__(self) -> "Meter":
        self._exit.callback(_CURRENT.reset, _CURRENT.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    @property
    def work(self) -> Work:
        """The current activity of the command; may be read from any thread."""
        phase = self._open[-1]
        now = time.perf_counter()
        seconds, counting = now - phase.opened, now - phase.counted
        return replace(phase, seconds=seconds, counting=counting, passes=phase.rows / self.rows_per_pass)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """While open, time and passes count for this phase; one that is opened inside interrupts it."""
        self._settle()
        self._open.append(Work(name, self._since))
        self._tell()
        try:
            yield
        finally:
            self._settle()
            self._open.pop()
            if len(self._open) == 1:  # the unnamed phase begins anew behind each phase
                self._open[0].opened = self._since
            self._tell()

    def report(self, done: int, total: int, unit: str = "passes") -> None:
        """Says how far the open phase is. Inside a phase that counts other units it has no effect."""
        phase = self._open[-1]
        if phase.unit in ("", unit):
            if not phase.unit or done < phase.done:
                phase.begun, phase.counted = done, time.perf_counter()
            if done != phase.done:
                phase.moved = time.perf_counter() - phase.counted
            phase.done, phase.total, phase.unit = done, total, unit
            if done in (0, total) or time.perf_counter() - self._told_at > SELDOM:
                self._tell()

    def watch(self, model: Any) -> None:
        """Counts the rows that enter a model of transformers until the meter, if it is the current one, is closed."""
        entrance = model.get_input_embeddings()
        if _CURRENT.get() is self and not any(entrance is known for known in self._watched):
            self._watched.append(entrance)
            self._exit.callback(entrance.register_forward_pre_hook(self._count, with_kwargs=True).remove)

    def _count(self, module: Any, args: Sequence[Sized], named: Mapping[str, Sized]) -> None:
        del module
        self.count(len((*args, *named.values())[0]))

    def count(self, rows: int) -> None:
        """Counts rows that a model gets."""
        self._open[-1].rows += rows
        self._rows[self._open[-1].name] += rows

    @contextmanager
    def telling(self, listeners: Iterable[Told]) -> Iterator[None]:
        """While open, these listeners are called too."""
        added = list(listeners)
        self.told += added
        try:
            yield
        finally:
            for listener in added:
                self.told.remove(listener)

    def add_earlier(self, seconds: float, passes: float) -> None:
        """Adds the costs of earlier starts of a run."""
        self._earlier = (seconds, passes)

    @property
    def phases(self) -> dict[str, dict[str, float]]:
        """JSON: name of each phase -> its "seconds" and "passes" so far, in the order in which they first ended."""
        self._settle()
        spent = {EARLIER: self._earlier} if any(self._earlier) else {}
        spent |= {name: (seconds, self._rows[name] / self.rows_per_pass) for name, seconds in self._seconds.items()}
        return {name: {"seconds": round(s, 3), "passes": round(passes, 2)} for name, (s, passes) in spent.items()}

    @property
    def seconds(self) -> float:
        """Seconds since the start of the command, and of earlier starts."""
        return self._earlier[0] + time.perf_counter() - self.started

    @property
    def passes(self) -> float:
        """Forward passes so far, those of earlier starts too."""
        return self._earlier[1] + self._rows.total() / self.rows_per_pass

    def _settle(self) -> None:
        now = time.perf_counter()
        self._seconds[self._open[-1].name] += now - self._since
        self._since = now

    def _tell(self) -> None:
        self._told_at = time.perf_counter()
        for tell in self.told:
            tell(self.work)


_CURRENT: ContextVar[Meter | None] = ContextVar("meter", default=None)


def current() -> Meter:
    """Returns the meter of the command that runs; where there is none, one that nobody reads."""
    return _CURRENT.get() or Meter()


def metered() -> AbstractContextManager[Meter]:
    """A context with the meter of the command that runs, or with a new one."""
    running = _CURRENT.get()
    return Meter() if running is None else nullcontext(running)


def tracked(items: Sequence[T], unit: str = "rows", sizes: Iterable[int] | None = None) -> Iterator[T]:
    """Yields the items, and reports to the open phase how many units were taken; `sizes`: units of each, if not one."""
    meter, counts = current(), [1] * len(items) if sizes is None else list(sizes)
    done, total = 0, sum(counts)
    meter.report(0, total, unit)
    for item, count in zip(items, counts, strict=True):
        yield item
        done += count
        meter.report(done, total, unit)


LONGEST_SILENCE = 4.0
"""Seconds without a line after which another line names the current phase."""
REDRAWN = 0.5
"""Seconds between two states of a line that is overwritten."""


class StatusLine:
    """Shows the work of a meter; a context manager.

    A terminal and a notebook have one line, which is overwritten and disappears at the end. A log file gets a line when
    a phase begins for the first time, and another one when nothing else was printed for `silence` seconds.

    Args:
        meter: whose work is shown.
        stream: where to; None: standard error.
        silence: longest time between two lines, in seconds.
        write: writes a line in place of the stream, above a progress bar for example; no line is overwritten then.

    Attributes:
        figures: name of a phase -> the figures shown beside its progress.
    """

    def __init__(
        self,
        meter: Meter,
        stream: TextIO | None = None,
        *,
        silence: float = LONGEST_SILENCE,
        write: Callable[[str], object] | None = None,
    ) -> None:
        self.meter, self._write = meter, write
        self.figures: dict[str, str] = {}
        self._stream = sys.stderr if stream is None else stream
        self._overwrites = write is None and (self._stream.isatty() or "ipykernel" in sys.modules)
        self._silence = REDRAWN if self._overwrites else silence
        self._begun: set[str] = set()
        self._latest = ""
        self._width = 0
        self._last = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tezo status", daemon=True)

    def __enter__(self) -> "StatusLine":
        self.meter.told.append(self._told)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
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
        if work.name != OTHER:
            self._latest = work.name
        if work.name == OTHER:
            if self._overwrites:  # output of a command starts on an empty line
                with self._lock:
                    self._clear()
        elif self._overwrites:
            self._redraw()
        elif work.name not in self._begun:
            self._begun.add(work.name)
            self.print(work.name)

    def _watch(self) -> None:
        while not self._over.wait(self._silence / 8):
            self.look()

    def look(self) -> None:
        """Names the current phase after a long silence; a thread of the line calls it now and then."""
        is_due = time.monotonic() - self._last >= self._silence
        says_nothing = self.meter.work.name == OTHER and (self._overwrites or self._write is not None)
        if is_due and not says_nothing:
            self._redraw() if self._overwrites else self.print(self._text())

    def _text(self) -> str:
        """For example "steps, 40 of 200, loss 2.3, 1 min 10 s, about 5 min 00 s left", or "after saving, 12.0 s"."""
        work = self.meter.work
        parts = [work.name if work.name != OTHER else f"after {self._latest}" if self._latest else "starting"]
        if work.total:
            parts.append(f"{work.done:,} of {work.total:,}" + (f" {work.unit}" if work.unit != work.name else ""))
        elif work.passes >= 2:
            parts.append(f"{work.passes:,.0f} forward passes")
        if work.name in self.figures:
            parts.append(self.figures[work.name])
        parts.append(duration_text(work.seconds))
        if work.left is not None and work.done < work.total:
            parts.append(f"about {duration_text(work.left)} left")
        return ", ".join(parts)

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
        with suppress(OSError, ValueError):  # it is closed, or nobody reads it: that ends no run
            self._stream.write(text)
            self._stream.flush()


@contextmanager
def showing(
    wanted: bool = True, started: float | None = None, write: Callable[[str], object] | None = None
) -> Iterator[StatusLine | None]:
    """Opens a meter, see `Meter` and `StatusLine`, and yields the line that shows its work.

    None if that is not wanted, and in all but the first of the processes that torchrun starts.
    """
    with Meter(started) as meter:
        if not wanted or int(os.environ.get("RANK", "0")) > 0:
            yield None
            return
        with StatusLine(meter, write=write) as line:
            yield line


def duration_text(seconds: float) -> str:
    """Returns seconds as "4.2 s", "3 min 20 s" or "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    return f"{hours} h {minutes_of_hour:02d} min" if hours else f"{minutes} min {rest:02d} s"


def quiet_imports() -> None:
    """Turns off messages of torchao and bitsandbytes at import on parts that they cannot load; errors are still shown.

    transformers and PEFT import them where they are installed, whether or not a model is quantized.
    """
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
        getLogger(name).setLevel(ERROR)


@contextmanager
def quieted(wanted: bool) -> Iterator[None]:
    """While open, where that is wanted, transformers and bitsandbytes show no bars and no advice; then as before."""
    if not wanted:
        yield
        return
    from transformers.utils import logging

    packing = getLogger("bitsandbytes")
    bars, level, of_packing = logging.is_progress_bar_enabled(), logging.get_verbosity(), packing.level
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    packing.setLevel(ERROR)
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()
        logging.set_verbosity(level)
        packing.setLevel(of_packing)


def quiet_libraries() -> None:
    """Turns off progress bars and advice of other libraries in this process; errors are still shown."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    getLogger("bitsandbytes").setLevel(ERROR)  # it warns at each product that it rounds
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)  # PEFT's old name
    getLogger("lm_eval").setLevel(ERROR)  # it advises against a model in memory, which is the point here
    logging.set_verbosity_error()
    logging.disable_progress_bar()
