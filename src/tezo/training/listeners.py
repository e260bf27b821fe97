"""Who follows a run: listeners, called after each step and evaluation, and signals, which end it."""

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tezo.optim.estimators.estimate import StepRecord
from tezo.runs.step_log import Rollback
from tezo.system.progress import Work, current
from tezo.tasks.evaluation import Metrics
from tezo.training.job import Job


@dataclass(frozen=True)
class Progress:
    """A finished step: its record, seconds since the first, bytes of memory at the peak."""

    record: StepRecord
    seconds: float
    memory: int


class Listener:
    """Follows a run; a subclass overrides what it wants to hear of. Calls come in the order of what they report."""

    def working(self, work: Work) -> None:
        """Called when a phase begins or gets further; first before there is a job."""

    def started(self, job: Job) -> None:
        """Called when all is ready, and nothing has been evaluated yet."""

    def resumed(self, evaluations: Mapping[tuple[str, int], Metrics]) -> None:
        """Called after `started` where a run goes on: (split, step) -> metrics of its evaluations so far."""

    def stepping(self, step: int) -> None:
        """Called before step number `step`, from 0, is taken."""

    def stepped(self, progress: Progress) -> None:
        """Called when a step is finished."""

    def evaluated(self, split: str, step: int, metrics: Metrics) -> None:
        """Called when `split` ("dev" or "test") was evaluated after `step` steps.

        Before the first step, of labelled rows, `split` is also what was fitted to the untuned model and measured on
        the test rows: "bias" or "probe".
        """

    def warned(self, text: str) -> None:
        """Called with what was not known of the run at its start; the summary has it among the notices."""

    def rolled_back(self, rollback: Rollback) -> None:
        """Called when the run has returned to an earlier state, as a rule to go on at a lower rate."""

    def compared(self, answers: dict[str, Any]) -> None:
        """Called with answers to test rows before and after, as in answers.json, where there are some."""

    def finished(self, summary: dict[str, Any]) -> None:
        """Called when the result is saved."""

    def closed(self) -> None:
        """Called last, when the run is over, finished or not, if it had been prepared."""

    @property
    def wants_stop(self) -> bool:
        """Whether the run should end after this step."""
        return False


class Interruption:
    """A context manager that records the first SIGTERM or SIGINT; a second signal has its usual effect.

    The run finishes the current step and is saved before the process ends; where its work is shown, that is said.

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

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        self.__exit__()
        if current().told:  # not by a listener: the line that is interrupted here may hold its lock
            text = f"\n{self.signal}: the step under way is finished and saved first; a second one ends at once\n"
            with suppress(OSError):
                os.write(2, text.encode())

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
