"""metrics.jsonl and scored.jsonl: lines of JSON, for people and other programs to follow a run.

The step log decides the run. Times, memory and scored answers are in these files alone, so each line has a checksum.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tezo.runs.step_log import LogContents
from tezo.system.errors import RequestError
from tezo.system.files import UntrustedError, append, json_text, open_plain, read_bytes, storing
from tezo.tasks.evaluation import Metrics
from tezo.tasks.rewards import FAILED

MOST_LINE = 1 << 20
"""Maximum size of a line of metrics in bytes."""
MOST_METRICS = 1 << 28
"""Maximum size of metrics.jsonl in bytes."""
MOST_SCORED = 1 << 26
"""Size of scored.jsonl in bytes from which on nothing is added."""
CRC = "crc"
"""Key of the checksum of a line: the CRC-32 of the JSON text of its other keys, in their order."""


def line_of(value: Mapping[str, Any]) -> bytes:
    """Returns the line of a JSON object, with its checksum; NaN and infinity become null."""
    return f"{json_text({**value, CRC: _crc(value)})}\n".encode(errors="surrogatepass")


def value_of(line: bytes, *, checked: bool) -> dict[str, Any]:
    """Returns the JSON object of a line, without its checksum.

    Args:
        line: with or without its end.
        checked: whether it must have a checksum, as those of earlier versions do not.

    Raises:
        ValueError: it is damaged.
    """
    try:
        value = json.loads(line[: MOST_LINE + 1])
        found = value.pop(CRC, None)
        if found != _crc(value) and (checked or found is not None):
            raise ValueError("another checksum")
    except (AttributeError, TypeError, RecursionError):  # it is no object, or has too many inside each other
        raise ValueError("no object") from None
    return dict(value)


def _crc(value: Mapping[str, Any]) -> int:
    return zlib.crc32(json_text(dict(value)).encode(errors="surrogatepass"))


def read_lines(data: bytes, *, checked: bool) -> Iterator[dict[str, Any]]:
    """Yields the JSON object of each complete line, with a "step" of at least 0; an empty one for a damaged line.

    `checked`: as for `value_of`.
    """
    for text in data[: len(data) - unfinished(data)].splitlines():
        try:
            line = value_of(text, checked=checked)
            yield line if type(line["step"]) is int and line["step"] >= 0 else {}
        except (ValueError, KeyError):
            yield {}


def unfinished(data: bytes) -> int:
    """Returns the number of bytes behind the last end of a line."""
    return len(data) - (data.rfind(b"\n") + 1)


class LinesFile:
    """A file of lines to which a run adds. One that goes on goes on after the steps that its step log has.

    Args:
        path: of the file.

    Attributes:
        size: bytes of its lines that stay.
        unfinished: bytes of an incomplete last line, which does not stay.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found = self.size = self.unfinished = 0

    def _lines(self, most: int, *, checked: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (number, content) of each complete line, which stays where the next one is asked for.

        Raises:
            RequestError: a line is damaged, or the file is a link, or has more bytes than `most`.
        """
        try:
            data = read_bytes(self.path, most) if os.path.lexists(self.path) else b""
        except UntrustedError as error:
            raise RequestError(f"{self.path.parent}: {error}; remove it to go on.") from None
        self._found, self.unfinished = len(data), unfinished(data)
        texts = data.splitlines(keepends=True)
        for number, (text, line) in enumerate(zip(texts, read_lines(data, checked=checked), strict=False), 1):
            if not line:
                raise self._damaged(number)
            yield number, line
            self.size += len(text)

    def _damaged(self, number: int) -> RequestError:
        return RequestError(
            f"{self.path} is damaged at line {number}, or differs there from the step log; put an intact copy in its "
            "place, or delete it to go on."
        )

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
        for number, line in self._lines(MOST_METRICS, checked=log.has_checksums):
            lacks_split = "split" in line and (str(line["split"]), line["step"]) not in log.evaluations
            if line["step"] > len(log.steps) or lacks_split:  # a power cut can lose the log's end
                break
            if not self._take(line, log):
                raise self._damaged(number)

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
        append(self.path, line_of(line))


class ScoredLog(LinesFile):
    """The answers that steps have scored. A resumed run goes on after the steps that its log has.

    Behind them are answers that a scorer could not score, where that has ended the run.

    Attributes:
        has_failed: whether the run ended because its scorer failed, and has not gone on since.

    Raises:
        RequestError: a complete line is damaged, or the file is a link, or larger than it can be.
    """

    def __init__(self, path: Path, log: LogContents) -> None:
        super().__init__(path)
        self.has_failed = False
        self._checked = log.has_checksums
        for _, line in self._lines(2 * MOST_SCORED, checked=self._checked):
            if line["step"] > len(log.steps):  # scored before its step was in the log
                self.has_failed = FAILED in line
                break

    def kept(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of the steps that the log has, in order."""
        data = read_bytes(self.path, 2 * MOST_SCORED) if self.size else b""
        return read_lines(data[: self.size], checked=self._checked)

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds the answers of a step, where there is room for all of them."""
        data = b"".join(map(line_of, lines))
        if data and self.size + len(data) <= MOST_SCORED:
            append(self.path, data)
            self.size += len(data)

    def add_failed(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds answers that could not be scored; the lines have `FAILED`. A run that goes on removes them."""
        append(self.path, b"".join(map(line_of, lines))[:MOST_SCORED])
