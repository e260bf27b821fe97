"""Scratch buffers, which a thread uses again, and slices of rows that fit into them."""

import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_kept = threading.local()


def scratch(role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a contiguous, uninitialised tensor; the thread's next call with this role, dtype and device reuses it.

    Mapping new memory page by page can take longer than the arithmetic on it. Buffers in use at the same time need
    different roles. They have at most one tile, because the memory is kept until the thread ends.
    """
    size = math.prod(shape)
    buffers: dict[Any, Tensor] = vars(_kept)
    key = (role, dtype, device)
    if key not in buffers or buffers[key].numel() < size:
        with torch.inference_mode(mode=False):  # an inference tensor could not be written outside inference mode
            buffers[key] = torch.empty(size, dtype=dtype, device=device)
    return buffers[key][:size].view(shape)


def row_slices(shape: tuple[int, ...], most: int) -> Iterator[slice]:
    """Yields slices that cover all rows of an array, each with at most `most` entries (at least one row)."""
    step = max(1, most // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
