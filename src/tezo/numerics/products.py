"""Products with a matrix that is made a tile at a time and never exists whole: perturbed, or cast to float32."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tezo.numerics.scratch import row_slices, scratch

Tiles = Iterator[tuple[slice, int, Tensor]]
"""(rows, g, the rows of the matrix that block g meets); the next may overwrite the tensor."""

TILE = 1 << 19
"""Entries of a cast tile: 2 MB of float32."""

LEAST_ROWS = {torch.bfloat16: 32, torch.float16: 8}
"""From so many rows of inputs on the weight is cast: in bfloat16 about where both ways take as long, in float16 the
fewest measured at which casting is faster (`benchmarks/products.py`, docs/cost.md)."""

_INSTRUCTIONS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}


def tiled_linear(x_GTN: Tensor, bias_M: Tensor | None, height: int, tiles: Tiles) -> Tensor:
    """X W_g^T + bias, (G, T, M), of blocks that each meet a matrix of `height` M rows."""
    out_GTM = x_GTN.new_empty(*x_GTN.shape[:2], height)
    for rows, g, tile in tiles:
        torch.mm(x_GTN[g], tile.T, out=out_GTM[g, :, rows])
    return out_GTM if bias_M is None else out_GTM.add_(bias_M)


def tiled_transposed(x_GTM: Tensor, bias_N: Tensor, tiles: Tiles) -> Tensor:
    """X W_g + bias, (G, T, N), of blocks that each meet a matrix."""
    out_GTN = bias_N.to(x_GTM.dtype).expand(*x_GTM.shape[:2], -1).clone()
    for rows, g, tile in tiles:
        out_GTN[g].addmm_(x_GTM[g][:, rows], tile)
    return out_GTN


def float32_on_emulating_cpu(model: nn.Module) -> AbstractContextManager[object]:
    """While open, linear layers in half precision on a CPU without its instructions compute in float32.

    Such a CPU emulates each product; casting the weight tile by tile first is faster from some tens of rows on (see
    docs/cost.md), and rounds once, at the end. Elsewhere this does nothing. For use where no gradient is recorded.
    """
    slow = any(is_emulated(p.dtype) for p in model.parameters() if p.device.type == "cpu")
    return _Float32Products() if slow else nullcontext()


def is_emulated(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU has no instructions for products in `dtype`, as far as torch can tell."""
    return dtype in _INSTRUCTIONS and not any(_capabilities().get(name) for name in _INSTRUCTIONS[dtype])


@functools.cache
def _capabilities() -> Mapping[str, Any]:
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    # other architectures have names of their own for what they can do, and were not measured
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
    """X W^T + bias in float32, rounded to the dtype of `x` at the end."""
    x_1TN = x.reshape(1, -1, x.shape[-1]).float()
    out_1TM = tiled_linear(x_1TN, bias_M, weight_MN.shape[0], _cast_tiles(weight_MN))
    return out_1TM.to(x.dtype).view(*x.shape[:-1], -1)


def float32_addmm(bias_N: Tensor, x_TM: Tensor, weight_MN: Tensor) -> Tensor:
    """X W + bias in float32, rounded to the dtype of `x_TM` at the end."""
    return tiled_transposed(x_TM.unsqueeze(0).float(), bias_N, _cast_tiles(weight_MN))[0].to(x_TM.dtype)


def _cast_tiles(weight_MN: Tensor) -> Tiles:
    for rows in row_slices(weight_MN.shape, TILE):
        part = weight_MN[rows]
        yield rows, 0, scratch("cast", part.shape, torch.float32, part.device).copy_(part)
