"""Update rules, which step one parameter along an estimate of its gradient; TeZO-Adam's is in `factored_adam`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tezo.directions.perturbation import MomentumNoise
from tezo.directions.scratch import scratch
from tezo.directions.spaces import CP, Core, Dense, Direction, FixedFactors, LowRank, row_tiles
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.optim.estimators.estimate import Estimator, ParameterEstimate
from tezo.system.errors import RequestError

Moments = dict[str, Tensor]
"""Key -> tensor of the state of an update rule, for one parameter; torch's names, such as exp_avg."""


class Changeable(Protocol):
    """The object that an update rule changes: a parameter, or the coefficients of several side by side."""

    def add_(self, direction: Direction, rows: slice, delta: Tensor, alpha: float) -> None:
        """See `PerturbedParameter.add_`."""


class Update(ABC):
    """A rule for stepping along estimates.

    Attributes:
        takes: supported types of direction; the optimizer's constructor refuses other types.
        writes_weight: whether it writes the stored tensor of parameters that are perturbed in the forward pass.
    """

    takes: tuple[type[Direction], ...] = (Direction,)
    writes_weight = False

    def init(self, estimate: ParameterEstimate, parameter: PerturbedParameter) -> Moments:
        """Returns the state before the first step; here empty."""
        del estimate, parameter
        return {}

    @abstractmethod
    def step(self, parameter: PerturbedParameter, estimate: ParameterEstimate, state: Moments, lr: float) -> None:
        """Updates the parameter, W_t -> W_t+1, and `state` in place."""

    def carry_over(self, direction: Direction, state: Moments) -> None:
        """Projects the first moment onto the space of `direction`, in place, if its fixed factors are new."""
        if isinstance(direction, FixedFactors) and "exp_avg" in state:
            state["exp_avg"] = direction.carry_over(state["exp_avg"])

    def divisor(self, kappa_sq: float, num_directions: int) -> float:
        """Returns the smallest number by which a step divides the estimate; it scales the learning rate. Here 1.

        Args:
            kappa_sq: mean square of the projected gradients.
            num_directions: q, the directions averaged in a step; the estimate's entries have mean square kappa_sq / q.
        """
        del kappa_sq, num_directions
        return 1.0


class Elementwise(Update):
    """A rule whose step treats each entry of a coefficient, and of the moments, by itself.

    Unless it writes weights, the coefficients of several parameters can be stepped as one, see `tezo.optim.stepping`.
    """

    @abstractmethod
    def step(self, parameter: Changeable, estimate: ParameterEstimate, state: Moments, lr: float) -> None: ...


def check_average(key: str, betas: Sequence[float], eps: float = 1.0) -> None:
    """Raises a `RequestError` unless all betas are in [0, 1) and `eps` is finite and positive: 0 / 0 is no step."""
    for beta in betas:
        if not 0 <= beta < 1:
            raise RequestError(f"method.{key}: {beta} is out of range; it must be at least 0 and below 1.")
    if not 0 < eps < math.inf:
        raise RequestError(f"method.eps is {eps}; it must be finite and positive.")


def zeros_like_coefficient(estimate: ParameterEstimate, parameter: PerturbedParameter) -> Tensor:
    """Returns zeros of the shape, dtype and device of the estimate's coefficient."""
    direction, target = estimate.direction, parameter.target
    if isinstance(direction, FixedFactors):
        return torch.zeros_like(direction.coefficient)
    return torch.zeros(target.stored_shape, dtype=target.state_dtype, device=target.device)


class SGD(Elementwise):
    """W_t+1 = W_t - lr * g, with g the estimate; for every type of direction."""

    def step(self, parameter: Changeable, estimate: ParameterEstimate, state: Moments, lr: float) -> None:
        del state
        for rows, grad in estimate.tiles():
            parameter.add_(estimate.direction, rows, grad, -lr)


class Momentum(Elementwise):
    """m = beta m + (1 - beta) g, W -= lr * m, on the coefficient of any type of direction.

    m is tau_M in TeZO-m (on tau) and M in LOZO-m (on U). At a refresh it is carried over to the new factors.
    """

    def __init__(self, beta: float) -> None:
        check_average("beta", (beta,))
        self.beta = beta

    def init(self, estimate: ParameterEstimate, parameter: PerturbedParameter) -> Moments:
        return {"exp_avg": zeros_like_coefficient(estimate, parameter)}

    def step(self, parameter: Changeable, estimate: ParameterEstimate, state: Moments, lr: float) -> None:
        direction = estimate.direction
        self.carry_over(direction, state)
        for rows, grad in estimate.tiles():
            exp_avg = state["exp_avg"][rows]
            exp_avg.mul_(self.beta).add_(grad, alpha=1 - self.beta)
            parameter.add_(direction, rows, exp_avg, -lr)


class AdaMU(Update):
    """The update of ZO-AdaMU for the perturbation z = beta1 z1 + (1 - beta1) z2 and the projected gradient kappa:

        v = beta2 z1^2 + (1 - beta2) z2^2,   W -= lr * kappa z / sqrt(v + eps).

    z is stored as "exp_avg"; it is the history of the next step.
    """

    takes = (MomentumNoise,)

    def __init__(self, eps: float) -> None:
        check_average("eps", (), eps)
        self.eps = eps

    def init(self, estimate: ParameterEstimate, parameter: PerturbedParameter) -> Moments:
        return {"exp_avg": zeros_like_coefficient(estimate, parameter)}

    def step(self, parameter: PerturbedParameter, estimate: ParameterEstimate, state: Moments, lr: float) -> None:
        noise, (kappa,) = estimate.direction, estimate.projected_grads
        assert isinstance(noise, MomentumNoise)
        for rows in row_tiles(noise.shape, noise.device):
            z1, z2 = noise.parts(rows)
            z = noise.beta1 * z1 + (1 - noise.beta1) * z2
            v = noise.beta2 * z1.square() + (1 - noise.beta2) * z2.square()
            parameter.add_(noise, rows, kappa * z / torch.sqrt(v + self.eps), -lr)
            state["exp_avg"][rows] = z


def reciprocal_root_(v: Tensor, eps: float, eps_in_sqrt: bool) -> Tensor:
    """V <- 1 / sqrt(v + eps), or 1 / (sqrt(v) + eps)."""
    return v.add_(eps).rsqrt_() if eps_in_sqrt else v.sqrt_().add_(eps).reciprocal_()


class Adam(Elementwise):
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

    def init(self, estimate: ParameterEstimate, parameter: PerturbedParameter) -> Moments:
        return {name: zeros_like_coefficient(estimate, parameter) for name in ("exp_avg", "exp_avg_sq")}

    def step(self, parameter: Changeable, estimate: ParameterEstimate, state: Moments, lr: float) -> None:
        self.carry_over(estimate.direction, state)
        for rows, grad in estimate.tiles():
            exp_avg, exp_avg_sq = state["exp_avg"][rows], state["exp_avg_sq"][rows]
            self.average_(exp_avg, exp_avg_sq, grad)
            parameter.add_(estimate.direction, rows, self.ratio(exp_avg, exp_avg_sq, estimate.count), -lr)

    def average_(self, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor) -> None:
        """Updates both moments with `grad`, in place."""
        beta1, beta2 = self.betas
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def corrections(self, step: int) -> tuple[float, float]:
        """Returns the divisors of m and v in bias correction; 1 if it is not configured."""
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
        return reciprocal_root_(out, self.eps, self.eps_in_sqrt).mul_(exp_avg).div_(first)

    def divisor(self, kappa_sq: float, num_directions: int) -> float:
        # the divisor of the largest step: without bias correction m grows before v does, so early steps are larger
        (beta1, beta2), mean_sq = self.betas, kappa_sq / num_directions
        start = 1.0 if self.bias_correction else min((1 - beta2**t) ** 0.5 / (1 - beta1**t) for t in range(1, 1000))
        return float(start * ((mean_sq + self.eps) ** 0.5 if self.eps_in_sqrt else mean_sq**0.5 + self.eps))


@dataclass(frozen=True)
class StepRule:
    """How a step is taken.

    Attributes:
        estimator: estimates the gradient.
        update: steps along the estimate.
        lr_scale: factor of the optimizer's learning rate for these steps.
        restarts: whether the moments of `update` are dropped by a step of another rule.
    """

    estimator: Estimator
    update: Update
    lr_scale: float = 1.0
    restarts: bool = False
