"""The step log: what a run did and what it decides by, in order. With the base model, the run can be repeated from it.

    magic (8 bytes) | length (u32) | header (JSON) | CRC-32 of all before (u32) | entry | entry | ...
    entry:  type (4 bytes) | length of the content (u32) | content | CRC-32 (u32)
    "step": a finished step: step (u64) | learning rate, loss (2 f64) | forward passes, kind, number of probes (3 u32)
            | loss_plus, loss_minus, projected_grad (3 f64 for each probe)
    "eval": JSON: an evaluation with its split, step and metrics; of test rows with answers to the first of them
    "back": JSON: a return to the parameters after an earlier step, with the rates from there on (`Rollback`)
    "file": JSON: a file beside the log that later entries depend on, with its SHA-256
    "done": JSON: the last entry, of a run that has ended, with the step whose parameters it kept (`End`)

The kind is an index into the header's list "kinds". Little-endian. The CRC of an entry continues from the stored one of
the entry before it (of the header, for the first), so that an entry is valid only in its place. A process that dies can
leave the last entry unfinished: an invalid tail, with nothing valid after it, is cut off. A fault with valid entries
after it is damage, and refused.
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
from tezo.system.files import UntrustedError, json_text, lock, open_plain, open_to_read, storing, sync, write_all
from tezo.tasks.evaluation import Metrics

MAGIC = b"tezolog5"
MOST_HEADER = 1 << 20
"""Bound on the size that a file may claim for its header or an entry, before anything is read by it."""
MOST_KINDS = 1 << 8
"""Bound on the kinds of step that a header may name."""
MOST_SEARCH = 1 << 28
"""Bound on the bytes that are read to tell damage from an unfinished tail."""

_STEP, _EVALUATION, _FILE, _BACK, _DONE = b"step", b"eval", b"file", b"back", b"done"
_TYPE = re.compile(b"|".join((_STEP, _EVALUATION, _FILE, _BACK, _DONE)))
_LENGTH, _CRC, _PROBE = struct.Struct("<I"), struct.Struct("<I"), struct.Struct("<ddd")
_ENTRY, _FIXED = struct.Struct("<4sI"), struct.Struct("<QddIII")


@dataclass(frozen=True)
class Rollback:
    """A return of a run to parameters that it had before, with other, as a rule lower, learning rates from there on.

    Attributes:
        step: number of steps taken before it; they stay in the log, and the next one has the next number.
        to: number of steps after which the run had the parameters that it returns to. All moments are dropped.
        lr_scale: factor of the learning rates of the steps that follow.
        reason: in words.
    """

    step: int
    to: int
    lr_scale: float
    reason: str


@dataclass(frozen=True)
class End:
    """The end of a run.

    Attributes:
        steps: number of steps taken.
        kept: number of steps after which the parameters were reached that the run kept.
    """

    steps: int
    kept: int


@dataclass
class LogContents:
    """The contents of a log.

    Attributes:
        header: JSON, with the number of directions per step and the kinds of step.
        valid: bytes up to the end of the last valid entry.
        size: bytes of the file; an unfinished tail is beyond `valid`.
        steps: finished steps, from 0 on.
        evaluations: (split, step) -> metrics.
        answers: (split, step) -> answers to the first rows, of the evaluations that have kept them.
        files: name -> SHA-256, in hexadecimal.
        rollbacks: number of steps taken -> the return to earlier parameters after them.
        end: of the run; None: it has not ended.
        crc: checksum at the end of the last valid entry, which the next entry's continues.
    """

    header: dict[str, Any]
    valid: int
    size: int
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: dict[tuple[str, int], Metrics] = field(default_factory=dict)
    answers: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    rollbacks: dict[int, Rollback] = field(default_factory=dict)
    end: End | None = None
    crc: int = 0


def _entry(kind: bytes, content: bytes, crc: int) -> bytes:
    body = _ENTRY.pack(kind, len(content)) + content
    return body + _CRC.pack(zlib.crc32(body, crc))


def _step_content(record: StepRecord, header: dict[str, Any]) -> bytes:
    kind = header["kinds"].index(record.rule)
    fixed = (record.step, record.lr, record.loss, record.forward_passes, kind, len(record.probes))
    probes = (_PROBE.pack(p.loss_plus, p.loss_minus, p.projected_grad) for p in record.probes)
    return _FIXED.pack(*fixed) + b"".join(probes)


def _evaluation_content(split: str, step: int, metrics: Metrics, answers: Sequence[str] = ()) -> bytes:
    entry = {"split": split, "step": step, "metrics": dict(metrics)} | ({"answers": answers} if answers else {})
    return json_text(entry).encode(errors="surrogatepass")


def _file_content(name: str, sha256: str) -> bytes:
    return json_text({"name": name, "sha256": sha256}).encode()


def _head_bytes(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, sort_keys=True).encode()
    head = MAGIC + _LENGTH.pack(len(text)) + text
    return head + _CRC.pack(zlib.crc32(head))


def read_log(path: Path) -> LogContents:
    """Reads a step log.

    Raises:
        RequestError: it is no step log, a link, or damaged before its end; the place is named.
    """
    data = _read_some(path, -1)
    header, start = _read_head(path, data)
    contents = LogContents(header, start, len(data))
    contents.valid = _read_entries(data, contents)
    contents.crc = int(_CRC.unpack_from(data, contents.valid - _CRC.size)[0])
    if _is_damaged(data, contents.valid):
        raise RequestError(
            f"{path} is damaged after step {len(contents.steps)}, with intact entries after the damage; "
            "put an intact copy in its place, or start the run again."
        )
    return contents


def _read_some(path: Path, count: int) -> bytes:
    """The first `count` bytes of a log, all for -1."""
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


def _read_entries(data: bytes, contents: LogContents) -> int:
    """Adds the valid entries to the contents; returns where the last one ends."""
    place = contents.valid
    while contents.end is None and (end := _end_of_entry(data, place)) is not None:
        kind, _ = _ENTRY.unpack_from(data, place)
        try:
            _ADD[kind](contents, data[place + _ENTRY.size : end - _CRC.size])
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
            break  # a right CRC, but nothing that this version writes in this place
        place = end
    return place


def _end_of_entry(data: bytes, place: int) -> int | None:
    """The end of the valid entry at `place`; None if there is none."""
    if len(data) < place + _ENTRY.size + _CRC.size or not _TYPE.match(data, place):
        return None
    end: int = place + _ENTRY.size + _ENTRY.unpack_from(data, place)[1] + _CRC.size
    if end > len(data) or end - place > MOST_HEADER:
        return None
    before, own = (_CRC.unpack_from(data, at - _CRC.size)[0] for at in (place, end))
    return end if zlib.crc32(data[place : end - _CRC.size], before) == own else None


def _is_damaged(data: bytes, valid: int) -> bool:
    """Whether a valid entry follows, by the CRC stored before it, the invalid data at `valid`.

    Forged data can claim a long entry at every byte: it counts as damaged once the search has cost too much.
    """
    read = 0
    for found in _TYPE.finditer(data, valid + 1):
        if read > MOST_SEARCH or _end_of_entry(data, found.start()) is not None:
            return True
        if len(data) >= found.end() + _LENGTH.size:
            read += min(_LENGTH.unpack_from(data, found.end())[0], MOST_HEADER)
    return False


def _add_step(contents: LogContents, content: bytes) -> None:
    step, lr, loss, passes, kind, count = _FIXED.unpack_from(content)
    if step != len(contents.steps) or len(content) != _FIXED.size + count * _PROBE.size:
        raise ValueError
    probes = tuple(Probe(*values) for values in _PROBE.iter_unpack(content[_FIXED.size :]))
    try:
        name = contents.header["kinds"][kind]
    except IndexError:
        raise ValueError from None
    contents.steps.append(StepRecord(step, loss, lr, probes, name, passes))


def _add_evaluation(contents: LogContents, content: bytes) -> None:
    entry = json.loads(content)
    metrics = {str(key): math.nan if value is None else float(value) for key, value in entry["metrics"].items()}
    key = str(entry["split"]), int(entry["step"])
    answers = [str(answer) for answer in entry.get("answers", [])]
    contents.evaluations[key] = metrics
    if answers:
        contents.answers[key] = answers


def _add_file(contents: LogContents, content: bytes) -> None:
    entry = json.loads(content)
    contents.files[str(entry["name"])] = str(entry["sha256"])


def _add_rollback(contents: LogContents, content: bytes) -> None:
    entry = json.loads(content)
    rollback = Rollback(int(entry["step"]), int(entry["to"]), float(entry["lr_scale"]), str(entry["reason"]))
    if rollback.step != len(contents.steps) or not 0 <= rollback.to <= rollback.step or not 0 < rollback.lr_scale <= 1:
        raise ValueError
    contents.rollbacks[rollback.step] = rollback


def _add_end(contents: LogContents, content: bytes) -> None:
    entry = json.loads(content)
    end = End(int(entry["steps"]), int(entry["kept"]))
    if not 0 <= end.kept <= end.steps == len(contents.steps):
        raise ValueError
    contents.end = end


_ADD = {_STEP: _add_step, _EVALUATION: _add_evaluation, _FILE: _add_file, _BACK: _add_rollback, _DONE: _add_end}


def read_header(path: Path) -> dict[str, Any]:
    """The header of a step log alone.

    Raises:
        RequestError: it is no step log, or its header is damaged.
    """
    return _read_head(path, _read_some(path, len(MAGIC) + _LENGTH.size + MOST_HEADER + _CRC.size))[0]


def _read_head(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    """(header, where the entries begin)."""
    fault = RequestError(f"{path} is not a step log, or its header is damaged; go on from a copy, or start again.")
    start = len(MAGIC) + _LENGTH.size
    if not data.startswith(MAGIC) or len(data) < start:
        raise fault
    end = start + _LENGTH.unpack_from(data, len(MAGIC))[0]
    if end - start > MOST_HEADER or len(data) < end + _CRC.size:
        raise fault
    if zlib.crc32(data[:end]) != _CRC.unpack_from(data, end)[0]:
        raise fault
    try:
        header = json.loads(data[start:end])
    except (ValueError, RecursionError):
        raise fault from None
    if not isinstance(header, dict) or not _is_sound(header):
        raise fault
    return header, end + _CRC.size


def _is_sound(header: dict[str, Any]) -> bool:
    """Whether the header has what reading entries requires."""
    directions, kinds = header.get("directions"), header.get("kinds", [])
    if not isinstance(directions, int) or not 0 <= directions <= MOST_DIRECTIONS:
        return False
    return isinstance(kinds, list) and 0 < len(kinds) <= MOST_KINDS and all(isinstance(kind, str) for kind in kinds)


class StepLog:
    """An open log that this process alone appends to.

    Args:
        path: the file; it is made when there is none.
        header: JSON that goes into a new file; "directions" is the number of directions per step, "kinds" the kinds of
            step that there may be.
        sync_every: steps between forced writes to disk; 0 leaves that to the operating system. A process that is
            killed loses no step either way; a power cut loses at most that many, which are then taken again.

    Attributes:
        contents: of the file when it was opened.
        count: finished steps.

    Raises:
        RequestError: another process writes it, it is damaged, or it is a link.
    """

    def __init__(self, path: Path, header: dict[str, Any], sync_every: int) -> None:
        self.path = path
        self._sync_every = sync_every
        self._open()
        try:
            self._begin(_head_bytes(header))
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _open(self) -> None:
        with storing(self.path):
            self._file = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            self._lock()
        except BaseException:
            os.close(self._file)
            raise

    def _begin(self, head: bytes) -> None:
        """Writes the header of a new file, or of one whose process died while it wrote it."""
        begun = _read_some(self.path, len(head))
        if len(begun) < len(head) and head.startswith(begun):
            with storing(self.path):
                os.ftruncate(self._file, 0)
                write_all(self._file, head)
                os.fsync(self._file)
                sync(self.path.parent)

    def _read(self) -> None:
        """Reads the file, cuts an unfinished tail off, and notes what is known."""
        self.contents = read_log(self.path)
        with storing(self.path):
            os.ftruncate(self._file, self.contents.valid)
        self._crc = self.contents.crc
        self.count = len(self.contents.steps)
        self._evaluated, self._files = set(self.contents.evaluations), dict(self.contents.files)
        self._rolled_back = set(self.contents.rollbacks)

    def _lock(self) -> None:
        try:
            is_ours = lock(self._file)
        except OSError:
            is_ours = False
        if not is_ours:
            raise RequestError(
                f"output: another process is writing {self.path.parent}; wait for it, or give another --output."
            )

    def append(self, record: StepRecord) -> None:
        """Adds the next step.

        Raises:
            RunError: it cannot be written; the log ends with the step before.
        """
        self._append(_STEP, _step_content(record, self.contents.header))
        self.count += 1
        if self._sync_every and self.count % self._sync_every == 0:
            self.sync()

    def append_evaluation(self, split: str, step: int, metrics: Metrics, answers: Sequence[str] = ()) -> None:
        """Adds an evaluation, with answers to its first rows, if it is not there already."""
        if (split, step) not in self._evaluated:
            self._append(_EVALUATION, _evaluation_content(split, step, metrics, answers))
            self._evaluated.add((split, step))

    def append_rollback(self, rollback: Rollback) -> None:
        """Adds a return to earlier parameters, if it is not there already."""
        if rollback.step not in self._rolled_back:
            self._append(_BACK, json_text(asdict(rollback)).encode())
            self._rolled_back.add(rollback.step)

    def append_file(self, name: str, sha256: str) -> None:
        """Adds the digest of a file, if it is not there already."""
        if self._files.get(name) != sha256:
            self._append(_FILE, _file_content(name, sha256))
            self._files[name] = sha256

    def append_end(self, end: End) -> None:
        """Adds the end of the run, if it is not there already; nothing can follow it."""
        if self.contents.end is None:
            self._append(_DONE, json_text(asdict(end)).encode())
            self.contents.end = end

    def _append(self, kind: bytes, content: bytes) -> None:
        data = _entry(kind, content, self._crc)
        with storing(self.path):
            if not self.path.exists():
                raise FileNotFoundError(2, "no such file")
            write_all(self._file, data)
            self._crc = _CRC.unpack(data[-_CRC.size :])[0]

    def sync(self) -> None:
        """Forces what was appended to disk."""
        with storing(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Closes the file and its lock."""
        os.close(self._file)
