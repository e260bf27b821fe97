"""How perturbations reach the model: in the forward pass, in place, or in place with an exact copy."""

from tezo.apply.base import MovingParameter as MovingParameter
from tezo.apply.base import Shift as Shift
from tezo.apply.base import require_writable as require_writable
from tezo.apply.blocks import Blocks as Blocks
from tezo.apply.blocks import NotInBlocksError as NotInBlocksError
from tezo.apply.dense import DenseInForward as DenseInForward
from tezo.apply.in_forward import InForward as InForward
from tezo.apply.in_place import FromCopy as FromCopy
from tezo.apply.in_place import InPlace as InPlace
from tezo.apply.vector import VectorInForward as VectorInForward
from tezo.directions import Direction, FixedFactors
from tezo.params import Target


def moving_parameter(
    target: Target, kind: type[Direction], blocks: Blocks, *, in_forward: bool = True, frozen_rank: int | None = None
) -> MovingParameter:
    """The way `target` is moved along directions of a type.

    Args:
        target: the parameter.
        kind: type of the directions that the method draws for it.
        blocks: of the model's forward pass.
        in_forward: False moves everything in place, as published code does (for comparison).
        frozen_rank: see `InForward`.
    """
    if in_forward and target.in_forward:
        if not target.is_matrix:
            return VectorInForward(target, blocks)
        low_rank = issubclass(kind, FixedFactors)
        return InForward(target, blocks, frozen_rank) if low_rank else DenseInForward(target, blocks)
    return InPlace(target) if target.is_matrix else FromCopy(target)
