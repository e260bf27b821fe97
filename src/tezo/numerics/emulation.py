"""CPUs that emulate half-precision products: found by a measurement, and computing in float32 instead.

It is measured once, because neither a list of processors nor the features that they report say how fast torch's
products are. The result is kept in the user's cache folder, so that later processes compute with the same bits.
"""

import functools
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tezo.numerics.number_cache import NumberCache, default_cache
from tezo.numerics.products import float32_addmm, float32_linear

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
