"""metrics.jsonl and scored.jsonl: lines of JSON, for people and other programs to follow a run.

The run itself is decided by the step log. Of what they hold, times, memory and scored answers are in them alone.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tezo.runs.step_log import LogContents
from tezo.system.errors import RequestError
from tezo.system.files import UntrustedError, append, json_text, open_plain, read_bytes, storing
from tezo.tasks.evaluation import Metrics

MOST_LINE = 1 << 20
"""Maximum size of a line of metrics in bytes."""
MOST_METRICS = 1 << 28
"""Maximum size of metrics.jsonl in bytes."""
MOST_SCORED = 1 << 26
"""Size of scored.jsonl in bytes from which on nothing is added."""


def read_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yields the JSON object of each complete line, with a "step" of at least 0; an empty one for a damaged line."""
    for text in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            line = json.loads(text[: MOST_LINE + 1])
            yield line if type(line["step"]) is int and line["step"] >= 0 else {}
        except (ValueError, KeyError, TypeError, RecursionError):
            yield {}


class LinesFile:
    """A file of lines to which a run adds. One that goes on goes on after the steps that its step log has.

    Args:
        path: of the file.

    Attributes:
        size: bytes of its lines that stay, which a subclass counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found = self.size = 0

    def read(self, most: int) -> bytes:
        """Returns the content; raises a `RequestError` if the file is a link, or has more bytes than `most`."""
        try:
            data = read_bytes(self.path, most) if os.path.lexists(self.path) else b""
        except UntrustedError as error:
            raise RequestError(f"{self.path.parent}: {error}; remove it to go on.") from None
        self._found = len(data)
        return data

    def cut_tail(self) -> None:
        """Removes an incomplete last line, and lines ahead of the step log; to be called before a line is added."""
        if self.size < self._found:
            with storing(self.path), os.fdopen(open_plain(self.path, os.O_RDWR), "r+b") as file:
                file.truncate(self.size)
            self._found = self.size


class MetricsLog(LinesFile):
    """The metrics file of a run. A resumed run adds only the lines that the file lacks.

    Attributes:
        seconds: time spent on steps, from the last line of a step.
        elapsed: time since the start of the command, and of earlier ones of the run, from the same line.
        passes: forward passes in that time.

    Raises:
        RequestError: a complete line is damaged, or differs from the step log, or the file is a link.
    """

    def __init__(self, path: Path, log: LogContents) -> None:
        super().__init__(path)
        self.seconds = self.elapsed = self.passes = 0.0
        self._evaluated: set[tuple[str, int]] = set()
        self._last_step = 0
        data = self.read(MOST_METRICS)
        for number, (text, line) in enumerate(zip(data.splitlines(keepends=True), read_lines(data), strict=False), 1):
            lacks_split = "split" in line and (str(line["split"]), line["step"]) not in log.evaluations
            if line and (line["step"] > len(log.steps) or lacks_split):  # a power cut can lose the log's end
                break
            if not self._take(line, log):
                raise RequestError(
                    f"{path} is damaged at line {number}, or differs there from the step log; put an intact copy in "
                    "its place, or delete it to go on."
                )
            self.size += len(text)

    def _take(self, line: dict[str, Any], log: LogContents) -> bool:
        """Takes a line in; False if it is damaged or differs from the step log."""
        try:
            step = line["step"]
            if "split" in line:
                split = line["split"]
                figures = {key: value for key, value in line.items() if key not in ("step", "split")}
                metrics = {key: math.nan if value is None else float(value) for key, value in figures.items()}
                self._evaluated.add((split, step))
                return json_text(log.evaluations[split, step]) == json_text(metrics)
            record = log.steps[step - 1]
            self.seconds, self._last_step = float(line["seconds"]), step
            self.elapsed, self.passes = float(line["elapsed"]), float(line["passes"])
            found = (line["loss"], line["projected_grads"], line["lr"])
            return found == (record.loss, list(record.projected_grads), record.lr)
        except (ValueError, KeyError, TypeError, IndexError):
            return False

    def step(self, step: int, **line: Any) -> None:
        """Appends the line of a step, unless the file has it."""
        if step > self._last_step:
            self._append(step=step, **line)

    def evaluation(self, split: str, step: int, metrics: Metrics) -> None:
        """Appends the line of an evaluation, unless the file has it."""
        if (split, step) not in self._evaluated:
            self._append(step=step, split=split, **metrics)

    def _append(self, **line: Any) -> None:
        append(self.path, f"{json_text(line)}\n".encode())


class ScoredLog(LinesFile):
    """The answers that steps have scored. A resumed run goes on after the steps that its log has.

    Args:
        path: of the file.
        steps: number of steps in the step log.

    Raises:
        RequestError: the file is a link, or larger than it can be.
    """

    def __init__(self, path: Path, steps: int) -> None:
        super().__init__(path)
        for text in self.read(2 * MOST_SCORED).splitlines(keepends=True):
            try:
                known = text.endswith(b"\n") and 0 < json.loads(text)["step"] <= steps
            except (ValueError, KeyError, TypeError, RecursionError):
                known = False
            if not known:
                break
            self.size += len(text)

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds the answers of a step, where there is room for all of them."""
        data = "".join(f"{json_text(line)}\n" for line in lines).encode(errors="surrogatepass")
        if data and self.size + len(data) <= MOST_SCORED:
            append(self.path, data)
            self.size += len(data)
