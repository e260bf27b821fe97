"""In-place perturbation: directions are added to the stored tensor and subtracted after the evaluations."""

from collections.abc import Sequence

from torch import Tensor

from tezo.directions.spaces import Direction, FixedFactors, row_tiles
from tezo.directions.targets import Target
from tezo.forward.perturbed_parameter import PerturbedParameter, Shift, require_writable


class InPlace(PerturbedParameter):
    """A matrix perturbed in the stored tensor: W + rho Z, W - rho Z, W, each by one add.

    It is not exact: W + a - 2a + a differs from W by rounding, slightly in float32, much more in half precision.
    """

    way = "in place"
    was_called = in_storage = True

    def __init__(self, target: Target) -> None:
        require_writable(target, "this perturbation")
        super().__init__(target)

    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        old, new = self.shifts[:1], tuple(shifts[:1])
        if old and new and new[0].direction is old[0].direction:
            new[0].direction.add_to_(self.weight, new[0].scale - old[0].scale)
        else:
            for shift, sign in (*((shift, -1) for shift in old), *((shift, 1) for shift in new)):
                shift.direction.add_to_(self.weight, sign * shift.scale)
        self.shifts = new

    def add_(self, direction: Direction, rows: slice, delta: Tensor, alpha: float) -> None:
        if isinstance(direction, FixedFactors):
            left_MR, right_NR = direction.with_coefficient(delta.to(direction.v_NR.dtype)).factors()
            for tile in row_tiles(self.target.stored_shape, self.weight.device):
                super().add_(direction, tile, (left_MR[tile] @ right_NR.T).to(self.target.state_dtype), alpha)
        else:
            super().add_(direction, rows, delta, alpha)


class FromCopy(PerturbedParameter):
    """A vector that cannot be perturbed by hooks: perturbed in place and restored exactly from a copy."""

    way = "from copy"
    was_called = in_storage = True

    def __init__(self, target: Target) -> None:
        require_writable(target, "training 1-D parameters")
        super().__init__(target)
        self._copy = target.parameter.data.new_empty(0)

    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        if self.shifts:
            self.weight.copy_(self._copy)
        else:
            self._copy = self.weight.clone()
        self.shifts = tuple(shifts)
        for shift in shifts:
            shift.direction.add_to_(self.weight, shift.scale)
