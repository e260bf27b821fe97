"""Evaluating a model at W + rho Z: in the forward pass, in place, or in place with restoration from a copy.

`moving_parameter` selects the implementation for a parameter. The package may import directions and what directions
may import.
"""

from tezo.directions.spaces import Direction, FixedFactors
from tezo.directions.targets import Target
from tezo.forward.blocks import Blocks as Blocks
from tezo.forward.blocks import NotInBlocksError as NotInBlocksError
from tezo.forward.dense import DenseInForward as DenseInForward
from tezo.forward.dense import VectorInForward as VectorInForward
from tezo.forward.in_place import FromCopy as FromCopy
from tezo.forward.in_place import InPlace as InPlace
from tezo.forward.interception import DirectReads as DirectReads
from tezo.forward.low_rank import InForward as InForward
from tezo.forward.moving_parameter import InStateDict as InStateDict
from tezo.forward.moving_parameter import MovingParameter as MovingParameter
from tezo.forward.moving_parameter import Shift as Shift
from tezo.forward.moving_parameter import is_changed_beside as is_changed_beside
from tezo.forward.moving_parameter import require_plain as require_plain
from tezo.forward.moving_parameter import require_writable as require_writable
from tezo.forward.moving_parameter import settle as settle


def moving_parameter(
    target: Target, kind: type[Direction], blocks: Blocks, *, in_forward: bool = True, frozen_rank: int | None = None
) -> MovingParameter:
    """The implementation that applies perturbations and updates to `target`.

    Args:
        target: the parameter.
        kind: type of the directions that the method draws for it.
        blocks: splits the rows of the model's forward pass into blocks.
        in_forward: False perturbs all parameters in place, as published code does (for comparison).
        frozen_rank: `most_rank` of `InForward`.
    """
    if in_forward and target.in_forward:
        if not target.is_matrix:
            return VectorInForward(target, blocks)
        if issubclass(kind, FixedFactors):
            return InForward(target, blocks, frozen_rank)
        if all(site.layout in DenseInForward.layouts for site in target.sites):
            return DenseInForward(target, blocks)
    return InPlace(target) if target.is_matrix else FromCopy(target)
