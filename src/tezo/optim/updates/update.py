"""What an update rule is: it steps one parameter along an estimate of its gradient."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from tezo.directions.spaces import Direction, FixedFactors
from tezo.errors import RequestError
from tezo.estimators.estimate import ParameterEstimate
from tezo.forward import MovingParameter

State = dict[str, Tensor]


class Update(ABC):
    """A rule for stepping along estimates.

    Attributes:
        takes: the types of direction it is defined for; the optimizer refuses the others at once.
        writes_weight: whether it writes stored tensors even of parameters that move in the forward pass.
    """

    takes: tuple[type[Direction], ...] = (Direction,)
    writes_weight = False

    @abstractmethod
    def init(self, estimate: ParameterEstimate, moving: MovingParameter) -> State:
        """The state before the first step."""

    @abstractmethod
    def step(self, moving: MovingParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
        """W_t -> W_t+1; `state` is changed in place."""

    def carry_over(self, direction: Direction, state: State) -> None:
        """Expresses moments in the space of `direction`, where its fixed factors are new; here there are none."""
        del direction, state

    def divisor(self, kappa_sq: float, num_directions: int) -> float:
        """What a step divides the estimate by, at its least, which sets the scale of learning rates; here nothing.

        Args:
            kappa_sq: mean square of projected gradients.
            num_directions: q, averaged in a step: a coefficient of the estimate has the mean square kappa_sq / q.
        """
        del kappa_sq, num_directions
        return 1.0


def check_average(key: str, betas: Sequence[float], eps: float = 0.0) -> None:
    """An error where a running mean could not be one, or a smoothing term would be taken away."""
    for beta in betas:
        if not 0 <= beta < 1:
            raise RequestError(f"method.{key} has {beta}; it must be at least 0 and below 1.")
    if not 0 <= eps < math.inf:
        raise RequestError(f"method.eps is {eps}; it must be finite and not negative.")


def zeros_like_coefficient(estimate: ParameterEstimate, moving: MovingParameter) -> Tensor:
    """Zeros of the shape, dtype and device of the estimate's coefficient."""
    direction, target = estimate.direction, moving.target
    if isinstance(direction, FixedFactors):
        return torch.zeros_like(direction.coefficient)
    return torch.zeros(target.stored_shape, dtype=target.state_dtype, device=target.device)
