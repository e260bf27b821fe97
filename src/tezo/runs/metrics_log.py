"""metrics.jsonl: one line per logged step and one per evaluation. Complete lines are never changed."""

import json
from pathlib import Path
from typing import Any

from tezo.files import append, json_text, storing
from tezo.tasks.evaluation import Metrics

MOST_LINE = 1 << 20
"""Largest size of a line in bytes; longer lines are ignored."""


class MetricsLog:
    """The metrics file of a run, with the lines that an interrupted run has already written.

    Existing lines are not written again, so a resumed run adds only the missing ones.

    Attributes:
        evaluations: (split, step) -> metrics.
        seconds: time spent on steps, from the last step line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.evaluations: dict[tuple[str, int], Metrics] = {}
        self.seconds = 0.0
        self._last_step = 0
        data = path.read_bytes() if path.exists() else b""
        self._complete_size, self._size = data.rfind(b"\n") + 1, len(data)
        for text in data[: self._complete_size].splitlines():
            self._read_line(text)

    def cut_tail(self) -> None:
        """Removes an incomplete last line; must be called before the first line is added."""
        if self._complete_size < self._size:
            with storing(self.path), self.path.open("r+b") as file:
                file.truncate(self._complete_size)

    def _read_line(self, text: bytes) -> None:
        try:
            line = json.loads(text) if len(text) <= MOST_LINE else {}
            step = int(line.pop("step"))
            if "split" in line:
                metrics = {str(key): float(value) for key, value in line.items() if key != "split"}
                self.evaluations[str(line["split"]), step] = metrics
            else:
                self.seconds, self._last_step = float(line["seconds"]), max(self._last_step, step)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # an evaluation with a null, which is repeated, or a line not written by tezo

    def step(self, step: int, **line: Any) -> None:
        """Appends the line of a step, unless the file has it."""
        if step > self._last_step:
            self._append(step=step, **line)

    def evaluation(self, split: str, step: int, metrics: Metrics) -> None:
        """Appends the line of an evaluation, unless the file has it."""
        if (split, step) not in self.evaluations:
            self._append(step=step, split=split, **metrics)

    def _append(self, **line: Any) -> None:
        append(self.path, f"{json_text(line)}\n".encode())
