"""TeZO-Adam's dense write: W -= lr m / sqrt(v + eps), with m and v computed from their factors tile by tile."""

import functools
import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor

from tezo.numerics import rounding
from tezo.numerics.adam_factors import AdamFactors
from tezo.numerics.emulation import multiplies_bfloat16
from tezo.numerics.scratch import row_slices, scratch

TILE = 3 << 18
"""Entries of a tile on a CPU: two float32 tiles, a bfloat16 one and the rounding noise, 11 MB."""


def factored_adam_(weight_MN: Tensor, factors: AdamFactors, lr: float, draw: torch.Generator) -> None:
    """W -= lr * step, in place, without an M x N temporary. bfloat16 and float16 weights are rounded stochastically.

    Args:
        weight_MN: the weight, in any floating dtype and with any strides.
        factors: both moments, on the weight's device.
        lr: learning rate.
        draw: generator for the rounding, on the weight's device. The GPU kernel uses only its seed.
    """
    if weight_MN.stride(0) < weight_MN.stride(1):  # process W^T, whose rows are contiguous
        weight_MN, factors = weight_MN.T, factors.transposed
    if _takes_triton(weight_MN):
        from tezo.numerics.triton_factored_adam import triton_factored_adam_

        triton_factored_adam_(weight_MN, factors, lr, draw.initial_seed())
    else:
        torch_factored_adam_(weight_MN, factors, lr, draw)


def _takes_triton(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype != torch.float64 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def torch_factored_adam_(weight_MN: Tensor, factors: AdamFactors, lr: float, draw: torch.Generator) -> None:
    """`factored_adam_` in plain torch: a few rows at a time, in reused buffers.

    The products are computed in the dtype of the temporal coefficients, or in bfloat16 where the weight is bfloat16 and
    the CPU has instructions for it: both moments then have relative errors of about 2^-8.
    """
    dtype = factors.tau_m_R.dtype
    v_RN = factors.v_NR.to(dtype).T
    v_squared_RN = v_RN.square()
    minus_tau_R = factors.tau_m_R * -lr
    narrow = torch.bfloat16 if multiplies_bfloat16(weight_MN) else dtype
    right_RN, right_squared_RN = v_RN.to(narrow), v_squared_RN.to(narrow)
    for rows, root, delta in _tiles(weight_MN, dtype):
        u_TR = factors.u_MR[rows].to(dtype)
        _product((u_TR * minus_tau_R).to(narrow), right_RN, out=delta)
        _product(u_TR.square().mul_(factors.tau_v_R).to(narrow), right_squared_RN, out=root)
        _reciprocal_root_(root, factors)
        _write_(weight_MN[rows], root, delta, draw)


def _tiles(weight_MN: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields (rows, buffer, buffer); both buffers have the shape of the rows and are reused for every tile."""
    for rows in row_slices(weight_MN.shape, TILE):
        buffers = scratch("factored-adam", (2, *weight_MN[rows].shape), dtype, weight_MN.device)
        yield rows, buffers[0], buffers[1]


def _product(left_TR: Tensor, right_RN: Tensor, out: Tensor) -> None:
    """Out <- left @ right, computed in the dtype of the factors."""
    if left_TR.dtype == out.dtype:
        torch.mm(left_TR, right_RN, out=out)
    else:
        narrow = scratch("factored-adam", tuple(out.shape), left_TR.dtype, out.device)
        out.copy_(torch.mm(left_TR, right_RN, out=narrow))


def _reciprocal_root_(v: Tensor, factors: AdamFactors) -> None:
    """V <- 1 / sqrt(v + eps), or 1 / (sqrt(v) + eps)."""
    if factors.eps_in_sqrt:
        v.add_(factors.eps).rsqrt_()
    else:
        v.sqrt_().add_(factors.eps).reciprocal_()


def _write_(weight: Tensor, root: Tensor, delta: Tensor, draw: torch.Generator) -> None:
    """Weight += root * delta; overwrites `root` and `delta`."""
    if weight.dtype == root.dtype:
        weight.addcmul_(root, delta)
        return
    delta.mul_(root)
    root.copy_(weight)  # convert first, then add: faster than adding tensors of two dtypes
    rounding.store_(weight, root.add_(delta), draw)
