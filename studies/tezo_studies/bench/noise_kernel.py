"""MeZO's noise in a Triton kernel, which adds it to a weight and never stores it: a candidate for the library.

The numbers are a function of a seed and of their place: Philox 4x32 with 10 rounds (Salmon et al. 2011), of which one
call gives four normal numbers by Box and Muller. A perturbation, its end and the update draw the same numbers again,
each in one pass over the weight. bfloat16 can be rounded stochastically in the same pass.

Triton is imported here alone. TRITON_INTERPRET=1 runs the kernel on a CPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tezo.system.errors import RequestError

WORDS = 512
"""Calls of Philox of a program. It treats four times as many adjacent entries: the k-th number of call j is that of the
entry k * WORDS + j, so that neighbours are read together. The numbers of a weight depend on it."""


@triton.jit  # type: ignore[untyped-decorator]
def _to_bfloat16(exact: Any, bits: Any, STOCHASTIC: tl.constexpr) -> Any:
    """Rounds to bfloat16, the upper 16 bits of a float32, by what is added below them; infinities and NaN stay."""
    pattern = exact.to(tl.int32, bitcast=True)
    below = bits & 0xFFFF if STOCHASTIC else 0x7FFF + ((pattern >> 16) & 1)  # to nearest, ties to even
    rounded = ((pattern + below) & -0x10000).to(tl.float32, bitcast=True)
    finite = (tl.abs(exact) < float("inf")) & (tl.abs(rounded) < float("inf"))  # a GPU's NaN has all bits, and carries
    return tl.where(finite, rounded, exact)


@triton.jit  # type: ignore[untyped-decorator]
def _add_normal(
    weight: Any,
    count: Any,
    seed: Any,
    scale: Any,
    rounding: Any,
    BFLOAT16: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    program, lane = tl.program_id(0), tl.arange(0, WORDS)
    counter = program * WORDS + lane
    z0, z1, z2, z3 = tl.randn4x(seed, counter)
    b0, b1, b2, b3 = tl.randint4x(rounding, counter)
    for k in tl.static_range(4):
        z = z0 if k == 0 else (z1 if k == 1 else (z2 if k == 2 else z3))
        bits = b0 if k == 0 else (b1 if k == 1 else (b2 if k == 2 else b3))
        place = (program.to(tl.int64) * 4 + k) * WORDS + lane
        inside = place < count
        exact = tl.load(weight + place, mask=inside).to(tl.float32) + scale * z
        if BFLOAT16:
            exact = _to_bfloat16(exact, bits.to(tl.int32, bitcast=True), STOCHASTIC)
        tl.store(weight + place, exact, mask=inside)


def add_normal_(weight: Tensor, scale: float, seed: int, rounding: int | None = None) -> None:
    """Adds scale * z to the weight, in place, with z standard normal: a function of the seed and the place of an entry.

    Args:
        weight: contiguous, float32, bfloat16 or float16; computed in float32.
        scale: factor of the noise.
        seed: below 2^63.
        rounding: seed of stochastic rounding to bfloat16; None: to nearest.

    Raises:
        RequestError: the weight is not contiguous, or is rounded stochastically and not bfloat16.
    """
    if not weight.is_contiguous() or (rounding is not None and weight.dtype != torch.bfloat16):
        raise RequestError(f"the noise kernel takes contiguous weights, and rounds bfloat16 ones, not {weight.dtype}.")
    programs = triton.cdiv(weight.numel(), 4 * WORDS)
    if programs:
        _add_normal[(programs,)](
            weight, weight.numel(), seed, scale, rounding or 0,
            BFLOAT16=weight.dtype == torch.bfloat16, STOCHASTIC=rounding is not None, WORDS=WORDS,
        )  # fmt: skip
