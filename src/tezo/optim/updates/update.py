"""The interface of update rules: an update rule steps one parameter along an estimate of its gradient."""

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
        takes: supported types of direction; the optimizer's constructor refuses other types.
        writes_weight: whether it writes the stored tensor of parameters that are perturbed in the forward pass.
    """

    takes: tuple[type[Direction], ...] = (Direction,)
    writes_weight = False

    @abstractmethod
    def init(self, estimate: ParameterEstimate, moving: MovingParameter) -> State:
        """The state before the first step."""

    @abstractmethod
    def step(self, moving: MovingParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
        """Updates the parameter, W_t -> W_t+1, and `state` in place."""

    def carry_over(self, direction: Direction, state: State) -> None:
        """Projects moments, in place, onto the space of `direction` if its fixed factors are new; here no moments."""
        del direction, state

    def divisor(self, kappa_sq: float, num_directions: int) -> float:
        """Smallest number by which a step divides the estimate; it scales the learning rate. Here 1.

        Args:
            kappa_sq: mean square of the projected gradients.
            num_directions: q, the directions averaged in a step; the estimate's entries have mean square kappa_sq / q.
        """
        del kappa_sq, num_directions
        return 1.0


def check_average(key: str, betas: Sequence[float], eps: float = 0.0) -> None:
    """Raises a `RequestError` unless all betas are in [0, 1) and `eps` is finite and not negative."""
    for beta in betas:
        if not 0 <= beta < 1:
            raise RequestError(f"method.{key}: {beta} is out of range; it must be at least 0 and below 1.")
    if not 0 <= eps < math.inf:
        raise RequestError(f"method.eps is {eps}; it must be finite and not negative.")


def zeros_like_coefficient(estimate: ParameterEstimate, moving: MovingParameter) -> Tensor:
    """Zeros of the shape, dtype and device of the estimate's coefficient."""
    direction, target = estimate.direction, moving.target
    if isinstance(direction, FixedFactors):
        return torch.zeros_like(direction.coefficient)
    return torch.zeros(target.stored_shape, dtype=target.state_dtype, device=target.device)
