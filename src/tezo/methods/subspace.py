"""Two baselines of the paper: SubZO, with a random core between orthonormal factors, and ZO-AdaMU."""

from typing import Unpack

from torch import nn

from tezo.directions.bases.basis import OrthonormalBasis
from tezo.directions.low_rank import Scale, Subspace
from tezo.directions.perturbation import Annealing, SimulatedMomentum
from tezo.directions.ranks import FixedRank
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Common, with_settings
from tezo.optim.updates import SGD, AdaMU


@with_settings
def subzo(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    rank: int = 64,
    lazy_update_interval: int = 500,
    scale: Scale = "unit",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """SubZO: a random core between two orthonormal factors that are fixed over an interval.

        Z = U_k S_t V_k^T sqrt(M N) / r,   S_t (r x r) drawn every step, U_k and V_k every `lazy_update_interval` steps,
        W <- W - lr kappa Z.

    The paper's baseline (Yu et al. 2024). The defaults of `rank` and `lazy_update_interval` are from the paper's table.
    Within an interval W + U_k C V_k^T is computed in the forward pass; C (r x r) is folded into W at each refresh.

    Deviations: `scale="unit"` is the scale of the public code; `scale="raw"` omits sqrt(M N) / r, as in the formula of
    the TeZO paper.
    """
    perturbation = Subspace(FixedRank(rank=rank), scale, basis=OrthonormalBasis(), interval=lazy_update_interval)
    return ZerothOrderOptimizer(model, perturbation, SGD(), lr=lr, **common)


@with_settings
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
    `tezo.directions.perturbation.Annealing`. State: m, in the shape of the weights, in float32. Only one direction per
    step is possible.

    Deviations: implemented from its paper, because the public code cannot take a step; that code also multiplies m by
    the sign of kappa, which the paper does not. The annealing formula is our reading of the paper.
    """
    perturbation = SimulatedMomentum(Annealing(start=anneal_start, stop=anneal_stop))
    return ZerothOrderOptimizer(model, perturbation, AdaMU(eps), lr=lr, **common)
