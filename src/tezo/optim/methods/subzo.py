"""SubZO: a random core between two orthonormal factors."""

from typing import Unpack

from torch import nn

from tezo.directions.perturbations import Scale, Subspace
from tezo.directions.rank_selection import FixedRank
from tezo.optim.methods.common_options import Common
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.updates import SGD


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
    perturbation = Subspace(FixedRank(rank=rank), scale, basis="orthonormal", interval=lazy_update_interval)
    return ZerothOrderOptimizer(model, perturbation, SGD(), lr=lr, **common)
