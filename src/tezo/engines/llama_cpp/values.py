"""Values of tensors in a file, unpacked row by row."""

import numpy as np

from tezo.engines.llama_cpp.file import GgufHeader
from tezo.engines.llama_cpp.plan import Numbers
from tezo.models.gguf_types import unpacked_types
from tezo.system.errors import RequestError


def unpack(packed: Numbers, kind: int) -> Numbers:
    """Returns the values of rows, (rows, values) in float32, of their bytes (rows, bytes)."""
    import gguf

    found: Numbers = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(kind))
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
    if stored.kind not in unpacked_types():
        kind = header.lib.ggml_type_name(stored.kind).decode()
        raise RequestError(
            f"{name} of {header.path} is of the type {kind}, which cannot be unpacked; give another file."
        )
    packed = np.memmap(header.path, np.uint8, "r", stored.start, (count, stored.size // count))
    return unpack(packed[numbers_X], stored.kind)
