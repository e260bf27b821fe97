"""Values of tensors in a file, unpacked row by row."""

import gguf
import numpy as np
from gguf.quants import dequantize

from tezo.engines.llama_cpp.file import GgufHeader
from tezo.engines.llama_cpp.plan import Numbers
from tezo.system.errors import RequestError

UNPACKED = {
    int(kind)
    for name, kind in gguf.GGMLQuantizationType.__members__.items()
    if name in ("F32", "F16") or hasattr(gguf.quants, name)
}
"""ggml's numbers of the types that can be unpacked."""


def unpack(packed: Numbers, kind: int) -> Numbers:
    """Returns the values of rows, (rows, values) in float32, of their bytes (rows, bytes)."""
    found: Numbers = dequantize(packed, gguf.GGMLQuantizationType(kind))
    return found.astype(np.float32)


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
    if stored.kind not in UNPACKED:
        kind = header.lib.ggml_type_name(stored.kind).decode()
        raise RequestError(
            f"{name} of {header.path} is of the type {kind}, which cannot be unpacked; give another file."
        )
    packed = np.memmap(header.path, np.uint8, "r", stored.start, (count, stored.size // count))
    return unpack(packed[numbers_X], stored.kind)
