"""TeZO-Adam's dense write: W -= lr M / sqrt(V + eps), with M and V built a tile at a time from their factors."""

import functools
import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor

from tezo.numerics import rounding
from tezo.numerics.adam_factors import AdamFactors
from tezo.numerics.scratch import row_slices, scratch

TILE = 1 << 18
"""Entries of a tile on a CPU: two of float32 and the rounding's noise, 2.5 MB, stay in a core's cache."""


def factored_adam_(weight_MN: Tensor, factors: AdamFactors, lr: float, draw: torch.Generator) -> None:
    """W -= lr * step, in place; below float32 with stochastic rounding. No M x N temporary is made.

    Args:
        weight_MN: of any floating dtype and strides.
        factors: of M and V, on the weight's device.
        lr: learning rate.
        draw: generator on the weight's device. The GPU's kernel takes its seed only.
    """
    if weight_MN.stride(0) < weight_MN.stride(1):  # walk along the rows of memory
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
    """`factored_adam_` in torch: a few rows at a time, in two buffers."""
    dtype = factors.tau_m_R.dtype
    v_RN = factors.v_NR.to(dtype).T
    v_squared_RN = v_RN.square()
    minus_tau_R = factors.tau_m_R * -lr
    for rows, root, delta in _tiles(weight_MN, dtype):
        u_TR = factors.u_MR[rows].to(dtype)
        torch.mm(u_TR * minus_tau_R, v_RN, out=delta)
        _reciprocal_root(root, u_TR.square().mul_(factors.tau_v_R), v_squared_RN, factors)
        _write_(weight_MN[rows], root, delta, draw)


def _tiles(weight_MN: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, two buffers of their shape): the same memory for all tiles."""
    for rows in row_slices(weight_MN.shape, TILE):
        buffers = scratch("factored-adam", (2, *weight_MN[rows].shape), dtype, weight_MN.device)
        yield rows, buffers[0], buffers[1]


def _reciprocal_root(out: Tensor, left_TR: Tensor, right_RN: Tensor, factors: AdamFactors) -> None:
    """Out <- 1 / sqrt(V + eps), or 1 / (sqrt(V) + eps), with V = left @ right."""
    if factors.eps_in_sqrt:
        out.fill_(factors.eps).addmm_(left_TR, right_RN).rsqrt_()
    else:
        torch.mm(left_TR, right_RN, out=out).sqrt_().add_(factors.eps).reciprocal_()


def _write_(weight: Tensor, root: Tensor, delta: Tensor, draw: torch.Generator) -> None:
    """Weight += root * delta; overwrites both."""
    if weight.dtype == root.dtype:
        weight.addcmul_(root, delta)
        return
    delta.mul_(root)
    root.copy_(weight)  # converted in a copy, then added: faster than an add of two dtypes
    rounding.store_(weight, root.add_(delta), draw)
