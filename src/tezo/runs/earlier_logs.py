"""Step logs of versions 1 and 2, which are read, and rewritten in the present version when their run goes on.

Their records have a fixed size, and nothing but records follows the header:

    record: step, seed, data position (3 u64) | learning rate, loss (2 f64)
            | forward passes (u32) | kind, number of probes (2 u16)
            | loss_plus, loss_minus, projected_grad (3 f64 for each probe, zeros up to the header's "directions")
            | CRC-32 (u32), continued from the one of the record before

Version 1 has no forward passes, kind and number of probes; all bits of its probes are set in a step without probes.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import Any

from tezo.estimators.estimate import FEEDBACK, GRADIENT, TWO_POINT, Probe, StepRecord

_CRC, _PROBE = struct.Struct("<I"), struct.Struct("<ddd")
_FIXED = {1: struct.Struct("<QQQdd"), 2: struct.Struct("<QQQddIHH")}
_NO_PROBE_1 = b"\xff" * _PROBE.size
_PASSES_AT_PHASE_START_1 = 2
"""Version 1: further forward passes of the first of several feedback steps in a row."""


def read_records(data: bytes, version: int, header: dict[str, Any], start: int) -> tuple[list[StepRecord], int, bool]:
    """(valid records, end of the last one, whether a valid record follows an invalid one).

    Args:
        data: the whole file.
        version: 1 or 2.
        header: its header.
        start: where the records begin.
    """
    size = _FIXED[version].size + _PROBE.size * header["directions"] + _CRC.size
    records: list[StepRecord] = []
    for place in range(start, len(data) - size + 1, size):
        body = data[place : place + size - _CRC.size]
        if not _is_intact(data, place, size) or not _is_possible(body, version, header, len(records)):
            later = range(place + size, len(data) - size + 1, size)
            return records, place, any(_is_intact(data, other, size) for other in later)
        before = records[-1] if records else None
        records.append(_unpack_2(body, header["kinds"]) if version == 2 else _unpack_1(body, before))
    return records, start + size * len(records), False


def _is_intact(data: bytes, place: int, size: int) -> bool:
    """Whether a record has the CRC that follows from the one stored before it."""
    before, own = (_CRC.unpack_from(data, end - _CRC.size)[0] for end in (place, place + size))
    return bool(zlib.crc32(data[place : place + size - _CRC.size], before) == own)


def _is_possible(body: bytes, version: int, header: dict[str, Any], number: int) -> bool:
    values = _FIXED[version].unpack_from(body)
    if values[0] != number:
        return False
    return version == 1 or (values[6] < len(header["kinds"]) and values[7] <= header["directions"])


def _unpack_2(body: bytes, kinds: Sequence[str]) -> StepRecord:
    fixed = _FIXED[2]
    step, _, _, lr, loss, passes, kind, count = fixed.unpack_from(body)
    probes = tuple(Probe(*_PROBE.unpack_from(body, fixed.size + i * _PROBE.size)) for i in range(count))
    return StepRecord(step, loss, lr, probes, kinds[kind], passes)


def _unpack_1(body: bytes, before: StepRecord | None) -> StepRecord:
    fixed = _FIXED[1]
    step, _, _, lr, loss = fixed.unpack_from(body)
    drawn = body[fixed.size :]
    if drawn and drawn != _NO_PROBE_1 * (len(drawn) // _PROBE.size):
        probes = tuple(Probe(*values) for values in _PROBE.iter_unpack(drawn))
        return StepRecord(step, loss, lr, probes, TWO_POINT, 2 * len(probes))
    kind = FEEDBACK if drawn else GRADIENT
    begins = kind == FEEDBACK and (before is None or before.kind != FEEDBACK)
    return StepRecord(step, loss, lr, (), kind, 1 + _PASSES_AT_PHASE_START_1 * begins)
