"""SHA-256 digests of tensors: a fast one from a sample of the entries of many tensors, and a full one of one tensor."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

SAMPLE = 4096
"""Number of evenly spaced entries that `digest` reads from each tensor."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the name, shape, dtype and about `SAMPLE` entries of every tensor; independent of their order."""
    made = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        for part in _plain(tensor.detach()):
            flat = part.reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLE)].contiguous().cpu()
            made.update(sample.view(torch.uint8).numpy().data if sample.numel() else b"")
    return made.hexdigest()


def _plain(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside a packed (quantised) tensor; a plain tensor is returned alone."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor.data if type(tensor) is Tensor else tensor.as_subclass(Tensor)]
    return [plain for name in flatten()[0] for plain in _plain(getattr(tensor, name))]


def content_hash(weight: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and values."""
    digest = hashlib.sha256(f"{weight.dtype}{tuple(weight.shape)}".encode())
    flat = weight.contiguous().cpu().view(-1)  # a side of one entry may have any stride
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
