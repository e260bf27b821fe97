"""Adam on coefficients, and TeZO-Adam, which applies factored moments to the whole matrix."""

import functools
import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from tezo.directions.products import multiplies_bfloat16, row_slices, scratch
from tezo.directions.spaces import CP, Core, Dense, Direction, LowRank
from tezo.forward import rounding
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.optim.estimators.estimate import ParameterEstimate
from tezo.optim.updates import State, Update, check_average, zeros_like_coefficient

TILE = 3 << 18
"""Entries of a tile on a CPU: two float32 tiles, a bfloat16 one and the rounding noise, 11 MB."""


@dataclass(frozen=True)
class AdamFactors:
    """The factors of both moments, and the form of the division.

        m = U diag(tau_m) V^T,   v = U^2 diag(tau_v) (V^2)^T,   squares entry by entry,
        step = m / sqrt(v + eps), or m / (sqrt(v) + eps).

    Attributes:
        u_MR: factor U, in any floating dtype.
        v_NR: factor V, in any floating dtype.
        tau_m_R: temporal coefficients of the first moment, float32 or float64; the step is computed in this dtype.
        tau_v_R: temporal coefficients of the second moment, not negative, in the dtype of `tau_m_R`.
        eps: smoothing term.
        eps_in_sqrt: True: step = m / sqrt(v + eps); False: step = m / (sqrt(v) + eps).
    """

    u_MR: Tensor
    v_NR: Tensor
    tau_m_R: Tensor
    tau_v_R: Tensor
    eps: float
    eps_in_sqrt: bool

    @property
    def transposed(self) -> "AdamFactors":
        """Factors of the step for W^T."""
        return AdamFactors(self.v_NR, self.u_MR, self.tau_m_R, self.tau_v_R, self.eps, self.eps_in_sqrt)


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
    if weight_MN.is_cuda and weight_MN.dtype != torch.float64 and _has_triton():
        from tezo.optim.triton_adam import triton_factored_adam_

        triton_factored_adam_(weight_MN, factors, lr, draw.initial_seed())
    else:
        _torch_factored_adam_(weight_MN, factors, lr, draw)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _torch_factored_adam_(weight_MN: Tensor, factors: AdamFactors, lr: float, draw: torch.Generator) -> None:
    """`factored_adam_` in plain torch: a few rows at a time, in reused buffers.

    The products are computed in the dtype of the temporal coefficients, or in bfloat16 where the weight is bfloat16 and
    the CPU has instructions for it: both moments then have relative errors of about 2^-8.
    """
    dtype = factors.tau_m_R.dtype
    v_RN = factors.v_NR.to(dtype).T
    minus_tau_R = factors.tau_m_R * -lr
    narrow = torch.bfloat16 if multiplies_bfloat16(weight_MN) else dtype
    right_RN, right_squared_RN = v_RN.to(narrow), v_RN.square().to(narrow)
    for rows in row_slices(weight_MN.shape, TILE):
        weight, u_TR = weight_MN[rows], factors.u_MR[rows].to(dtype)
        root, delta = scratch("factored-adam", (2, *weight.shape), dtype, weight.device)
        _product((u_TR * minus_tau_R).to(narrow), right_RN, out=delta)
        _product(u_TR.square().mul_(factors.tau_v_R).to(narrow), right_squared_RN, out=root)
        _reciprocal_root_(root, factors.eps, factors.eps_in_sqrt)
        if weight.dtype == dtype:
            weight.addcmul_(root, delta)
        else:
            delta.mul_(root)
            root.copy_(weight)  # convert first, then add: faster than adding tensors of two dtypes
            rounding.store_(weight, root.add_(delta), draw)


def _product(left_TR: Tensor, right_RN: Tensor, out: Tensor) -> None:
    """Out <- left @ right, computed in the dtype of the factors."""
    if left_TR.dtype == out.dtype:
        torch.mm(left_TR, right_RN, out=out)
    else:
        narrow = scratch("factored-adam", tuple(out.shape), left_TR.dtype, out.device)
        out.copy_(torch.mm(left_TR, right_RN, out=narrow))


def _reciprocal_root_(v: Tensor, eps: float, eps_in_sqrt: bool) -> Tensor:
    """V <- 1 / sqrt(v + eps), or 1 / (sqrt(v) + eps)."""
    return v.add_(eps).rsqrt_() if eps_in_sqrt else v.sqrt_().add_(eps).reciprocal_()


class Adam(Update):
    """Adam on the coefficient of the estimate g, entry by entry:

        m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2,   W -= lr * m / sqrt(v + eps).

    For dense directions this is Adam on the weight, for CP directions Adam on the temporal coefficients. At a refresh
    of the fixed factors, m is carried over to the new factors; v is kept, because it is about kappa^2 for any factors.

    Args:
        betas: decay rates (beta1, beta2) of the moments.
        eps: smoothing term.
        eps_in_sqrt: True: m / sqrt(v + eps), as in Algorithm 1; False: m / (sqrt(v) + eps), as in torch.
        bias_correction: whether m is divided by 1 - beta1^t and v by 1 - beta2^t, as in torch; not in Algorithm 1.
    """

    takes: tuple[type[Direction], ...] = (Dense, CP, Core, LowRank)

    def __init__(self, betas: tuple[float, float], eps: float, *, eps_in_sqrt: bool, bias_correction: bool) -> None:
        check_average("betas", betas, eps)
        self.betas = betas
        self.eps = eps
        self.eps_in_sqrt = eps_in_sqrt
        self.bias_correction = bias_correction

    def init(self, estimate: ParameterEstimate, moving: PerturbedParameter) -> State:
        return {name: zeros_like_coefficient(estimate, moving) for name in ("exp_avg", "exp_avg_sq")}

    def step(self, moving: PerturbedParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
        self.carry_over(estimate.direction, state)
        for rows, grad in estimate.tiles():
            exp_avg, exp_avg_sq = state["exp_avg"][rows], state["exp_avg_sq"][rows]
            self.average_(exp_avg, exp_avg_sq, grad)
            moving.add_(estimate.direction, rows, self.ratio(exp_avg, exp_avg_sq, estimate.count), -lr)

    def average_(self, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor) -> None:
        """Updates both moments with `grad`, in place."""
        beta1, beta2 = self.betas
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def corrections(self, step: int) -> tuple[float, float]:
        """Returns what bias correction divides m and v by; 1 if it is not configured."""
        if not self.bias_correction:
            return 1.0, 1.0
        beta1, beta2 = self.betas
        return 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)

    def ratio(self, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> Tensor:
        """Returns the step m / sqrt(v + eps) or m / (sqrt(v) + eps), with bias correction if configured.

        It is in a scratch buffer that the next call overwrites.
        """
        first, second = self.corrections(step)
        out = scratch("adam", tuple(exp_avg.shape), exp_avg.dtype, exp_avg.device)
        torch.div(exp_avg_sq, second, out=out)
        return _reciprocal_root_(out, self.eps, self.eps_in_sqrt).mul_(exp_avg).div_(first)

    def divisor(self, kappa_sq: float, num_directions: int) -> float:
        # the divisor of the largest step: without bias correction m grows before v does, so early steps are larger
        (beta1, beta2), mean_sq = self.betas, kappa_sq / num_directions
        start = 1.0 if self.bias_correction else min((1 - beta2**t) ** 0.5 / (1 - beta1**t) for t in range(1, 1000))
        return float(start * ((mean_sq + self.eps) ** 0.5 if self.eps_in_sqrt else mean_sq**0.5 + self.eps))


class FactoredAdam(Adam):
    """TeZO-Adam (Algorithm 1, Eq. 8): both moments are stored as temporal factors with r numbers each:

        M = sum_s tau_M,s u_s v_s^T,   V = sum_s tau_V,s u_s^2 (v_s^2)^T,   W -= lr * M / sqrt(V + eps).

    The division is entry by entry, so the step is dense: one pass over the weight, tile by tile. 1-D parameters have
    dense directions and take `Adam` steps with the same settings.
    """

    takes: tuple[type[Direction], ...] = (Dense, CP)
    writes_weight = True

    def step(self, moving: PerturbedParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
        point = estimate.direction
        if not isinstance(point, CP):
            super().step(moving, estimate, state, lr)
            return
        tau_m_R, tau_v_R = state["exp_avg"], state["exp_avg_sq"]
        for _, grad in estimate.tiles():
            self.average_(tau_m_R, tau_v_R, grad)
        first, second = self.corrections(estimate.count)
        factors = AdamFactors(
            point.u_MR, point.v_NR, tau_m_R / first, tau_v_R / second, self.eps, eps_in_sqrt=self.eps_in_sqrt
        )
        factored_adam_(moving.weight, factors, lr, moving.rounding)
