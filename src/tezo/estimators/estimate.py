"""What an estimator measures, and the estimate of the gradient that follows."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tezo.directions.spaces import Direction, Tile
from tezo.errors import RequestError

Closure = Callable[[], Tensor | float]

MOST_DIRECTIONS = 1 << 12
"""Of a step; a step log may claim no more of itself."""


@runtime_checkable
class BlockClosure(Protocol):
    """An objective that one forward pass can evaluate for several models: its rows repeated, a block for each.

    `tezo.tasks.objectives` makes them. Called without arguments it is an ordinary closure.
    """

    @property
    def tokens(self) -> int:
        """The most tokens, padding included, that a forward pass has for one model."""

    def __call__(self) -> Tensor | float:
        """The loss, for one model."""

    def losses(self, copies: int) -> Tensor:
        """(copies,): the loss of every model."""


@dataclass(frozen=True)
class Probe:
    """What one direction said.

    Attributes:
        loss_plus: f(W + rho Z).
        loss_minus: f(W - rho Z).
        projected_grad: kappa = (loss_plus - loss_minus) / (2 rho), in float64.
    """

    loss_plus: float
    loss_minus: float
    projected_grad: float

    @property
    def is_finite(self) -> bool:
        """Whether both losses are."""
        return math.isfinite(self.loss_plus) and math.isfinite(self.loss_minus)


@dataclass(frozen=True)
class StepRecord:
    """What the last step measured and did.

    Attributes:
        step: its number, from 0.
        loss: mean of all evaluations: the loss at W_t, for two-point estimates up to terms in rho squared.
        lr: the learning rate it was taken with.
        probes: one for each direction; none where a gradient was taken.
    """

    step: int
    loss: float
    lr: float
    probes: tuple[Probe, ...] = ()

    @property
    def projected_grads(self) -> tuple[float, ...]:
        """Kappa of each direction."""
        return tuple(probe.projected_grad for probe in self.probes)


def evaluate(closure: Closure, copies: int) -> list[float]:
    """The losses of the `copies` models that are shown."""
    if copies == 1:
        return [float(_fine(closure()))]
    assert isinstance(closure, BlockClosure)
    return [float(loss) for loss in _fine(closure.losses(copies)).tolist()]


def _fine(loss: Any) -> Any:
    """The loss, if numbers of its type lie close enough together to tell two points 2 rho apart."""
    if isinstance(loss, Tensor) and loss.dtype in (torch.bfloat16, torch.float16):
        raise RequestError(
            f"the closure's loss is {loss.dtype}, too coarse for the difference of two of them; compute it in "
            "float32, from logits.float() for one."
        )
    return loss


@dataclass(frozen=True)
class Estimate:
    """The zeroth-order gradient of one parameter: (1/q) sum_i kappa_i Z_i over the step's q directions.

    It lies in the space of its directions, so it is handed over as a coefficient.
    """

    directions: Sequence[Direction]
    projected_grads: Sequence[float]
    step: int

    @property
    def direction(self) -> Direction:
        """Any of the directions: all share type and fixed factors."""
        return self.directions[0]

    def tiles(self) -> Iterator[Tile]:
        """The coefficient of the estimate, in parts: (rows, values)."""
        factors = [kappa / len(self.directions) for kappa in self.projected_grads]
        tiles = [direction.tiles(factor) for direction, factor in zip(self.directions, factors, strict=True)]
        for (rows, estimate), *others in zip(*tiles, strict=True):
            for _, values in others:
                estimate.add_(values)
            yield rows, estimate
