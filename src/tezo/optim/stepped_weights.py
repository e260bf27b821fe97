"""The tensors that a first-order step changes in float32: the weight itself, a copy of it, or its values for one step.

A float16 or bfloat16 weight cannot take the steps itself: an update is smaller than the spacing of its values.
"""

import torch
from torch import Tensor, nn

from tezo.directions.targets import Target
from tezo.numerics import rounding
from tezo.numerics.random import generator


class SteppedWeight:
    """A weight in float32 or wider, which takes the steps itself.

    Args:
        target: the weight.
        stepped: the tensor that the optimizer steps; None: the weight itself.

    Attributes:
        stepped: as above.
    """

    takes_memory = True
    """Whether `stepped` has its values between steps."""

    def __init__(self, target: Target, stepped: Tensor | None = None) -> None:
        self.target = target
        self.stepped = target.parameter if stepped is None else nn.Parameter(stepped)

    def copy(self) -> Tensor | None:
        """The float32 values that the weight is rounded from; not a copy of them. None: there are none."""
        return None

    def load(self) -> None:
        """Called after the weight was loaded."""

    def begin_step(self) -> None:
        """Moves the gradient of the weight, and its values if they are not there, to `stepped`."""

    def end_step(self, seed: int, step: int) -> None:
        """Writes `stepped` to the weight and drops the gradient; rounding is a function of (seed, step, name)."""
        del seed, step
        self.drop_gradient()

    def drop_gradient(self) -> None:
        """Frees the gradients of the weight and of `stepped`."""
        self.stepped.grad = self.target.parameter.grad = None


class MasterWeight(SteppedWeight):
    """A float32 copy of a weight in half precision; the weight is the copy, rounded to nearest."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, target.parameter.detach().float())

    def copy(self) -> Tensor:
        return self.stepped.data

    def load(self) -> None:
        self.stepped.data.copy_(self.target.parameter.data)

    def begin_step(self) -> None:
        gradient = self.target.parameter.grad
        self.stepped.grad = None if gradient is None else gradient.float()

    def end_step(self, seed: int, step: int) -> None:
        super().end_step(seed, step)
        self.target.parameter.data.copy_(self.stepped.data)


class RoundedWeight(SteppedWeight):
    """The values of a weight in half precision for the length of a step; the weight is rounded stochastically."""

    takes_memory = False

    def __init__(self, target: Target) -> None:
        super().__init__(target, torch.empty(0, device=target.device))

    def begin_step(self) -> None:
        gradient = self.target.parameter.grad
        if gradient is not None:
            self.stepped.data = self.target.parameter.detach().float()
            self.stepped.grad = gradient.float()

    def end_step(self, seed: int, step: int) -> None:
        if self.stepped.grad is not None:
            draw = generator(self.target.device, seed=seed, step=step, name=self.target.name, role="rounding")
            rounding.store_(self.target.parameter.data, self.stepped.data, draw)
        super().end_step(seed, step)
        self.stepped.data = torch.empty(0, device=self.target.device)


def stepped_weight(target: Target, *, master: bool) -> SteppedWeight:
    """The stepped tensor of a weight.

    Args:
        target: the weight.
        master: whether a weight in half precision has a float32 copy.
    """
    if target.parameter.element_size() >= torch.float32.itemsize:
        return SteppedWeight(target)
    return MasterWeight(target) if master else RoundedWeight(target)
