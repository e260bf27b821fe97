"""In-place perturbation: directions are added to the stored tensor and subtracted after the evaluations."""

from collections.abc import Sequence

from torch import Tensor

from tezo.directions.perturbation import DrawKey
from tezo.directions.spaces import Direction, FixedFactors
from tezo.directions.targets import Target
from tezo.forward.perturbed_parameter import PerturbedParameter, Shift, check_between_steps, require_writable


class InPlace(PerturbedParameter):
    """A matrix perturbed in the stored tensor: W + rho Z, W - rho Z, W, each by one add.

    It is not exact: W + a - 2a + a differs from W by rounding, slightly in float32, much more in half precision.
    """

    way = "in place"
    was_called = in_storage = True

    def __init__(self, target: Target) -> None:
        require_writable(target, "this perturbation")
        super().__init__(target)
        self._applied: Shift | None = None

    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        new = shifts[0] if shifts else None
        if new is not None and self._applied is not None and new.direction is self._applied.direction:
            new.direction.add_to_(self.weight, new.scale - self._applied.scale)
        else:
            for shift, sign in ((self._applied, -1), (new, 1)):
                if shift is not None:
                    shift.direction.add_to_(self.weight, sign * shift.scale)
        self._applied = new

    def merged(self) -> None:
        check_between_steps("state_dict", self.target, self._applied is not None)

    def replaced(self) -> None:
        check_between_steps("load_state_dict", self.target, self._applied is not None)

    def add_(self, direction: Direction, rows: slice, delta: Tensor, alpha: float) -> None:
        if isinstance(direction, FixedFactors):
            left_MR, right_NR = direction.with_coefficient(delta.to(direction.v_NR.dtype)).factors()
            for tile in self.row_tiles():
                self.write_(tile, (left_MR[tile] @ right_NR.T).to(self.target.state_dtype), alpha)
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
        self._perturbed = False

    def begin(self, direction: Direction, key: DrawKey) -> None:
        super().begin(direction, key)
        self._copy = self.weight.clone()

    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        self.weight.copy_(self._copy)
        self._perturbed = bool(shifts)
        for shift in shifts:
            shift.direction.add_to_(self.weight, shift.scale)

    def merged(self) -> None:
        check_between_steps("state_dict", self.target, self._perturbed)

    def replaced(self) -> None:
        check_between_steps("load_state_dict", self.target, self._perturbed)
