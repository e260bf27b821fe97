"""The step log: a record of fixed size for every finished step, from which a run can be taken again.

    magic (8 bytes) | length (u32) | header (JSON) | CRC-32 of all before (u32) | record | record | ...
    record: step, seed, data position (3 u64) | learning rate, loss (2 f64)
            | forward passes (u32) | kind, number of probes (2 u16)
            | loss_plus, loss_minus, projected_grad (3 f64 for each probe, zeros up to the header's "directions")
            | CRC-32 (u32)

The kind is an index into the header's list "kinds". Version 1 ("tezolog1") has no forward passes, kind and number of
probes; all bits of its probes are set in a step that took none.

Little-endian. The CRC of a record goes on from the stored one of the record before it (of the header, for the first),
so that a record is valid only in its place. A process that dies can leave the last record unfinished: an invalid
tail, with nothing valid after it, is cut off. A fault with valid records after it is damage, and refused.
"""

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tezo.errors import RequestError
from tezo.estimators.estimate import FEEDBACK, GRADIENT, MOST_DIRECTIONS, TWO_POINT, Probe, StepRecord
from tezo.files import storing, sync, write_all, write_file

MAGIC, MAGIC_1 = b"tezolog2", b"tezolog1"
MOST_HEADER = 1 << 20
"""Bound on the size that a file may claim for its header, before anything is read by it."""
MOST_KINDS = 1 << 8
"""Bound on the kinds of step that a header may name."""

_HEAD, _CRC, _PROBE = struct.Struct("<I"), struct.Struct("<I"), struct.Struct("<ddd")
_FIXED = {MAGIC: struct.Struct("<QQQddIHH"), MAGIC_1: struct.Struct("<QQQdd")}

_NO_PROBE_1 = b"\xff" * _PROBE.size
_PASSES_AT_PHASE_START_1 = 2
"""Version 1: further forward passes of the first of several feedback steps in a row."""


@dataclass(frozen=True)
class LoggedStep:
    """A finished step.

    Attributes:
        record: what it measured and did.
        seed: of the run.
        position: training rows that were read up to its end.
    """

    record: StepRecord
    seed: int
    position: int


@dataclass(frozen=True)
class LogContents:
    """What a log says.

    Attributes:
        version: of the format.
        header: JSON, with the number of directions per step and the kinds of step.
        steps: finished steps, from 0 on.
        valid: bytes up to the end of the last one.
        size: bytes of the file; what is beyond `valid` is an unfinished tail.
    """

    version: int
    header: dict[str, Any]
    steps: list[LoggedStep]
    valid: int
    size: int


def _pack(step: LoggedStep, header: dict[str, Any], crc: int) -> bytes:
    record, slots = step.record, header["directions"]
    kind, count = header["kinds"].index(record.kind), len(record.probes)
    body = _FIXED[MAGIC].pack(
        record.step, step.seed, step.position, record.lr, record.loss, record.forward_passes, kind, count
    )
    body += b"".join(_PROBE.pack(p.loss_plus, p.loss_minus, p.projected_grad) for p in record.probes)
    body += bytes(_PROBE.size * (slots - count))
    return body + _CRC.pack(zlib.crc32(body, crc))


def _unpack(body: bytes, kinds: Sequence[str]) -> LoggedStep:
    fixed = _FIXED[MAGIC]
    step, seed, position, lr, loss, passes, kind, count = fixed.unpack_from(body)
    probes = tuple(Probe(*_PROBE.unpack_from(body, fixed.size + i * _PROBE.size)) for i in range(count))
    return LoggedStep(StepRecord(step, loss, lr, probes, kinds[kind], passes), seed, position)


def _unpack_1(body: bytes, before: StepRecord | None) -> LoggedStep:
    fixed = _FIXED[MAGIC_1]
    step, seed, position, lr, loss = fixed.unpack_from(body)
    drawn = body[fixed.size :]
    if drawn and drawn != _NO_PROBE_1 * (len(drawn) // _PROBE.size):
        probes = tuple(Probe(*values) for values in _PROBE.iter_unpack(drawn))
        return LoggedStep(StepRecord(step, loss, lr, probes, TWO_POINT, 2 * len(probes)), seed, position)
    kind = FEEDBACK if drawn else GRADIENT
    begins = kind == FEEDBACK and (before is None or before.kind != FEEDBACK)
    passes = 1 + _PASSES_AT_PHASE_START_1 * begins
    return LoggedStep(StepRecord(step, loss, lr, (), kind, passes), seed, position)


def _head_bytes(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, sort_keys=True).encode()
    head = MAGIC + _HEAD.pack(len(text)) + text
    return head + _CRC.pack(zlib.crc32(head))


def read_log(path: Path) -> LogContents:
    """Reads a step log.

    Raises:
        RequestError: it is no step log, or it is damaged before its end; which record is named.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); give the folder of a run.") from None
    magic, header, start = _read_head(path, data)
    size = _FIXED[magic].size + _PROBE.size * header["directions"] + _CRC.size
    steps: list[LoggedStep] = []
    previous = _CRC.unpack_from(data, start - _CRC.size)[0]
    for place in range(start, len(data) - size + 1, size):
        body, crc = data[place : place + size - _CRC.size], _CRC.unpack_from(data, place + size - _CRC.size)[0]
        if zlib.crc32(body, previous) != crc or not _is_record(body, magic, header, len(steps)):
            _check_tail(path, data, place, size, len(steps))
            break
        before = steps[-1].record if steps else None
        steps.append(_unpack(body, header["kinds"]) if magic == MAGIC else _unpack_1(body, before))
        previous = crc
    return LogContents(int(magic[-1:]), header, steps, start + size * len(steps), len(data))


def _is_record(body: bytes, magic: bytes, header: dict[str, Any], number: int) -> bool:
    """Whether a body with a right CRC says what a record in this place can say."""
    values = _FIXED[magic].unpack_from(body)
    if values[0] != number:
        return False
    return magic == MAGIC_1 or (values[6] < len(header["kinds"]) and values[7] <= header["directions"])


def read_header(path: Path) -> dict[str, Any]:
    """The header of a step log alone.

    Raises:
        RequestError: it is no step log, or its header is damaged.
    """
    try:
        with path.open("rb") as file:
            return _read_head(path, file.read(len(MAGIC) + _HEAD.size + MOST_HEADER + _CRC.size))[1]
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); give the folder of a run.") from None


def _read_head(path: Path, data: bytes) -> tuple[bytes, dict[str, Any], int]:
    """(magic, header, where the records begin)."""
    fault = RequestError(f"{path} is not a step log, or its header is damaged; go on from a copy, or start again.")
    magic, start = data[: len(MAGIC)], len(MAGIC) + _HEAD.size
    if magic not in _FIXED or len(data) < start:
        raise fault
    end = start + _HEAD.unpack_from(data, len(MAGIC))[0]
    if end - start > MOST_HEADER or len(data) < end + _CRC.size:
        raise fault
    if zlib.crc32(data[:end]) != _CRC.unpack_from(data, end)[0]:
        raise fault
    try:
        header = json.loads(data[start:end])
    except (ValueError, RecursionError):
        raise fault from None
    if not isinstance(header, dict) or not _is_sound(header, magic):
        raise fault
    return magic, header, end + _CRC.size


def _is_sound(header: dict[str, Any], magic: bytes) -> bool:
    """Whether the header has what reading records takes."""
    directions, kinds = header.get("directions"), header.get("kinds", [])
    if not isinstance(directions, int) or not 0 <= directions <= MOST_DIRECTIONS:
        return False
    named = isinstance(kinds, list) and len(kinds) <= MOST_KINDS and all(isinstance(kind, str) for kind in kinds)
    return named and (magic == MAGIC_1 or len(kinds) > 0)


def _check_tail(path: Path, data: bytes, place: int, size: int, number: int) -> None:
    """An error where a record after the invalid one at `place` is valid by the CRC that is stored before it."""
    for later in range(place + size, len(data) - size + 1, size):
        body = data[later : later + size - _CRC.size]
        before, own = (_CRC.unpack_from(data, at - _CRC.size)[0] for at in (later, later + size))
        if zlib.crc32(body, before) == own:
            raise RequestError(
                f"{path} is damaged at record {number}, with sound records after it; "
                "put a sound copy in its place, or start the run again."
            )


class StepLog:
    """An open log that this process alone appends to.

    Args:
        path: the file; it is made when there is none, and rewritten when it has an earlier version.
        header: JSON that goes into a new file; "directions" is the number of directions per step, "kinds" the kinds of
            step that there may be.
        sync_every: records between forced writes to disk; 0 leaves that to the operating system. A process that is
            killed loses no record either way; a power cut loses at most that many, which are then taken again.

    Attributes:
        contents: what was in the file.
        count: finished steps.

    Raises:
        RequestError: another process writes it, or it is damaged.
    """

    def __init__(self, path: Path, header: dict[str, Any], sync_every: int) -> None:
        self.path = path
        self._sync_every = sync_every
        self._open()
        try:
            self._begin(_head_bytes(header))
            self.contents = read_log(path)
            if self.contents.version == 1:
                self._rewrite(header["kinds"])
            with storing(path):
                os.ftruncate(self._file, self.contents.valid)
            self._crc = _last_crc(path, self.contents.valid)
        except BaseException:
            os.close(self._file)
            raise
        self.count = len(self.contents.steps)

    def _open(self) -> None:
        with storing(self.path):
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
        except BaseException:
            os.close(self._file)
            raise

    def _begin(self, head: bytes) -> None:
        """Writes the header of a new file, or of one whose process died while it wrote it."""
        with self.path.open("rb") as file:
            begun = file.read(len(head))
        if len(begun) < len(head) and head.startswith(begun):
            with storing(self.path):
                os.ftruncate(self._file, 0)
                write_all(self._file, head)
                os.fsync(self._file)
                sync(self.path.parent)

    def _rewrite(self, kinds: Sequence[str]) -> None:
        """Puts the same steps in their place in the present version."""
        header = {**self.contents.header, "kinds": list(kinds)}
        data = _head_bytes(header)
        for step in self.contents.steps:
            data += _pack(step, header, _CRC.unpack(data[-_CRC.size :])[0])
        write_file(self.path, data)
        os.close(self._file)
        self._open()
        self.contents = read_log(self.path)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RequestError(
                f"output: another process is writing {self.path.parent}; wait for it, or give another --output."
            ) from None

    def append(self, step: LoggedStep) -> None:
        """Adds the next step.

        Raises:
            RunError: it cannot be written; the log ends with the step before.
        """
        data = _pack(step, self.contents.header, self._crc)
        with storing(self.path):
            if not self.path.exists():
                raise FileNotFoundError(2, "no such file")
            write_all(self._file, data)
            self.count += 1
            self._crc = _CRC.unpack(data[-_CRC.size :])[0]
            if self._sync_every and self.count % self._sync_every == 0:
                os.fsync(self._file)

    def sync(self) -> None:
        """Forces what was appended to disk."""
        with storing(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Closes the file and its lock."""
        os.close(self._file)


def _last_crc(path: Path, valid: int) -> int:
    with path.open("rb") as file:
        file.seek(valid - _CRC.size)
        return int(_CRC.unpack(file.read(_CRC.size))[0])
