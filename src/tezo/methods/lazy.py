"""LOZO: one factor fresh every step, the other kept over an interval."""

from typing import Unpack

from torch import nn

from tezo.methods.common import Common
from tezo.optimizer import ZerothOrderOptimizer
from tezo.perturbations import Lazy, Scale
from tezo.rank import FixedRank
from tezo.updates import SGD, Momentum


def lozo(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    rank: int = 8,
    lazy_update_interval: int = 100,
    scale: Scale = "unit",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """LOZO: low-rank directions with one factor kept over an interval.

        Z = U_t V_k^T,   U_t (M x r) every step, V_k (N x r) every `lazy_update_interval` steps,
        W <- W - lr kappa Z.

    The paper's baseline (Chen et al. 2024). `rank` and the interval: the paper's table. Within an interval
    W + A V_k^T is computed in the forward pass; A (M x r) is folded into W at each refresh.

    Deviations: the update uses the U that was measured, at refreshes too (the public code draws another
    one there); unit scale divides by sqrt(r).
    """
    perturbation = Lazy(FixedRank(rank=rank), scale, lazy_update_interval)
    return ZerothOrderOptimizer(model, perturbation, SGD(), lr=lr, **common)


def lozo_m(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    beta: float = 0.9,
    rank: int = 8,
    lazy_update_interval: int = 100,
    scale: Scale = "unit",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """LOZO-m: LOZO with momentum on the fresh factor.

        M <- beta M + (1 - beta) kappa U_t,   W <- W - lr M V_k^T,
        and at a refresh first M <- M V_old^T V_new / N   (N r^-1 under unit scale).

    State: M (M x r), in float32. Deviations: as `lozo`; M starts at zero, as in TeZO-m, where the public
    code starts at kappa U.
    """
    perturbation = Lazy(FixedRank(rank=rank), scale, lazy_update_interval)
    return ZerothOrderOptimizer(model, perturbation, Momentum(beta), lr=lr, **common)
