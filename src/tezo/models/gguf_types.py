"""The types of tensors in GGUF: transformers is made to read all that the installed package gguf unpacks.

transformers 5.23 lists 17 packed types, and Q5_0 and Q5_1, which most files of small models have, are not among them.
gguf has more, and a new version of it has new ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

_PLAIN = ("F32", "F16", "BF16")
"""Types that transformers takes for plain numbers."""


@cache
def unpacked_types() -> frozenset[int]:
    """Returns the numbers of the types that the installed package gguf unpacks, plain ones among them."""
    import gguf

    found = []
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        with suppress(NotImplementedError):
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
            found.append(int(kind))
    return frozenset(found)


def type_name(number: int) -> str:
    """Returns the name of a type; of one that gguf does not know its number."""
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(number).name)
    except ValueError:
        return f"type {number}"


@contextmanager
def every_type() -> Iterator[None]:
    """Has transformers know the size of every type that gguf knows, and unpack packed tensors by gguf."""
    import gguf

    sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items() if kind.name not in _PLAIN}
    with (
        patch.dict("transformers.integrations.gguf.dequant.GGML_BLOCK", sizes),
        patch("transformers.integrations.gguf.kernels.dequantize", _by_gguf),
    ):
        yield


def _by_gguf(data: Tensor, number: int, dtype: torch.dtype = torch.float32) -> Any:
    """Unpacks bytes (uint8) of whole blocks; returns values in one row."""
    import gguf

    kind = gguf.GGMLQuantizationType(number)
    blocks = data.cpu().numpy().reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind)).reshape(-1).to(data.device, dtype)
