"""LOZO: one factor is drawn every step, the other is fixed over an interval, or the whole run."""

from typing import Unpack

from torch import nn

from tezo.directions.bases.basis import Basis
from tezo.directions.low_rank import Lazy, Scale
from tezo.directions.ranks import FixedRank
from tezo.methods.bases import find_basis
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Common, with_settings
from tezo.optim.updates import SGD, Momentum


@with_settings
def lozo(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    rank: int = 8,
    lazy_update_interval: int | None = 100,
    scale: Scale = "raw",
    basis: str | Basis = "gaussian",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """LOZO: low-rank directions with one factor fixed over an interval.

        Z = U_t V_k^T,   U_t (M x r) drawn every step, V_k (N x r) every `lazy_update_interval` steps,
        W <- W - lr kappa Z.

    The paper's baseline (Chen et al. 2024). The defaults of `rank` and `lazy_update_interval` are from the paper's
    table. Within an interval W + A V_k^T is computed in the forward pass; A (M x r) is folded into W at each refresh.
    With `lazy_update_interval=None` V is fixed for the whole run: W is not written, and the result is an exact LoRA
    adapter of rank r.

    Deviations: the update always uses the U of the evaluations; the public code draws another U at refreshes.
    `scale="unit"` divides Z by sqrt(r).
    """
    perturbation = Lazy(FixedRank(rank=rank), scale, basis=find_basis(basis), interval=lazy_update_interval)
    return ZerothOrderOptimizer(model, perturbation, SGD(), lr=lr, **common)


@with_settings
def lozo_m(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    beta: float = 0.9,
    rank: int = 8,
    lazy_update_interval: int | None = 100,
    scale: Scale = "raw",
    basis: str | Basis = "gaussian",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """LOZO-m: LOZO with momentum on the factor U.

        M <- beta M + (1 - beta) kappa U_t,   W <- W - lr M V_k^T;
        before the step of a refresh M <- M V_old^T V_new / N   (N / r with unit scale).

    State: M (M x r), in float32. `rank`, `lazy_update_interval` and deviations: as in `lozo`. In addition, M starts at
    zero, as in TeZO-m; the public code starts at kappa U.
    """
    perturbation = Lazy(FixedRank(rank=rank), scale, basis=find_basis(basis), interval=lazy_update_interval)
    return ZerothOrderOptimizer(model, perturbation, Momentum(beta), lr=lr, **common)
