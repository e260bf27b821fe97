"""Values of tensors in a file, unpacked row by row."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from tezo.engines.llama_cpp.file import GgufHeader
from tezo.engines.llama_cpp.plan import Numbers
from tezo.models.gguf_types import unpacked_types
from tezo.system.errors import RequestError

_Unpack = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _Traits(ctypes.Structure):
    """The beginning of ggml_type_traits."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("block", ctypes.c_int64), ("interleaved", ctypes.c_int64),
        ("size", ctypes.c_size_t), ("is_quantized", ctypes.c_bool), ("unpack", ctypes.c_void_p),
    )  # fmt: skip


def unpacker(lib: Any, kind: int) -> Callable[[int, int, int], None] | None:
    """Returns ggml's function that unpacks so many values of a type, by (where they are, where to, how many).

    None where the library has no such function, as for float32, or other fields than are known here.
    """
    if not lib.has("ggml_get_type_traits") or not (place := lib.ggml_get_type_traits(kind)):
        return None
    traits = _Traits.from_address(place)
    known = lib.ggml_type_name(kind), lib.ggml_blck_size(kind), lib.ggml_type_size(kind)
    if not traits.unpack or (traits.block, traits.size) != known[1:] or traits.name != known[0]:
        return None
    return _Unpack(traits.unpack)


def unpack(lib: Any, packed: Numbers, kind: int) -> Numbers:
    """Returns the values of rows, (rows, values) in float32, of their bytes (rows, bytes), by ggml or else by numpy."""
    function = unpacker(lib, kind)
    if function is None:
        import gguf

        slow: Numbers = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(kind))
        return slow.astype(np.float32, copy=False)
    packed = np.ascontiguousarray(packed)
    width = packed.shape[1] // lib.ggml_type_size(kind) * lib.ggml_blck_size(kind)
    found = np.empty((len(packed), width), np.float32)
    function(packed.ctypes.data, found.ctypes.data, found.size)
    return found


def rows_of(header: GgufHeader, name: str, numbers_X: Numbers, count: int) -> Numbers:
    """Returns rows of a matrix in a file, (X, values) in float32.

    Args:
        header: of the file.
        name: of the tensor.
        numbers_X: which rows.
        count: number of its rows.

    Raises:
        RequestError: its type cannot be unpacked.
    """
    stored = header.tensors[name]
    if stored.kind not in unpacked_types():
        kind = header.lib.ggml_type_name(stored.kind).decode()
        raise RequestError(
            f"{name} of {header.path} is of the type {kind}, which cannot be unpacked; give another file."
        )
    packed = np.memmap(header.path, np.uint8, "r", stored.start, (count, stored.size // count))
    return unpack(header.lib, packed[numbers_X], stored.kind)
