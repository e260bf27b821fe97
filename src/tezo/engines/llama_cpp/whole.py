"""A whole GGUF file with a change in it: changed matrices are unpacked, changed and packed again, others copied."""

import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from tezo.engines.llama_cpp.file import GgufHeader, StoredTensor
from tezo.engines.llama_cpp.plan import Numbers
from tezo.engines.llama_cpp.values import unpack
from tezo.models.gguf_types import unpacked_types
from tezo.system.errors import RequestError
from tezo.system.files import new_file

AT_ONCE = 1 << 22
"""Values that are unpacked at a time."""
BLOCK = 1 << 22
"""Bytes that are copied at a time."""


@dataclass(frozen=True)
class Repacked:
    """A matrix that was changed.

    Attributes:
        name: of the tensor.
        before: name of its type in the base.
        after: name of its type now.
        lost: size of the error of packing, as a part of the size of the change.
    """

    name: str
    before: str
    after: str
    lost: float


def write_whole(
    base: str | os.PathLike[str],
    output: Path,
    change: Mapping[str, tuple[Tensor, Tensor]],
    *,
    keep_tuned: str | None = None,
) -> list[Repacked]:
    """Writes a file with a change added to its matrices; metadata and all other tensors stay as they are.

    Packing goes by the quantiser of ggml, without an importance matrix. A process that dies leaves nothing, or what was
    at `output` before.

    Args:
        base: the file without the change.
        output: the file to write.
        change: name of a tensor -> (A_RI, B_OR); B A is added to it. With A or B zero it stays as it is, byte for byte.
        keep_tuned: type of the changed matrices, such as q8_0 or f16; None, and for a matrix whose rows it does not
            divide into blocks: that of each in the base.

    Raises:
        RequestError: the base lacks a tensor of the change, or a matrix cannot be packed in this type.
        RunError: the file cannot be written.
    """
    header, target = GgufHeader(base), GgufHeader(base)
    # packing again what has not changed may round it: IQ4_NL does
    change = {name: pair for name, pair in change.items() if all(bool(factor.any()) for factor in pair)}
    kinds = {name: _kind(header, name, pair, keep_tuned) for name, pair in change.items()}
    for name, kind in kinds.items():
        target.set_kind(name, kind)
    found = []
    with new_file(output) as file, Path(base).open("rb") as source:
        file.write(target.metadata())
        for name, place in target.tensors.items():
            _pad(file, place.start)
            stored = header.tensors[name]
            if name in change:
                found.append(_repack(file, source, target.lib, stored, place, change[name]))
            else:
                _copy(file, source, stored)
        _pad(file, -(-file.tell() // target.alignment) * target.alignment)
    return found


def _kind(header: GgufHeader, name: str, pair: tuple[Tensor, Tensor], keep_tuned: str | None) -> int:
    """Returns ggml's number of the type in which a changed matrix is packed."""
    lib, stored = header.lib, header.tensors.get(name)
    a_RI, b_OR = pair
    if stored is None or _rows(lib, stored, a_RI.shape[1]) != len(b_OR):
        has = "has none of this name" if stored is None else f"has one of {stored.size:,} bytes"
        raise RequestError(
            f"the change of {name} is of {len(b_OR)} x {a_RI.shape[1]} values, and {header.path} {has}; give the base "
            "model that the run began with."
        )
    kind, before = stored.kind, lib.ggml_type_name(stored.kind).decode()
    if keep_tuned is not None:
        import gguf

        known = {member.name.lower(): int(member) for member in gguf.GGMLQuantizationType}
        if keep_tuned.lower() not in known:
            raise RequestError(f"keep_tuned is {keep_tuned!r}, which is no type of ggml; give q8_0, f16 or f32.")
        kind = known[keep_tuned.lower()]
        if kind in unpacked_types() and a_RI.shape[1] % lib.ggml_blck_size(kind):
            kind = stored.kind
    after = lib.ggml_type_name(kind).decode()
    if stored.kind not in unpacked_types():
        raise RequestError(f"{name} is of the type {before}, which cannot be unpacked here; give another base.")
    if lib.ggml_quantize_requires_imatrix(kind):
        raise RequestError(
            f"{name} is of the type {after}, which is packed by an importance matrix alone; keep the changed matrices "
            "in another type: --keep-tuned q8_0."
        )
    if kind not in unpacked_types() or a_RI.shape[1] % lib.ggml_blck_size(kind):
        raise RequestError(
            f"{name} has rows of {a_RI.shape[1]} values, which cannot be packed as {after}; give another type, such as "
            "--keep-tuned f16."
        )
    return kind


def _rows(lib: Any, stored: StoredTensor, width: int) -> int:
    """Returns the number of rows of a matrix with rows of so many values; 0 where it is none."""
    block, size = lib.ggml_blck_size(stored.kind), lib.ggml_type_size(stored.kind)
    row = width // block * size
    return stored.size // row if row and not width % block and not stored.size % row else 0


def _repack(
    file: BinaryIO, source: BinaryIO, lib: Any, stored: StoredTensor, place: StoredTensor, pair: tuple[Tensor, Tensor]
) -> Repacked:
    """Writes a matrix with its change, packed as `place` has it."""
    a_RI, b_OR = (factor.float().numpy() for factor in pair)
    width, lost, moved = a_RI.shape[1], 0.0, 0.0
    source.seek(stored.start)
    for first, last in _parts(len(b_OR), max(1, AT_ONCE // width)):
        packed = np.frombuffer(source.read((last - first) * (stored.size // len(b_OR))), np.uint8)
        change = b_OR[first:last] @ a_RI
        wanted = unpack(lib, packed.reshape(last - first, -1), stored.kind) + change
        again = pack(lib, wanted, place.kind)
        file.write(again.tobytes())
        lost += float(np.square(unpack(lib, again, place.kind) - wanted, dtype=np.float64).sum())
        moved += float(np.square(change, dtype=np.float64).sum())
    before, after = (lib.ggml_type_name(tensor.kind).decode() for tensor in (stored, place))
    return Repacked(stored.name, before, after, (lost / moved) ** 0.5 if moved else 0.0)


def pack(lib: Any, values: Numbers, kind: int) -> Numbers:
    """Returns the bytes of rows, (rows, bytes), packed by ggml."""
    rows, width = values.shape
    size = width // lib.ggml_blck_size(kind) * lib.ggml_type_size(kind)
    packed, values = np.empty((rows, size), np.uint8), np.ascontiguousarray(values, np.float32)
    numbers = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    lib.ggml_quantize_chunk(kind, numbers, packed.ctypes.data, 0, rows, width, None)
    return packed


def _copy(file: BinaryIO, source: BinaryIO, stored: StoredTensor) -> None:
    source.seek(stored.start)
    left = stored.size
    while left:
        data = source.read(min(left, BLOCK))
        file.write(data)
        left -= len(data)


def _pad(file: BinaryIO, place: int) -> None:
    file.write(b"\0" * (place - file.tell()))


def _parts(count: int, many: int) -> Iterator[tuple[int, int]]:
    for first in range(0, count, many):
        yield first, min(count, first + many)
