"""TeZO-Adam's dense write on a GPU, or in Triton's interpreter: one program per tile of W.

Triton interprets the annotations of a kernel's arguments, so the kernels have none.
"""


# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from tezo.optim.factored_adam import AdamFactors

BLOCK_M = 64
BLOCK_N = 64
SMALLEST_DOT = 16
"""Smallest inner dimension of `tl.dot`; ranks are padded with zeros to a power of two."""


def triton_factored_adam_(weight_MN: Tensor, factors: AdamFactors, lr: float, seed: int) -> None:
    """`factored_adam_` as a Triton kernel, computed in float32.

    Args:
        weight_MN: float32, bfloat16 or float16, with any strides; fastest with stride(1) = 1.
        factors: both moments, on the weight's device.
        lr: learning rate.
        seed: 64-bit seed of the rounding. Entry (i, j) uses number i N + j, modulo 2^32, of its Philox stream.
    """
    height, width = weight_MN.shape
    rank = factors.tau_m_R.numel()
    if weight_MN.numel() == 0:
        return
    grid = (triton.cdiv(height, BLOCK_M), triton.cdiv(width, BLOCK_N))
    # Triton launches on the current device, and in its interpreter on none
    with torch.cuda.device(weight_MN.device) if weight_MN.is_cuda else nullcontext():
        _kernel[grid](
            weight_MN,
            *(factors.u_MR.contiguous(), factors.v_NR.contiguous()),
            *((factors.tau_m_R * -lr).float().contiguous(), factors.tau_v_R.float().contiguous()),
            *(height, width, rank, *weight_MN.stride()),
            seed & (2**63 - 1),
            factors.eps,
            EPS_IN_SQRT=factors.eps_in_sqrt,
            RANK=max(SMALLEST_DOT, triton.next_power_of_2(rank)),
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
        )


@triton.jit(do_not_specialize=["seed"])
def _kernel(
    weight,
    u,
    v,
    tau_m,
    tau_v,
    height,
    width,
    rank,
    stride_m,
    stride_n,
    seed,
    eps,
    EPS_IN_SQRT: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """weight[tile] += m / sqrt(s + eps), with m = (u tau_m) v^T and s = (u^2 tau_v) (v^2)^T; tau_m includes -lr."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK)
    u_MR = tl.load(u + i[:, None] * rank + r[None, :], (i[:, None] < height) & (r[None, :] < rank), 0.0)
    v_NR = tl.load(v + j[:, None] * rank + r[None, :], (j[:, None] < width) & (r[None, :] < rank), 0.0)
    u_MR, v_NR = u_MR.to(tl.float32), v_NR.to(tl.float32)
    tau_m_R = tl.load(tau_m + r, r < rank, 0.0)
    tau_v_R = tl.load(tau_v + r, r < rank, 0.0)
    m = tl.dot(u_MR * tau_m_R[None, :], tl.trans(v_NR), input_precision="ieee")
    s = tl.dot(u_MR * u_MR * tau_v_R[None, :], tl.trans(v_NR * v_NR), input_precision="ieee")
    root = tl.sqrt(s + eps) if EPS_IN_SQRT else tl.sqrt(s) + eps
    # 64-bit indices: embedding matrices of large vocabularies have more than 2^31 entries.
    i, j = i.to(tl.int64), j.to(tl.int64)
    at = weight + i[:, None] * stride_m + j[None, :] * stride_n
    inside = (i[:, None] < height) & (j[None, :] < width)
    exact = tl.load(at, inside, 0.0).to(tl.float32) + m / root
    noise = tl.randint(seed, (i[:, None] * width + j[None, :]).to(tl.uint32))
    if weight.dtype.element_ty == tl.bfloat16:
        rounded = _to_bfloat16(exact, noise)
    elif weight.dtype.element_ty == tl.float16:
        rounded = _to_float16(exact, noise)
    else:
        rounded = exact
    tl.store(at, rounded, inside)


@triton.jit
def _to_bfloat16(exact, noise):
    """As `rounding._store_bfloat16_`; beyond the largest finite value the noise is one half, i.e. round to nearest."""
    half = tl.full(exact.shape, 1 << 15, tl.int32)
    noise = tl.where(tl.abs(exact) <= 3.3895313892515355e38, noise.to(tl.int32) & 0xFFFF, half)
    bits = (exact.to(tl.int32, bitcast=True) + noise) >> 16
    bits = tl.where(exact == exact, bits, 0x7FC0)  # NaN
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _to_float16(exact, noise):
    """Floor of value / spacing, plus 1 with a probability equal to the remainder, which is resolved to 2^-24.

    The spacing is 2^-10 times the value's power of two, which is at least 2^-14; smaller values are subnormal.
    """
    finite = tl.abs(exact) <= 65504.0
    inner = tl.where(finite, exact, 0.0)
    power = inner.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.where(power > 0x38800000, power, 0x38800000)  # 2^-14
    spacing = power.to(tl.float32, bitcast=True) * 0.0009765625
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True) * 1024.0
    scaled = inner * inverse
    below = tl.floor(scaled)
    uniform = ((noise.to(tl.int32) >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    value = (below + tl.where(uniform < scaled - below, 1.0, 0.0)) * spacing
    return tl.where(finite, value, exact).to(tl.float16)
