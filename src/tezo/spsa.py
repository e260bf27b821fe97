"""Simultaneous perturbation: two losses say how steep the objective is along a random direction (Eq. 2)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from tezo.directions import Direction, Tile

Closure = Callable[[], Tensor | float]


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


def two_point(closure: Closure, shift: Callable[[float], None], rho: float) -> Probe:
    """Evaluates `closure` at +rho and -rho along a direction; leaves the parameters where they were.

    Args:
        closure: returns the objective as a scalar; it need not be differentiable.
        shift: lets the model compute with W + scale * Z, for the scale it is given.
        rho: perturbation scale.
    """
    try:
        shift(rho)
        loss_plus = float(closure())
        shift(-rho)
        loss_minus = float(closure())
    finally:
        shift(0.0)
    return Probe(loss_plus, loss_minus, (loss_plus - loss_minus) / (2 * rho))


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
        count = len(self.directions)
        for parts in zip(*(direction.tiles() for direction in self.directions), strict=True):
            terms = [values * (kappa / count) for (_, values), kappa in zip(parts, self.projected_grads, strict=True)]
            yield parts[0][0], sum(terms[1:], start=terms[0])
