"""What an estimator measures, and the estimate of the gradient that follows."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tezo.directions.spaces import Direction, Tile
from tezo.errors import RequestError

Closure = Callable[[], Tensor | float]

MOST_DIRECTIONS = 1 << 12
"""Bound on the directions of a step. A step log that claims more is refused."""

TWO_POINT, FEEDBACK, GRADIENT = "two-point", "feedback", "gradient"
"""Kinds of step: along random directions, along the error at the last hidden states, by backpropagation."""


@runtime_checkable
class BlockClosure(Protocol):
    """An objective that one forward pass can evaluate for several models: its rows repeated, one block per model.

    `tezo.tasks.objectives` makes them. Called without arguments it is an ordinary closure.
    """

    @property
    def tokens(self) -> int:
        """The largest number of tokens, padding included, that a forward pass has for one model."""

    def __call__(self) -> Tensor | float:
        """The loss, for one model."""

    def losses(self, copies: int) -> Tensor:
        """(copies,): the loss of every model."""


@dataclass(frozen=True)
class Probe:
    """What was measured along one direction.

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
        """Whether both losses are finite."""
        return math.isfinite(self.loss_plus) and math.isfinite(self.loss_minus)


@dataclass(frozen=True)
class StepRecord:
    """What a step measured and did.

    Attributes:
        step: its number, from 0.
        loss: mean of all evaluations: the loss at W_t, for two-point estimates up to terms in rho squared.
        lr: the learning rate it was taken with.
        probes: one for each direction; empty for steps without random directions.
        kind: of the estimator, such as `TWO_POINT`.
        forward_passes: evaluations of the closure that the step took.
    """

    step: int
    loss: float
    lr: float
    probes: tuple[Probe, ...] = ()
    kind: str = TWO_POINT
    forward_passes: int = 0

    @property
    def projected_grads(self) -> tuple[float, ...]:
        """Kappa of each direction."""
        return tuple(probe.projected_grad for probe in self.probes)


def evaluate(closure: Closure, copies: int) -> list[float]:
    """The losses of the `copies` models whose perturbations are set."""
    if copies == 1:
        return [float(_precise(closure()))]
    assert isinstance(closure, BlockClosure)
    return [float(loss) for loss in _precise(closure.losses(copies)).tolist()]


def _precise(loss: Any) -> Any:
    """The loss, if its data type can tell two points 2 rho apart."""
    if isinstance(loss, Tensor) and loss.dtype in (torch.bfloat16, torch.float16):
        raise RequestError(
            f"the closure's loss is {loss.dtype}, too coarse for the difference of two of them; compute it in "
            "float32, for example from logits.float()."
        )
    return loss


@dataclass(frozen=True)
class StepDraw:
    """The random directions of a step.

    Attributes:
        step: number of the step, from 0.
        count: estimates of the same kind that the update rule's moments have seen before.
        directions: parameter name -> its directions; all of a parameter share type and fixed factors.
    """

    step: int
    count: int
    directions: Mapping[str, Sequence[Direction]]


@dataclass(frozen=True)
class ParameterEstimate:
    """The zeroth-order gradient of one parameter: (1/q) sum_i kappa_i Z_i over the step's q directions.

    It lies in the space of its directions, so it is given as a coefficient.

    Attributes:
        directions: Z_1 ... Z_q.
        projected_grads: kappa_1 ... kappa_q.
        count: estimates of the same kind before this one, as Adam's bias correction counts them.
    """

    directions: Sequence[Direction]
    projected_grads: Sequence[float]
    count: int

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


@dataclass(frozen=True)
class Estimate:
    """An estimate of the gradient at W_t.

    Attributes:
        loss: mean of the losses that were evaluated.
        gradients: parameter name -> its estimate, for the parameters that the step moves.
        forward_passes: evaluations of the closure.
        probes: what was measured along random directions, if there were any.
    """

    loss: float
    gradients: Mapping[str, ParameterEstimate]
    forward_passes: int
    probes: tuple[Probe, ...] = ()
