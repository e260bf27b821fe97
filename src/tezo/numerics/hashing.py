"""Digests of tensors: of a sample of many, which is quick to take, and of every value of one."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

SAMPLE = 4096
"""Entries of each tensor that are read, evenly spread."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes, dtypes and `SAMPLE` entries of every tensor, whatever their order."""
    made = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        for part in _plain(tensor.detach()):
            flat = part.reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLE)].contiguous().cpu()
            made.update(sample.view(torch.uint8).numpy().data if sample.numel() else b"")
    return made.hexdigest()


def _plain(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a packed one consists of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor.data if type(tensor) is Tensor else tensor.as_subclass(Tensor)]
    return [plain for name in flatten()[0] for plain in _plain(getattr(tensor, name))]


def content_hash(weight: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and values."""
    digest = hashlib.sha256(f"{weight.dtype}{tuple(weight.shape)}".encode())
    digest.update(weight.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
