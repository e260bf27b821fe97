"""SHA-256 digests of tensors and of other values."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SAMPLE = 4096
"""Number of evenly spaced entries of each tensor in a digest of a sample."""
_AT_ONCE = 1 << 24
"""Number of entries that are copied to the CPU at once."""


def hash_of(value: Any) -> str:
    """Returns the SHA-256, in hexadecimal, of the `repr` of a value made of numbers, strings and tuples."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def digest(tensors: Mapping[str, Tensor], *, sample: bool = False) -> str:
    """Returns the SHA-256 of the name, shape, dtype and bytes of every tensor; independent of their order.

    Args:
        tensors: tensors by name.
        sample: whether about `SAMPLE` entries of each are enough, as they are to see that two computations went apart.
    """
    made = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        for part in _plain(tensor.detach()):
            flat = part.reshape(-1)
            read = flat[:: max(1, flat.numel() // SAMPLE)] if sample else flat
            for start in range(0, read.numel(), _AT_ONCE):
                piece = read[start : start + _AT_ONCE].contiguous().cpu()
                made.update(piece.view(torch.uint8).numpy().data)
    return made.hexdigest()


def _plain(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors inside a packed (quantised) tensor; a plain tensor alone."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor.data if type(tensor) is Tensor else tensor.as_subclass(Tensor)]
    return [plain for name in flatten()[0] for plain in _plain(getattr(tensor, name))]


def content_hash(weight: Tensor) -> str:
    """Returns the SHA-256 of a tensor's dtype, shape and values."""
    made = hashlib.sha256(f"{weight.dtype}{tuple(weight.shape)}".encode())
    flat = weight.contiguous().cpu().view(-1)  # a side of one entry may have any stride
    made.update(flat.view(torch.uint8).numpy().data)
    return made.hexdigest()
