"""Products with a matrix that is computed tile by tile: a perturbed weight, or a weight cast to float32."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tezo.numerics.scratch import row_slices, scratch

Tiles = Iterator[tuple[slice, int, Tensor]]
"""Yields (rows, g, W_g[rows]); the next item may overwrite the tensor."""

SharedTiles = Iterator[tuple[slice, slice, Tensor]]
"""Yields (rows, blocks, W_g[rows]), the same for all these blocks; the next item may overwrite the tensor."""

TILE = 1 << 19
"""Number of entries of a tile that is cast to float32 (2 MB)."""

LEAST_ROWS = {torch.bfloat16: 32, torch.float16: 8}
"""Smallest number of input rows for which the weight is cast to float32. bfloat16: about the break-even point; float16:
the smallest measured number for which casting is faster (`benchmarks/products.py`, docs/cost.md)."""

_INSTRUCTIONS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}


def tiled_linear(x_GTN: Tensor, bias_M: Tensor | None, height: int, tiles: Tiles) -> Tensor:
    """X_g W_g^T + bias for each block g: (G, T, M). `height` is M, the number of rows of each W_g."""
    out_GTM = x_GTN.new_empty(*x_GTN.shape[:2], height)
    for rows, g, tile in tiles:
        torch.mm(x_GTN[g], tile.T, out=out_GTM[g, :, rows])
    return out_GTM if bias_M is None else out_GTM.add_(bias_M)


def add_tiled_linear_(out_GTM: Tensor, x_GTN: Tensor, scale: float, tiles: SharedTiles) -> None:
    """Out_g += scale * X_g W_g^T, in place; both are contiguous."""
    for rows, blocks, tile in tiles:
        out_GTM[blocks].flatten(0, 1)[:, rows].addmm_(x_GTN[blocks].flatten(0, 1), tile.T, alpha=scale)


def add_tiled_transposed_(out_GTN: Tensor, x_GTM: Tensor, scale: float, tiles: SharedTiles) -> None:
    """Out_g += scale * X_g W_g, in place; both are contiguous."""
    for rows, blocks, tile in tiles:
        out_GTN[blocks].flatten(0, 1).addmm_(x_GTM[blocks].flatten(0, 1)[:, rows], tile, alpha=scale)


def tiled_transposed(x_GTM: Tensor, bias_N: Tensor, tiles: Tiles) -> Tensor:
    """X_g W_g + bias for each block g: (G, T, N)."""
    out_GTN = bias_N.to(x_GTM.dtype).expand(*x_GTM.shape[:2], -1).clone()
    for rows, g, tile in tiles:
        out_GTN[g].addmm_(x_GTM[g][:, rows], tile)
    return out_GTN


def float32_on_emulating_cpu(model: nn.Module) -> AbstractContextManager[object]:
    """Context in which half-precision linear layers compute in float32, on a CPU without half-precision instructions.

    Such a CPU emulates half-precision products. Casting the weight to float32 tile by tile is faster for some tens of
    rows or more (see docs/cost.md), and rounds only once, at the end. On other hardware the context does nothing. Use
    it only where no gradient is recorded.
    """
    slow = any(is_emulated(p.dtype) for p in model.parameters() if p.device.type == "cpu")
    return _Float32Products() if slow else nullcontext()


def has_bfloat16_products(tensor: Tensor) -> bool:
    """Whether the tensor is bfloat16 on a CPU that has instructions for products of bfloat16 numbers."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and not is_emulated(tensor.dtype)


def is_emulated(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU lacks instructions for products in `dtype`, as far as torch reports it."""
    return dtype in _INSTRUCTIONS and not any(_capabilities().get(name) for name in _INSTRUCTIONS[dtype])


@functools.cache
def _capabilities() -> Mapping[str, Any]:
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    # other architectures name their capabilities differently and were not measured
    return known if known.get("architecture") == "x86_64" else dict.fromkeys(sum(_INSTRUCTIONS.values(), ()), True)


class _Float32Products(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if not kwargs and func is torch.nn.functional.linear and _pays(args[0], args[1]):
            return float32_linear(*args)
        if not kwargs and func is torch.addmm and _pays(args[1], args[2]):
            return float32_addmm(*args)
        return func(*args, **(kwargs or {}))


def _pays(x: Tensor, weight: Tensor) -> bool:
    plain = type(weight) in (Tensor, nn.Parameter) and weight.ndim == 2 and weight.device.type == "cpu"
    if not plain or x.dtype != weight.dtype or not is_emulated(weight.dtype):
        return False
    return x.numel() >= LEAST_ROWS[weight.dtype] * x.shape[-1]


def float32_linear(x: Tensor, weight_MN: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """X W^T + bias, computed in float32 and rounded to the dtype of `x` at the end."""
    x_1TN = x.reshape(1, -1, x.shape[-1]).float()
    out_1TM = tiled_linear(x_1TN, bias_M, weight_MN.shape[0], _cast_tiles(weight_MN))
    return out_1TM.to(x.dtype).view(*x.shape[:-1], -1)


def float32_addmm(bias_N: Tensor, x_TM: Tensor, weight_MN: Tensor) -> Tensor:
    """X W + bias, computed in float32 and rounded to the dtype of `x_TM` at the end."""
    return tiled_transposed(x_TM.unsqueeze(0).float(), bias_N, _cast_tiles(weight_MN))[0].to(x_TM.dtype)


def _cast_tiles(weight_MN: Tensor) -> Tiles:
    for rows in row_slices(weight_MN.shape, TILE):
        part = weight_MN[rows]
        yield rows, 0, scratch("cast", part.shape, torch.float32, part.device).copy_(part)
