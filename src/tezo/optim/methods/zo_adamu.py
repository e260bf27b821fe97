"""ZO-AdaMU: momentum in the perturbation."""

from typing import Unpack

from torch import nn

from tezo.directions.perturbations import Annealing, SimulatedMomentum
from tezo.optim.methods.common_options import Common
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.updates import AdaMU


def zo_adamu(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    eps: float = 1e-8,
    anneal_start: int = 1024,
    anneal_stop: int = 16000,
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """ZO-AdaMU: momentum and adaptivity in the perturbation.

        z1 ~ N(0, alpha),   z2 ~ N(m, 1 - alpha),   z = b1 z1 + (1 - b1) z2,
        v = b2 z1^2 + (1 - b2) z2^2,   W <- W - lr kappa z / sqrt(v + eps),   m <- z.

    The paper's baseline (Jiang et al. 2024); alpha, b1 and b2 are annealed from 1, see
    `tezo.directions.perturbations.Annealing`. State: m, in the shape of the weights, in float32. Only one direction per
    step is possible.

    Deviations: implemented from its paper, because the public code cannot take a step; that code also multiplies m by
    the sign of kappa, which the paper does not. The annealing formula is our reading of the paper.
    """
    perturbation = SimulatedMomentum(Annealing(start=anneal_start, stop=anneal_stop))
    return ZerothOrderOptimizer(model, perturbation, AdaMU(eps), lr=lr, **common)
