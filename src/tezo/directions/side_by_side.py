"""Small tensors that lie side by side in one buffer, so that one operation can treat them all."""

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns the entries of contiguous tensors of one dtype and device, one after the other: (X,).

    It is a view where they already lie so, else a copy.
    """
    first, place = parts[0], parts[0].storage_offset()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part.storage_offset() != place or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return torch.cat([part.reshape(-1) for part in parts])
        place += part.numel()
    return first.as_strided((place - first.storage_offset(),), (1,), first.storage_offset())


def split_like(values_X: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of the entries of `values_X` with the shapes of `parts`, in order.

    Dimensions before the last of `values_X` stay before those of a part.
    """
    cut = torch.split(values_X, [part.numel() for part in parts], -1)
    return [own.view(*own.shape[:-1], *part.shape) for own, part in zip(cut, parts, strict=True)]
