"""TeZO-Adam, which applies factored moments to the whole matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tezo.directions.products import multiplies_bfloat16
from tezo.directions.scratch import row_slices, scratch
from tezo.directions.spaces import CP, Dense, Direction
from tezo.forward import rounding
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.optim.estimators.estimate import ParameterEstimate
from tezo.optim.updates import Adam, Changeable, Moments, reciprocal_root_

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
    """W -= lr * step, in place, a few rows at a time in reused buffers.

    Half-precision weights are rounded stochastically.
    The products are computed in the dtype of the temporal coefficients, or in bfloat16 where the weight is bfloat16 and
    the CPU has instructions for it: both moments then have relative errors of about 2^-8.

    Args:
        weight_MN: the weight, in any floating dtype and with any strides.
        factors: both moments, on the weight's device.
        lr: learning rate.
        draw: generator for the rounding, on the weight's device.
    """
    if weight_MN.stride(0) < weight_MN.stride(1):  # process W^T, whose rows are contiguous
        weight_MN, factors = weight_MN.T, factors.transposed
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
        reciprocal_root_(root, factors.eps, factors.eps_in_sqrt)
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


class FactoredAdam(Adam):
    """TeZO-Adam (Algorithm 1, Eq. 8): both moments are stored as temporal factors with r numbers each:

        M = sum_s tau_M,s u_s v_s^T,   V = sum_s tau_V,s u_s^2 (v_s^2)^T,   W -= lr * M / sqrt(V + eps).

    The division is entry by entry, so the step is dense: one pass over the weight, tile by tile. 1-D parameters have
    dense directions and take `Adam` steps with the same settings.
    """

    takes: tuple[type[Direction], ...] = (Dense, CP)
    writes_weight = True

    def step(self, parameter: Changeable, estimate: ParameterEstimate, state: Moments, lr: float) -> None:
        point = estimate.direction
        if not isinstance(point, CP):
            super().step(parameter, estimate, state, lr)
            return
        assert isinstance(parameter, PerturbedParameter)  # it writes weights, so that it has one at a time
        tau_m_R, tau_v_R = state["exp_avg"], state["exp_avg_sq"]
        for _, grad in estimate.tiles():
            self.average_(tau_m_R, tau_v_R, grad)
        first, second = self.corrections(estimate.count)
        factors = AdamFactors(
            point.u_MR, point.v_NR, tau_m_R / first, tau_v_R / second, self.eps, eps_in_sqrt=self.eps_in_sqrt
        )
        factored_adam_(parameter.weight, factors, lr, parameter.rounding)
