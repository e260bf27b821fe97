"""Evaluating a model at W + rho Z: in the forward pass, in place, or in place with restoration from a copy."""

from tezo.directions.spaces import Direction, FixedFactors, SignedDense
from tezo.directions.targets import Target
from tezo.forward.beside_weight import InForward
from tezo.forward.blocks import Blocks
from tezo.forward.dense import DenseInForward, SignedInForward, VectorInForward
from tezo.forward.in_place import FromCopy, InPlace
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.forward.perturbed_parameter import Shift as Shift


def perturbed_parameter(
    target: Target, kind: type[Direction], blocks: Blocks, *, in_forward: bool = True, frozen_rank: int | None = None
) -> PerturbedParameter:
    """Returns the implementation that applies perturbations by directions of this kind, and updates, to `target`.

    Without `in_forward` all are perturbed in place, as published code does. `frozen_rank`: see `InForward`.
    """
    if in_forward and target.in_forward:
        if not target.is_matrix:
            return VectorInForward(target, blocks)
        if issubclass(kind, FixedFactors):
            return InForward(target, blocks, frozen_rank)
        if all(site.layout in DenseInForward.layouts for site in target.sites):
            return (SignedInForward if issubclass(kind, SignedDense) else DenseInForward)(target, blocks)
    return InPlace(target) if target.is_matrix else FromCopy(target)
