"""The step log: everything that a run did, in order. From the log and the base model the run can be repeated.

    magic (8 bytes) | length (u32) | header (JSON) | CRC-32 of all before (u32) | entry | entry | ...
    entry:  type (4 bytes) | length of the content (u32) | content | CRC-32 (u32)
    "step": a finished step: step (u64) | learning rate, loss (2 f64) | forward passes, kind, number of probes (3 u32)
            | loss_plus, loss_minus, projected_grad (3 f64 for each probe)
    "eval": JSON: an evaluation with its split, step and metrics, and the losses of its first rows; of test rows with
            answers to the first of them
    "back": JSON: a return to the parameters after an earlier step (`Rollback`)
    "file": JSON: a file beside the log, with its SHA-256
    "scor": JSON: another scorer, from the next step on (`ScorerChange`)
    "done": JSON: the end of the run (`End`); nothing but "more" follows it
    "more": JSON: another number of steps for the run, which goes on (`NewTotal`)

Numbers are little-endian. The kind of a step is an index into the header's list "kinds". The CRC of an entry continues
the CRC before it, so an entry is valid only in its place. An invalid tail is cut off: a process that was killed leaves
one. Invalid bytes with a valid entry after them are damage, and the log is refused.
"""

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tezo.optim.estimators.estimate import MOST_DIRECTIONS, Probe, StepRecord
from tezo.system.errors import RequestError
from tezo.system.files import (
    UntrustedError,
    json_text,
    lock,
    open_plain,
    open_to_read,
    storing,
    sync,
    unlock,
    write_all,
)
from tezo.tasks.evaluation import Metrics

LOG = "steps.log"
"""Name of the log in a run folder."""
MAGIC = b"tezolog5"
SYNC_EVERY = 10
"""Number of steps between forced writes to disk: the most that a power cut loses. A killed process loses none."""
MOST_HEADER = 1 << 20
"""Maximum size of the header or an entry in bytes."""
MOST_KINDS = 1 << 8
"""Maximum number of kinds of step in a header."""
MOST_SEARCH = 1 << 28
"""Maximum number of bytes that are searched for a valid entry after an invalid one."""

_STEP, _EVALUATION, _FILE, _ROLLBACK, _END, _TOTAL = b"step", b"eval", b"file", b"back", b"done", b"more"
_SCORER = b"scor"
_TYPE = re.compile(b"|".join((_STEP, _EVALUATION, _FILE, _ROLLBACK, _END, _TOTAL, _SCORER)))
_LENGTH, _CRC, _PROBE = struct.Struct("<I"), struct.Struct("<I"), struct.Struct("<ddd")
_ENTRY, _FIXED = struct.Struct("<4sI"), struct.Struct("<QddIII")


@dataclass(frozen=True)
class Rollback:
    """A return of a run, after `step` steps, to its parameters after `to` steps. All moments are dropped.

    The steps stay in the log, and the next one has the next number. `lr_scale` is the factor of the rates from then on.
    """

    step: int
    to: int
    lr_scale: float
    reason: str


@dataclass(frozen=True)
class ScorerChange:
    """A run by a reward went on, after `step` steps, with another scorer than before.

    Attributes:
        name: of the scorer.
        scorer: its identity, as JSON.
        answers: logged answers that it gave the same scores again; None: it was accepted by the user.
    """

    step: int
    name: str
    scorer: dict[str, Any]
    answers: int | None


@dataclass(frozen=True)
class End:
    """The end of a run after `steps` steps, with the parameters that it had after `kept` steps."""

    steps: int
    kept: int


@dataclass(frozen=True)
class NewTotal:
    """Another number of steps, given to a run that has taken `step` steps.

    Attributes:
        before: number of steps that the run was to have until then.
        steps: number from then on, at least `step`.
        ended: whether the run had ended, early or on request, before it had taken `before`.
    """

    step: int
    before: int
    steps: int
    ended: bool


@dataclass
class LogContents:
    """The contents of a log.

    Attributes:
        header: JSON, with the number of directions per step and the kinds of step.
        valid: bytes up to the end of the last valid entry, which ends with `crc`.
        size: bytes of the file.
        evaluations: (split, step) -> metrics.
        answers: (split, step) -> answers to the first rows, of the evaluations that have kept them.
        row_losses: (split, step) -> losses of the first rows, of the evaluations that have kept them.
        files: name -> SHA-256, in hexadecimal.
        rollbacks: number of steps taken -> the return after them.
        totals: changes of the number of steps, in their order.
        scorers: changes of the scorer, in their order.
        earlier: (split, step) of the evaluations by another scorer than the last, which gave other scores.
        end: None: the run has not ended, or goes on.
    """

    header: dict[str, Any] = field(default_factory=dict)
    valid: int = 0
    size: int = 0
    crc: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: dict[tuple[str, int], Metrics] = field(default_factory=dict)
    answers: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    row_losses: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    rollbacks: dict[int, Rollback] = field(default_factory=dict)
    totals: list[NewTotal] = field(default_factory=list)
    scorers: list[ScorerChange] = field(default_factory=list)
    earlier: set[tuple[str, int]] = field(default_factory=set)
    end: End | None = None

    @property
    def has_checksums(self) -> bool:
        """Whether each line of the files beside the log has a checksum: those of earlier versions have none."""
        return self.header.get("checksums") is True

    def add_scorer(self, change: ScorerChange) -> None:
        """Takes in a change of the scorer, after all entries so far."""
        self.scorers.append(change)
        if change.answers is None:
            self.earlier.update(self.evaluations)


def read_log(path: Path) -> LogContents:
    """Reads a step log.

    Raises:
        RequestError: it is no step log, a link, or damaged before its end; the place is named.
    """
    data = _read_some(path, -1)
    header, start = _read_head(path, data)
    contents = LogContents(header, start, len(data))
    while (end := _end_of_entry(data, contents.valid)) is not None:
        kind, _ = _ENTRY.unpack_from(data, contents.valid)
        try:
            _add(contents, kind, data[contents.valid + _ENTRY.size : end - _CRC.size])
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error, RecursionError):
            break  # a right CRC, but nothing that this version writes in this place
        contents.valid = end
    contents.crc = int(_CRC.unpack_from(data, contents.valid - _CRC.size)[0])
    if _is_damaged(data, contents.valid):
        raise RequestError(
            f"{path} is damaged after step {len(contents.steps)}, with intact entries after the damage; "
            "put an intact copy in its place, or start the run again."
        )
    return contents


def first_steps(path: Path, count: int) -> bytes:
    """Returns the beginning of a sound log, up to the end of the last of its first `count` steps."""
    data = _read_some(path, -1)
    end, taken = _read_head(path, data)[1], 0
    while taken < count and (following := _end_of_entry(data, end)) is not None:
        taken += _ENTRY.unpack_from(data, end)[0] == _STEP
        end = following
    return data[:end]


def read_header(path: Path) -> dict[str, Any]:
    """Reads the header of a step log alone.

    Raises:
        RequestError: it is no step log, or its header is damaged.
    """
    return _read_head(path, _read_some(path, len(MAGIC) + _LENGTH.size + MOST_HEADER + _CRC.size))[0]


def _read_some(path: Path, count: int) -> bytes:
    """Reads the first `count` bytes of a log, or all for -1."""
    try:
        with open_to_read(path) as file:
            return file.read(count)
    except FileNotFoundError:
        raise RequestError(
            f"{path.parent} has no {path.name}, from which a run is checked and repeated; put it back, or start the "
            "run again."
        ) from None
    except UntrustedError as error:
        raise RequestError(f"{path.parent}: {error}; put a copy of the file itself there.") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); give the folder of a run.") from None


def _read_head(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    """Returns (header, where the entries begin)."""
    try:
        start = len(MAGIC) + _LENGTH.size
        end = start + _LENGTH.unpack_from(data, len(MAGIC))[0]
        is_whole = data.startswith(MAGIC) and end - start <= MOST_HEADER
        if not is_whole or zlib.crc32(data[:end]) != _CRC.unpack_from(data, end)[0]:
            raise ValueError
        header = json.loads(data[start:end])
        directions, kinds = header["directions"], header.get("kinds")
        if not isinstance(directions, int) or not 0 <= directions <= MOST_DIRECTIONS:
            raise ValueError
        if not isinstance(kinds, list) or not 0 < len(kinds) <= MOST_KINDS or {*map(type, kinds)} != {str}:
            raise ValueError
    except (ValueError, LookupError, TypeError, struct.error, RecursionError):
        raise RequestError(
            f"{path} is not a step log, or its header is damaged; go on from a copy, or start again."
        ) from None
    return header, end + _CRC.size


def _end_of_entry(data: bytes, place: int) -> int | None:
    """Returns the end of the valid entry at `place`; None if there is none."""
    if len(data) < place + _ENTRY.size + _CRC.size or not _TYPE.match(data, place):
        return None
    end: int = place + _ENTRY.size + _ENTRY.unpack_from(data, place)[1] + _CRC.size
    if end > len(data) or end - place > MOST_HEADER:
        return None
    before, stored = (_CRC.unpack_from(data, at - _CRC.size)[0] for at in (place, end))
    return end if zlib.crc32(data[place : end - _CRC.size], before) == stored else None


def _is_damaged(data: bytes, valid: int) -> bool:
    """Whether a valid entry follows the invalid bytes at `valid`.

    Forged data can claim a long entry at every byte, so a search that is too long counts as damage.
    """
    read = 0
    for found in _TYPE.finditer(data, valid + 1):
        if read > MOST_SEARCH or _end_of_entry(data, found.start()) is not None:
            return True
        if len(data) >= found.end() + _LENGTH.size:
            read += min(_LENGTH.unpack_from(data, found.end())[0], MOST_HEADER)
    return False


def _add(contents: LogContents, kind: bytes, content: bytes) -> None:
    """Adds an entry to the contents; an error of one of several classes if it cannot stand in this place."""
    if contents.end is not None and kind != _TOTAL:
        raise ValueError
    if kind == _STEP:
        step, lr, loss, passes, number, count = _FIXED.unpack_from(content)
        if step != len(contents.steps) or len(content) != _FIXED.size + count * _PROBE.size:
            raise ValueError
        probes = tuple(Probe(*values) for values in _PROBE.iter_unpack(content[_FIXED.size :]))
        contents.steps.append(StepRecord(step, loss, lr, probes, contents.header["kinds"][number], passes))
        return
    entry = json.loads(content)
    if kind == _EVALUATION:
        metrics = {str(key): math.nan if value is None else float(value) for key, value in entry["metrics"].items()}
        key = str(entry["split"]), int(entry["step"])
        answers = [str(answer) for answer in entry.get("answers", [])]
        row_losses = [math.nan if loss is None else float(loss) for loss in entry.get("row_losses", [])]
        contents.evaluations[key] = metrics
        if answers:
            contents.answers[key] = answers
        if row_losses:
            contents.row_losses[key] = row_losses
    elif kind == _FILE:
        contents.files[str(entry["name"])] = str(entry["sha256"])
    elif kind == _ROLLBACK:
        back = Rollback(int(entry["step"]), int(entry["to"]), float(entry["lr_scale"]), str(entry["reason"]))
        if back.step != len(contents.steps) or not 0 <= back.to <= back.step or not 0 < back.lr_scale <= 1:
            raise ValueError
        contents.rollbacks[back.step] = back
    elif kind == _TOTAL:
        total = NewTotal(int(entry["step"]), int(entry["before"]), int(entry["steps"]), bool(entry["ended"]))
        if not 0 <= total.step == len(contents.steps) <= total.steps:
            raise ValueError
        contents.totals.append(total)
        contents.end = None
    elif kind == _SCORER:
        count = None if entry["answers"] is None else int(entry["answers"])
        change = ScorerChange(int(entry["step"]), str(entry["name"]), dict(entry["scorer"]), count)
        if change.step != len(contents.steps):
            raise ValueError
        contents.add_scorer(change)
    else:
        end = End(int(entry["steps"]), int(entry["kept"]))
        if not 0 <= end.kept <= end.steps == len(contents.steps):
            raise ValueError
        contents.end = end


class StepLog:
    """An open log that this process alone appends to.

    Args:
        path: the file; it is made when there is none.
        header: JSON of a new file; "directions" is the number of directions per step, "kinds" the kinds of step.

    Attributes:
        contents: of the file when it was opened.
        count: number of finished steps.

    Raises:
        RequestError: another process writes it, it is damaged, or it is a link.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self._lock_file = path.with_name(f".{path.name}.lock")  # Windows lets nobody read a file that is locked itself
        with storing(path):
            handle = lock(self._lock_file)
        if handle is None:
            raise RequestError(
                f"output: another process is writing {path.parent}; wait for it, or give another --output."
            )
        self._lock = handle
        try:
            with storing(path):
                self._file = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                self._begin(header)
                self.contents = read_log(path)
                with storing(path):
                    os.ftruncate(self._file, self.contents.valid)
            except BaseException:
                os.close(self._file)
                raise
        except BaseException:
            unlock(self._lock_file, handle)
            raise
        self.count, self._crc = len(self.contents.steps), self.contents.crc
        self._evaluated, self._rolled_back = set(self.contents.evaluations), set(self.contents.rollbacks)
        self._files = dict(self.contents.files)

    def _begin(self, header: dict[str, Any]) -> None:
        """Writes the header of a new file, or of one whose process died while it wrote it."""
        text = json.dumps(header, sort_keys=True).encode()
        head = MAGIC + _LENGTH.pack(len(text)) + text
        head += _CRC.pack(zlib.crc32(head))
        begun = _read_some(self.path, len(head))
        if len(begun) < len(head) and head.startswith(begun):
            with storing(self.path):
                os.ftruncate(self._file, 0)
                write_all(self._file, head)
                os.fsync(self._file)
                sync(self.path.parent)

    def append(self, record: StepRecord) -> None:
        """Adds the next step.

        Raises:
            RunError: it cannot be written; the log ends with the step before.
        """
        kind = self.contents.header["kinds"].index(record.rule)
        content = _FIXED.pack(record.step, record.lr, record.loss, record.forward_passes, kind, len(record.probes))
        content += b"".join(_PROBE.pack(p.loss_plus, p.loss_minus, p.projected_grad) for p in record.probes)
        self._append(_STEP, content)
        self.count += 1
        if self.count % SYNC_EVERY == 0:
            self.sync()

    def append_evaluation(
        self,
        split: str,
        step: int,
        metrics: Metrics,
        answers: Sequence[str] = (),
        row_losses: Sequence[float] = (),
    ) -> None:
        """Adds an evaluation, with answers to its first rows and losses of them, if it is not there already."""
        if (split, step) not in self._evaluated:
            of_rows = {"answers": answers, "row_losses": row_losses}
            entry = {"split": split, "step": step, "metrics": dict(metrics)}
            entry |= {name: values for name, values in of_rows.items() if values}
            self._append(_EVALUATION, json_text(entry).encode(errors="surrogatepass"))
            self._evaluated.add((split, step))

    def append_rollback(self, rollback: Rollback) -> None:
        """Adds a return to earlier parameters, if it is not there already."""
        if rollback.step not in self._rolled_back:
            self._append(_ROLLBACK, json_text(asdict(rollback)).encode())
            self._rolled_back.add(rollback.step)

    def append_scorer(self, change: ScorerChange) -> None:
        """Adds a change of the scorer."""
        self._append(_SCORER, json_text(asdict(change)).encode(errors="surrogatepass"))
        self.contents.add_scorer(change)

    def append_file(self, name: str, sha256: str) -> None:
        """Adds the digest of a file, if it is not there already."""
        if self._files.get(name) != sha256:
            self._append(_FILE, json_text({"name": name, "sha256": sha256}).encode())
            self._files[name] = sha256

    def append_total(self, total: NewTotal) -> None:
        """Adds another number of steps; a run that has ended goes on."""
        self._append(_TOTAL, json_text(asdict(total)).encode())
        self.contents.totals, self.contents.end = [*self.contents.totals, total], None

    def append_end(self, end: End) -> None:
        """Adds the end of the run, if it is not there already."""
        if self.contents.end is None:
            self._append(_END, json_text(asdict(end)).encode())
            self.contents.end = end

    def _append(self, kind: bytes, content: bytes) -> None:
        body = _ENTRY.pack(kind, len(content)) + content
        crc = zlib.crc32(body, self._crc)
        with storing(self.path):
            if not self.path.exists():
                raise FileNotFoundError(2, "no such file")
            write_all(self._file, body + _CRC.pack(crc))
            self._crc = crc

    def sync(self) -> None:
        """Flushes appended entries to disk."""
        with storing(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Closes the file, and gives its lock back."""
        os.close(self._file)
        unlock(self._lock_file, self._lock)
