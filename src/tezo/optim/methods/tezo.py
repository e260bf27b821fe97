"""TeZO: directions that are low-rank over the model and over time."""

from typing import Unpack

from torch import nn

from tezo.directions.bases import Basis
from tezo.directions.perturbations import Scale, Temporal
from tezo.directions.rank_selection import rank_rule
from tezo.optim.methods.common_options import Common
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.updates import SGD, Adam, FactoredAdam, Momentum


def tezo(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    rank: int | None = None,
    rank_threshold: float = 0.25,
    max_rank: int = 64,
    scale: Scale = "unit",
    basis: str | Basis = "gaussian",
    lazy_update_interval: int | None = None,
    share_factors: bool = False,
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """TeZO: directions that are low-rank over the model and over time.

        Z_t = sum_s tau_s u_s v_s^T,   u_s ~ N(0, I_M), v_s ~ N(0, I_N) once, tau ~ N(0, I_r) every step,
        W <- W - lr kappa Z_t.

    Algorithm 1 of the paper. W_t = W_0 + U diag(c_t) V^T throughout, so the base is only read and c (r
    numbers) is all that changes. `rank=None` chooses ranks by Eq. 6 and 7 (`rank_threshold`, `max_rank`:
    the paper's table); a number fixes them. `share_factors` keeps one u and v for all matrices of one shape and
    rank, which saves their memory; tau stays each matrix's own.

    `basis` is where u and v come from (`tezo.directions.bases`): "gaussian" is the paper's. `lazy_update_interval`
    draws both anew every so many steps and folds what was trained; None, as in the paper, keeps them.

    Unbiasedness (Theorem 1) is over the draw of u and v, once a run: given them, the mean of the estimate
    is the projection of the gradient on the span of the u_s v_s^T.

    Deviations: unit scale divides Z by sqrt(r), which makes the estimate Theorem 1's unbiased one; the
    algorithm as printed has no such factor.
    """
    perturbation = Temporal(
        rank_rule(rank, rank_threshold, max_rank),
        scale,
        basis=basis,
        interval=lazy_update_interval,
        share_factors=share_factors,
    )
    return ZerothOrderOptimizer(model, perturbation, SGD(), lr=lr, **common)


def tezo_m(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    beta: float = 0.9,
    rank: int | None = None,
    rank_threshold: float = 0.25,
    max_rank: int = 64,
    scale: Scale = "unit",
    basis: str | Basis = "gaussian",
    lazy_update_interval: int | None = None,
    share_factors: bool = False,
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """TeZO-m: TeZO with momentum on the temporal factor.

        tau_M <- beta tau_M + (1 - beta) kappa tau,   W <- W - lr sum_s tau_M,s u_s v_s^T.

    Algorithm 1 of the paper; exactly momentum on W, since u and v do not change. State: tau_M (r numbers).
    Where factors change, tau_M goes over by projection. Ranks, basis, interval and deviations: as `tezo`.
    """
    perturbation = Temporal(
        rank_rule(rank, rank_threshold, max_rank),
        scale,
        basis=basis,
        interval=lazy_update_interval,
        share_factors=share_factors,
    )
    return ZerothOrderOptimizer(model, perturbation, Momentum(beta), lr=lr, **common)


def tezo_adam(
    model: nn.Module,
    *,
    lr: float = 1e-5,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-5,
    rank: int | None = None,
    rank_threshold: float = 0.25,
    max_rank: int = 64,
    scale: Scale = "unit",
    basis: str | Basis = "gaussian",
    share_factors: bool = False,
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """TeZO-Adam: Adam with both moments kept as temporal factors.

        tau_M <- b1 tau_M + (1 - b1) kappa tau,   tau_V <- b2 tau_V + (1 - b2) kappa^2 tau^2,
        W <- W - lr M / sqrt(V + eps),   M = sum_s tau_M,s u_s v_s^T,   V = sum_s tau_V,s u_s^2 (v_s^2)^T.

    Algorithm 1 and Eq. 8 of the paper, which also gives `betas` and `eps`; no bias correction, eps inside
    the root. State: 2 r numbers. The division makes the step dense: one pass over the weights.

    Deviations: ranks, basis and scale as `tezo`; weights below float32 are rounded stochastically.
    """
    update = FactoredAdam(betas, eps, eps_in_sqrt=True, bias_correction=False)
    perturbation = Temporal(
        rank_rule(rank, rank_threshold, max_rank),
        scale,
        basis=basis,
        share_factors=share_factors,
    )
    return ZerothOrderOptimizer(model, perturbation, update, lr=lr, **common)


def tezo_cadam(
    model: nn.Module,
    *,
    lr: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-5,
    rank: int | None = 32,
    rank_threshold: float = 0.25,
    max_rank: int = 64,
    scale: Scale = "unit",
    basis: str | Basis = "gaussian",
    lazy_update_interval: int | None = None,
    share_factors: bool = False,
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """TeZO-cAdam: Adam on the temporal coefficients themselves. Ours, not the paper's.

        tau_M <- b1 tau_M + (1 - b1) kappa tau,   tau_V <- b2 tau_V + (1 - b2) kappa^2 tau^2,
        c <- c - lr tau_M / sqrt(tau_V + eps),   W_t = W_0 + U diag(c_t) V^T.

    Like `tezo_adam` but for the division, which is done on r numbers instead of on the matrix: nothing
    dense is ever written, and the result is an exact LoRA adapter. State: 3 r numbers. Where factors change, tau_M
    goes over by projection and tau_V as it is. Basis and interval: as `tezo`.

    `lr` and `rank` are those of the demo, a 22M-parameter encoder; `betas` and `eps` are TeZO-Adam's. For
    models of billions of parameters start from the paper's Adam rates, 1e-5 to 1e-4: not measured there.
    """
    update = Adam(betas, eps, eps_in_sqrt=True, bias_correction=False)
    perturbation = Temporal(
        rank_rule(rank, rank_threshold, max_rank),
        scale,
        basis=basis,
        interval=lazy_update_interval,
        share_factors=share_factors,
    )
    return ZerothOrderOptimizer(model, perturbation, update, lr=lr, **common)
