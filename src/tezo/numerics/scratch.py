"""Reused buffers, so that processing a large tensor tile by tile allocates no new memory.

The operating system maps a new megabyte page by page, which can take longer than the arithmetic on it.
"""

import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_kept = threading.local()


def scratch(role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous, uninitialised tensor; the thread's next call with this role, dtype and device reuses its memory.

    Args:
        role: name of the use; buffers in use at the same time need different roles.
        shape: shape of the tensor, at most one tile: the memory is kept until the thread ends.
        dtype: data type of the tensor.
        device: device of the tensor.
    """
    size = math.prod(shape)
    buffers: dict[Any, Tensor] = vars(_kept)
    key = (role, dtype, device)
    if key not in buffers or buffers[key].numel() < size:
        with torch.inference_mode(mode=False):  # an inference tensor could not be written outside inference mode
            buffers[key] = torch.empty(size, dtype=dtype, device=device)
    return buffers[key][:size].view(shape)


def row_slices(shape: tuple[int, ...], most: int) -> Iterator[slice]:
    """Slices that cover all rows of an array of this shape, each with at most `most` entries (at least one row)."""
    step = max(1, most // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
