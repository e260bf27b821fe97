"""How perturbations reach the model: in the forward pass, in place, or in place with an exact copy."""

from tezo.apply.base import MovingParameter as MovingParameter
from tezo.apply.base import require_writable as require_writable
from tezo.apply.in_forward import InForward as InForward
from tezo.apply.in_place import FromCopy as FromCopy
from tezo.apply.in_place import InPlace as InPlace
from tezo.directions import Direction, FixedFactors
from tezo.params import Target


def moving_parameter(target: Target, direction: Direction, *, in_forward: bool = True) -> MovingParameter:
    """The way `target` is moved along directions of `direction`'s type.

    Args:
        target: the parameter.
        direction: one that the method draws for it.
        in_forward: False moves low-rank directions in place too, as published code does (for comparison).
    """
    if not target.is_matrix:
        return FromCopy(target)
    if in_forward and isinstance(direction, FixedFactors) and target.in_forward:
        return InForward(target)
    return InPlace(target)
