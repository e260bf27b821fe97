"""Adam on coefficients, and TeZO-Adam, which applies factored moments to the whole matrix."""

import torch
from torch import Tensor

from tezo.directions.spaces import CP, Core, Dense, Direction, FixedFactors, LowRank
from tezo.estimators.estimate import ParameterEstimate
from tezo.forward import MovingParameter
from tezo.numerics.adam_factors import AdamFactors
from tezo.numerics.factored_adam import factored_adam_
from tezo.numerics.scratch import scratch
from tezo.optim.updates.update import State, Update, check_average, zeros_like_coefficient


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

    def init(self, estimate: ParameterEstimate, moving: MovingParameter) -> State:
        return {name: zeros_like_coefficient(estimate, moving) for name in ("exp_avg", "exp_avg_sq")}

    def carry_over(self, direction: Direction, state: State) -> None:
        if isinstance(direction, FixedFactors):
            state["exp_avg"] = direction.carry_over(state["exp_avg"])

    def step(self, moving: MovingParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
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

    def corrected(self, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Both moments as new tensors, with bias correction if configured."""
        first, second = self._corrections(step)
        return exp_avg / first, exp_avg_sq / second

    def _corrections(self, step: int) -> tuple[float, float]:
        """What bias correction divides m and v by."""
        if not self.bias_correction:
            return 1.0, 1.0
        beta1, beta2 = self.betas
        return 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)

    def ratio(self, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> Tensor:
        """The step m / sqrt(v + eps) or m / (sqrt(v) + eps), with bias correction if configured.

        It is in a scratch buffer that the next call overwrites.
        """
        first, second = self._corrections(step)
        out = scratch("adam", tuple(exp_avg.shape), exp_avg.dtype, exp_avg.device)
        torch.div(exp_avg_sq, second, out=out)
        if self.eps_in_sqrt:
            out.add_(self.eps).rsqrt_()
        else:
            out.sqrt_().add_(self.eps).reciprocal_()
        return out.mul_(exp_avg).div_(first)

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

    def step(self, moving: MovingParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
        point = estimate.direction
        if not isinstance(point, CP):
            super().step(moving, estimate, state, lr)
            return
        tau_exp_avg, tau_exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        for _, grad in estimate.tiles():
            self.average_(tau_exp_avg, tau_exp_avg_sq, grad)
        tau_m, tau_v = self.corrected(tau_exp_avg, tau_exp_avg_sq, estimate.count)
        factors = AdamFactors(point.u_MR, point.v_NR, tau_m, tau_v, self.eps, self.eps_in_sqrt)
        factored_adam_(moving.weight, factors, lr, moving.rounding)
