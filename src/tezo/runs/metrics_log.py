"""metrics.jsonl: a line every so many steps, and one for each evaluation. It is only ever appended to."""

import json
from pathlib import Path
from typing import Any

from tezo.files import append, json_text, storing
from tezo.tasks.evaluation import Metrics

MOST_LINE = 1 << 20
"""Bytes of a line, at most."""


class MetricsLog:
    """The file, and what it already says of a run that was cut short.

    Lines that are there are not written again, so that a resumed run adds what is missing.

    Attributes:
        evaluations: (split, step) -> metrics.
        seconds: spent on steps, at the last line of one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.evaluations: dict[tuple[str, int], Metrics] = {}
        self.seconds = 0.0
        self._last_step = 0
        data = path.read_bytes() if path.exists() else b""
        self._whole, self._size = data.rfind(b"\n") + 1, len(data)
        for text in data[: self._whole].splitlines():
            self._remember(text)

    def cut_tail(self) -> None:
        """Removes an unfinished last line; to be called before the first line is added."""
        if self._whole < self._size:
            with storing(self.path), self.path.open("r+b") as file:
                file.truncate(self._whole)

    def _remember(self, text: bytes) -> None:
        try:
            line = json.loads(text) if len(text) <= MOST_LINE else {}
            step = int(line.pop("step"))
            if "split" in line:
                metrics = {str(key): float(value) for key, value in line.items() if key != "split"}
                self.evaluations[str(line["split"]), step] = metrics
            else:
                self.seconds, self._last_step = float(line["seconds"]), max(self._last_step, step)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # an evaluation with a null, which is made again; or what somebody else wrote

    def step(self, step: int, **line: Any) -> None:
        """Adds the line of a step."""
        if step > self._last_step:
            self._append(step=step, **line)

    def evaluation(self, split: str, step: int, metrics: Metrics) -> None:
        """Adds the line of an evaluation."""
        if (split, step) not in self.evaluations:
            self._append(step=step, split=split, **metrics)

    def _append(self, **line: Any) -> None:
        append(self.path, f"{json_text(line)}\n".encode())
