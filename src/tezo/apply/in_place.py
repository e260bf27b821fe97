"""Directions added to the stored tensor itself, and taken back after the two evaluations."""

from torch import Tensor

from tezo.apply.base import MovingParameter, require_writable
from tezo.directions import Direction, FixedFactors
from tezo.params import Target
from tezo.perturbations import Moment


class InPlace(MovingParameter):
    """A matrix moved where it lies: W + rho Z, W - rho Z, W, each by one add.

    What it costs is exactness: W + a - 2a + a differs from W by rounding, little in float32, much more in
    half precision.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        require_writable(target, "this perturbation")
        self._scale = 0.0

    def shift(self, direction: Direction, scale: float) -> None:
        if scale != self._scale:
            direction.add_to_(self.weight, scale - self._scale)
        self._scale = scale

    def add_(self, direction: Direction, rows: slice, delta: Tensor, alpha: float) -> None:
        if isinstance(direction, FixedFactors):
            left_MR, right_NR = direction.with_coefficient(delta.to(direction.v_NR.dtype)).factors()
            for tile in self.row_tiles():
                self.write_(tile, (left_MR[tile] @ right_NR.T).to(self.target.state_dtype), alpha)
        else:
            self.write_(rows, delta, alpha)


class FromCopy(MovingParameter):
    """A vector, perturbed in place and put back from a copy, exactly."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        require_writable(target, "training 1-D parameters")
        self._copy = target.parameter.data.new_empty(0)

    def begin(self, direction: Direction, moment: Moment) -> None:
        super().begin(direction, moment)
        self._copy = self.weight.clone()

    def shift(self, direction: Direction, scale: float) -> None:
        self.weight.copy_(self._copy)
        if scale:
            direction.add_to_(self.weight, scale)

    def add_(self, direction: Direction, rows: slice, delta: Tensor, alpha: float) -> None:
        del direction
        self.write_(rows, delta, alpha)
