"""Simultaneous perturbation: two losses say how steep the objective is along a random direction (Eq. 2)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tezo.directions import Direction, Tile
from tezo.errors import RequestError
from tezo.ranks import Ranks

Closure = Callable[[], Tensor | float]

MOST_DIRECTIONS = 1 << 12
"""Of a step; a step log may claim no more of itself."""


@runtime_checkable
class BlockClosure(Protocol):
    """An objective that one forward pass can evaluate for several models: its rows repeated, a block for each.

    `tezo.objectives` makes them. Called without arguments it is an ordinary closure.
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


def two_point(
    closure: Closure,
    show: Callable[[Sequence[tuple[int, float]]], None],
    rho: float,
    directions: Sequence[int],
    copies: int,
) -> tuple[Probe, ...]:
    """Evaluates `closure` at +rho and -rho along each direction; leaves the parameters where they were.

    Args:
        closure: returns the objective as a scalar; it need not be differentiable.
        show: lets the model compute with W + scale * Z_i, for each (i, scale) it is given one block; with none, W.
        rho: perturbation scale.
        directions: the indices of those to be evaluated.
        copies: how many models share a forward pass; above 1, `closure` must be a `BlockClosure`.
    """
    points = [(index, sign * rho) for index in directions for sign in (1, -1)]
    losses: list[float] = []
    try:
        for start in range(0, len(points), copies):
            part = points[start : start + copies]
            show(part)
            losses += evaluate(closure, len(part))
    finally:
        show([])
    pairs = zip(losses[::2], losses[1::2], strict=True)
    return tuple(Probe(plus, minus, (plus - minus) / (2 * rho)) for plus, minus in pairs)


def of_all_ranks(probes: tuple[Probe, ...], ranks: Ranks) -> tuple[Probe, ...]:
    """The probes of every rank's own directions, of which each has as many: those of its first, then of its second."""
    if ranks.size == 1:
        return probes
    found = ranks.gather([x for p in probes for x in (p.loss_plus, p.loss_minus, p.projected_grad)])
    of_rank = [[Probe(*values[i : i + 3]) for i in range(0, len(values), 3)] for values in found]
    return tuple(probe for of_one_turn in zip(*of_rank, strict=True) for probe in of_one_turn)


TOKENS_OF_A_PASS = 1024
"""Up to so many tokens, several models share a pass: below it a pass is bound by reading the weights, above it by
arithmetic. docs/cost.md has both measured, as J2 and N2."""

TOKENS_OF_A_DENSE_PASS = 8192
"""The same where dense noise is drawn once for all the models of a pass; the bound is for the activations' sake."""


def copies_of_a_pass(closure: Closure, directions: int, *, dense: bool) -> int:
    """How many models are evaluated in one forward pass: 1, or an even number, so that signs stay together.

    Args:
        closure: a plain one is evaluated once for every model.
        directions: of a step; two models each.
        dense: whether sharing a pass saves draws of dense noise.
    """
    if not isinstance(closure, BlockClosure):
        return 1
    fitting = (TOKENS_OF_A_DENSE_PASS if dense else TOKENS_OF_A_PASS) // max(1, closure.tokens)
    return max(1, min(2 * directions, fitting - fitting % 2))


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
