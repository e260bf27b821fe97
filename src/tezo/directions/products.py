"""How a model computes while its losses are measured: in evaluation mode, and in float32 on CPUs that emulate halves.

Which CPUs do is measured once, because neither a list of processors nor the features that they report say how fast
torch's products are. The result is kept in the user's cache folder, so that later processes compute with the same bits.
"""

import functools
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tezo.directions.scratch import row_slices, scratch
from tezo.system.files import NumberCache, default_cache

TILE = 1 << 19
"""Number of entries of a tile that is cast to float32 (2 MB)."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts all modules into evaluation mode while open, so that all evaluations of a step use the same function."""
    was_training = [module for module in model.modules() if module.training]
    for module in was_training:
        module.training = False
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The context in which losses are measured: evaluation mode, and `float32_on_emulating_cpu`."""
    with evaluation_mode(model), float32_on_emulating_cpu(model):
        yield


def float32_linear(x: Tensor, weight_MN: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Returns X W^T + bias, computed in float32 and rounded to the dtype of `x` at the end."""
    x_TN = x.reshape(-1, x.shape[-1]).float()
    out_TM = x_TN.new_empty(len(x_TN), weight_MN.shape[0])
    for rows, tile in _cast_tiles(weight_MN):
        torch.mm(x_TN, tile.T, out=out_TM[:, rows])
    if bias_M is not None:
        out_TM.add_(bias_M)
    return out_TM.to(x.dtype).view(*x.shape[:-1], -1)


def float32_addmm(bias_N: Tensor, x_TM: Tensor, weight_MN: Tensor) -> Tensor:
    """Returns X W + bias, computed in float32 and rounded to the dtype of `x_TM` at the end."""
    wide_TM = x_TM.float()
    out_TN = bias_N.float().expand(len(x_TM), -1).clone()
    for rows, tile in _cast_tiles(weight_MN):
        out_TN.addmm_(wide_TM[:, rows], tile)
    return out_TN.to(x_TM.dtype)


def _cast_tiles(weight_MN: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for rows in row_slices(weight_MN.shape, TILE):
        part = weight_MN[rows]
        yield rows, scratch("cast", part.shape, torch.float32, part.device).copy_(part)


ROWS, SIZE, ROUNDS = 128, 768, 7
"""Shape of the measured product, that of a layer of OPT-125M, and how often each way is timed."""

LEAST_ROWS = {torch.bfloat16: 32, torch.float16: 8}
"""Smallest number of input rows for which the weight is cast to float32. bfloat16: about the break-even point; float16:
the smallest measured number for which casting is faster (`benchmarks/products.py`, docs/cost.md)."""


def is_emulated(dtype: torch.dtype) -> bool:
    """Returns whether a product on the CPU in `dtype` takes longer than one in float32, with casts."""
    return dtype in (torch.bfloat16, torch.float16) and relative_time(dtype) > 1


def arithmetic_dtype(values: Tensor) -> torch.dtype:
    """Returns the dtype for small products: float32 on a CPU that emulates that of `values`, else theirs."""
    return torch.float32 if values.device.type == "cpu" and is_emulated(values.dtype) else values.dtype


def multiplies_bfloat16(values: Tensor) -> bool:
    """Returns whether `values` are bfloat16 on a CPU that multiplies bfloat16 without emulating it."""
    return values.device.type == "cpu" and arithmetic_dtype(values) == torch.bfloat16


@functools.cache
def relative_time(dtype: torch.dtype) -> float:
    """Returns the time of a product in `dtype` over one in float32 with casts, measured once a machine and torch."""
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    processor = " ".join([platform.machine(), *sorted(name for name, has in known.items() if has is True)])
    cache = NumberCache(default_cache(), "products")
    key = f"{dtype}, torch {torch.__version__}, {processor}"
    if key not in cache.numbers:
        cache.numbers[key] = round(1000 * _measure(dtype))
        cache.save()
    return cache.numbers[key] / 1000


@torch.inference_mode()
def _measure(dtype: torch.dtype) -> float:
    x, weight = (torch.ones(rows, SIZE, dtype=dtype, device="cpu") for rows in (ROWS, SIZE))
    products = functional.linear, float32_linear
    seconds: dict[Any, list[float]] = {product: [] for product in products}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
    try:
        for product in products * ROUNDS:  # in turn, and the shortest counts, so that another load matters little
            begun = time.perf_counter()
            product(x, weight)
            seconds[product].append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)
    plain, cast = (min(seconds[product]) for product in products)
    return plain / cast


def float32_on_emulating_cpu(model: nn.Module) -> AbstractContextManager[object]:
    """Returns a context in which linear layers in half precision compute in float32, on a CPU that emulates it.

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
