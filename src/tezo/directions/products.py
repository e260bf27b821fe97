"""Products with a matrix that is computed tile by tile: a perturbed weight, or a weight cast to float32.

Reused buffers, so that processing a large tensor tile by tile allocates no new memory.

The operating system maps a new megabyte page by page, which can take longer than the arithmetic on it.

CPUs that emulate half-precision products: found by a measurement, and computing in float32 instead.

It is measured once, because neither a list of processors nor the features that they report say how fast torch's
products are. The result is kept in the user's cache folder, so that later processes compute with the same bits.
"""

import functools
import math
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tezo.system.files import NumberCache, default_cache

Tiles = Iterator[tuple[slice, int, Tensor]]
"""Yields (rows, g, W_g[rows]); the next item may overwrite the tensor."""

SharedTiles = Iterator[tuple[slice, slice, Tensor]]
"""Yields (rows, blocks, W_g[rows]), the same for all these blocks; the next item may overwrite the tensor."""

TILE = 1 << 19
"""Number of entries of a tile that is cast to float32 (2 MB)."""


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


ROWS, SIZE, ROUNDS = 128, 768, 7
"""Shape of the measured product, that of a layer of OPT-125M, and how often each way is timed."""

LEAST_ROWS = {torch.bfloat16: 32, torch.float16: 8}
"""Smallest number of input rows for which the weight is cast to float32. bfloat16: about the break-even point; float16:
the smallest measured number for which casting is faster (`benchmarks/products.py`, docs/cost.md)."""


def is_emulated(dtype: torch.dtype) -> bool:
    """Whether a product on the CPU in `dtype` takes longer than one in float32, with casts."""
    return dtype in (torch.bfloat16, torch.float16) and relative_time(dtype) > 1


def arithmetic_dtype(values: Tensor) -> torch.dtype:
    """The dtype for small products with `values`: float32 on a CPU that emulates their own, else their own."""
    return torch.float32 if values.device.type == "cpu" and is_emulated(values.dtype) else values.dtype


def multiplies_bfloat16(values: Tensor) -> bool:
    """Whether `values` are bfloat16 on a CPU that multiplies bfloat16 without emulating it."""
    return values.device.type == "cpu" and arithmetic_dtype(values) == torch.bfloat16


@functools.cache
def relative_time(dtype: torch.dtype) -> float:
    """Seconds of a product in `dtype` over those in float32 with casts; measured once for a machine and a torch."""
    cache = NumberCache(default_cache(), "products")
    key = f"{dtype}, torch {torch.__version__}, {_processor()}"
    if key not in cache.numbers:
        cache.numbers[key] = round(1000 * _measure(dtype))
        cache.save()
    return cache.numbers[key] / 1000


def _processor() -> str:
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return " ".join([platform.machine(), *sorted(name for name, has in known.items() if has is True)])


@torch.inference_mode()
def _measure(dtype: torch.dtype) -> float:
    x, weight = (torch.ones(rows, SIZE, dtype=dtype, device="cpu") for rows in (ROWS, SIZE))
    own, cast, threads = [], [], torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
    try:
        for _ in range(ROUNDS):  # in turn, and the shortest counts, so that another load matters little
            own.append(_seconds(functional.linear, x, weight))
            cast.append(_seconds(float32_linear, x, weight))
    finally:
        torch.set_num_threads(threads)
    return min(own) / min(cast)


def _seconds(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> float:
    begun = time.perf_counter()
    product(x, weight)
    return time.perf_counter() - begun


def float32_on_emulating_cpu(model: nn.Module) -> AbstractContextManager[object]:
    """Context in which half-precision linear layers compute in float32, on a CPU that emulates half-precision products.

    There, casting the weight to float32 tile by tile is faster for some tens of rows or more (see docs/cost.md), and
    rounds only once, at the end. On other hardware the context does nothing. Use it only where no gradient is recorded.
    """
    slow = any(is_emulated(p.dtype) for p in model.parameters() if p.device.type == "cpu")
    return _Float32Products() if slow else nullcontext()


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
