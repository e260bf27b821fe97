"""The step log: a record of fixed size for every finished step, from which a run can be taken again.

    magic (8 bytes) | length (u32) | header (JSON) | CRC-32 of all before (u32) | record | record | ...
    record: step, seed, data position (3 u64) | learning rate, loss (2 f64)
            | loss_plus, loss_minus, projected_grad (3 f64 for each direction) | CRC-32 (u32)

A step that took no directions, a feedback step, has all bits set in their places, as no loss has.

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
from tezo.estimators.estimate import MOST_DIRECTIONS, Probe, StepRecord
from tezo.estimators.residual_writers import PASSES
from tezo.files import storing, sync, write_all

MAGIC = b"tezolog1"
MOST_HEADER = 1 << 20
"""What a file may claim of the size of its header, before anything is read by it."""

_HEAD, _FIXED, _PROBE, _CRC = struct.Struct("<I"), struct.Struct("<QQQdd"), struct.Struct("<ddd"), struct.Struct("<I")

_NOT_DRAWN = b"\xff" * _PROBE.size


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
        header: JSON, with the number of directions a step.
        steps: finished steps, from 0 on.
        valid: bytes up to the end of the last one.
        size: bytes of the file; what is beyond `valid` is an unfinished tail.
    """

    header: dict[str, Any]
    steps: list[LoggedStep]
    valid: int
    size: int


def _pack(step: LoggedStep, directions: int, crc: int) -> bytes:
    record = step.record
    body = _FIXED.pack(record.step, step.seed, step.position, record.lr, record.loss)
    drawn = b"".join(_PROBE.pack(p.loss_plus, p.loss_minus, p.projected_grad) for p in record.probes)
    body += drawn or _NOT_DRAWN * directions
    return body + _CRC.pack(zlib.crc32(body, crc))


def _unpack(body: bytes) -> LoggedStep:
    number, seed, position, lr, loss = _FIXED.unpack_from(body)
    drawn = body[_FIXED.size :]
    drawn = b"" if drawn == _NOT_DRAWN * (len(drawn) // _PROBE.size) else drawn
    probes = tuple(Probe(*values) for values in _PROBE.iter_unpack(drawn))
    return LoggedStep(StepRecord(number, loss, lr, probes), seed, position)


def forward_passes(records: Sequence[StepRecord], directions: int) -> list[int]:
    """Forward passes after 0, 1, 2, ... steps.

    A step along directions has two for each. A feedback step has one, and two more where it follows none; a step of a
    run without directions, by gradient, has one beside its backward pass.
    """
    passes, fed = [0], False
    for record in records:
        begins = directions > 0 and not record.probes and not fed
        fed = not record.probes
        passes.append(passes[-1] + (2 * len(record.probes) or 1) + PASSES * begins)
    return passes


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
    header, start = _read_head(path, data)
    size = _FIXED.size + _PROBE.size * header["directions"] + _CRC.size
    steps: list[LoggedStep] = []
    previous = _CRC.unpack_from(data, start - _CRC.size)[0]
    for place in range(start, len(data) - size + 1, size):
        body, crc = data[place : place + size - _CRC.size], _CRC.unpack_from(data, place + size - _CRC.size)[0]
        if zlib.crc32(body, previous) != crc or _FIXED.unpack_from(body)[0] != len(steps):
            _check_tail(path, data, place, size, len(steps))
            break
        steps.append(_unpack(body))
        previous = crc
    return LogContents(header, steps, start + size * len(steps), len(data))


def read_header(path: Path) -> dict[str, Any]:
    """The header of a step log alone.

    Raises:
        RequestError: it is no step log, or its header is damaged.
    """
    try:
        with path.open("rb") as file:
            return _read_head(path, file.read(len(MAGIC) + _HEAD.size + MOST_HEADER + _CRC.size))[0]
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); give the folder of a run.") from None


def _read_head(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    fault = RequestError(f"{path} is not a step log, or its header is damaged; go on from a copy, or start again.")
    start = len(MAGIC) + _HEAD.size
    if data[: len(MAGIC)] != MAGIC or len(data) < start:
        raise fault
    end = start + _HEAD.unpack_from(data, len(MAGIC))[0]
    if end - start > MOST_HEADER or len(data) < end + _CRC.size:
        raise fault
    if zlib.crc32(data[:end]) != _CRC.unpack_from(data, end)[0]:
        raise fault
    try:
        header = json.loads(data[start:end])
        directions = header["directions"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise fault from None
    if not isinstance(directions, int) or not 0 <= directions <= MOST_DIRECTIONS:
        raise fault
    return header, end + _CRC.size


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
        path: the file; it is made when there is none.
        header: JSON that goes into a new file; "directions" says how many a step has.
        sync_every: records between forced writes to disk; 0 leaves that to the operating system. A process that is
            killed loses no record either way; a power cut loses at most so many, which are then taken again.

    Attributes:
        contents: what was in the file.
        count: finished steps.

    Raises:
        RequestError: another process writes it, or it is damaged.
    """

    def __init__(self, path: Path, header: dict[str, Any], sync_every: int) -> None:
        self.path = path
        self._sync_every = sync_every
        with storing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self._begin(_head_bytes(header))
            self.contents = read_log(path)
            with storing(path):
                os.ftruncate(self._file, self.contents.valid)
            self._crc = _last_crc(path, self.contents.valid)
        except BaseException:
            os.close(self._file)
            raise
        self.count = len(self.contents.steps)

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
        data = _pack(step, self.contents.header["directions"], self._crc)
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
        """Lets go of the file."""
        os.close(self._file)


def _last_crc(path: Path, valid: int) -> int:
    with path.open("rb") as file:
        file.seek(valid - _CRC.size)
        return int(_CRC.unpack(file.read(_CRC.size))[0])
