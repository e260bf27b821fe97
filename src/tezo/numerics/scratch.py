"""Buffers that are used over and over, so that working on a large tensor tile by tile asks for no new memory.

A new block of a megabyte comes from the system page by page, which can take longer than the arithmetic on it.
"""

import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_kept = threading.local()


def scratch(role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor of any content; the thread's next call with this role overwrites it.

    Args:
        role: whose it is: those that are in use at the same time differ in it.
        shape: at most a tile, or the memory is kept for nothing.
        dtype: of the tensor.
        device: where it lies.
    """
    size = math.prod(shape)
    buffers: dict[Any, Tensor] = vars(_kept)
    key = (role, dtype, device)
    if key not in buffers or buffers[key].numel() < size:
        with torch.inference_mode(mode=False):  # or no later pass outside that mode could write to it
            buffers[key] = torch.empty(size, dtype=dtype, device=device)
    return buffers[key][:size].view(shape)


def row_slices(shape: tuple[int, ...], most: int) -> Iterator[slice]:
    """All rows of an array of this shape, in slices of at most `most` entries each (at least one row)."""
    step = max(1, most // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
