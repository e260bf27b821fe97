"""TeZO: directions that are low-rank over the model and over time."""

from typing import Unpack

from torch import nn

from tezo.directions.bases.basis import Basis
from tezo.directions.low_rank import Scale, Temporal
from tezo.directions.ranks import LayerwiseRank, chosen_rank
from tezo.methods.bases import find_basis
from tezo.optim.factored_adam import FactoredAdam
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Common, Ranked, with_settings
from tezo.optim.updates import SGD, Adam, Momentum


@with_settings
def tezo(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    rank: int | None = None,
    scale: Scale = "raw",
    basis: str | Basis = "gaussian",
    lazy_update_interval: int | None = None,
    **options: Unpack[Ranked],
) -> ZerothOrderOptimizer:
    """TeZO: directions that are low-rank over the model and over time.

        Z_t = sum_s tau_s u_s v_s^T,   u_s ~ N(0, I_M), v_s ~ N(0, I_N) drawn once, tau ~ N(0, I_r) every step,
        W <- W - lr kappa Z_t.

    Algorithm 1 of the paper. W_t = W_0 + U diag(c_t) V^T in every step, so the base W_0 is not written and only c (r
    numbers) changes. With `rank=None` ranks are chosen by Eq. 6 and 7 (`rank_threshold` and `max_rank`: the paper's
    table; `rank_rule`: either of its criteria, see `tezo.directions.ranks`); a number is used for all
    matrices.

    `basis` is the source of u and v (`tezo.directions.bases`); "gaussian" is the paper's. With `lazy_update_interval`
    both are refreshed after this number of steps and the trained change is folded; None, as in the paper, fixes them.

    Theorem 1 (unbiasedness) averages over u and v, which are drawn once per run. For given u and v, the mean of the
    estimate lies in the span of the u_s v_s^T: it is the sum of <G, u_s v_s^T> u_s v_s^T.

    `scale="raw"` is the printed algorithm; "unit" divides Z by sqrt(r), which gives the unbiased estimate of Theorem 1.
    """
    perturbation, common = _temporal(rank, scale, basis, lazy_update_interval, options)
    return ZerothOrderOptimizer(model, perturbation, SGD(), lr=lr, **common)


@with_settings
def tezo_m(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    beta: float = 0.9,
    rank: int | None = None,
    scale: Scale = "raw",
    basis: str | Basis = "gaussian",
    lazy_update_interval: int | None = None,
    **options: Unpack[Ranked],
) -> ZerothOrderOptimizer:
    """TeZO-m: TeZO with momentum on the temporal factor.

        tau_M <- beta tau_M + (1 - beta) kappa tau,   W <- W - lr sum_s tau_M,s u_s v_s^T.

    Algorithm 1 of the paper; it equals momentum on W, because u and v are fixed. State: tau_M (r numbers). At a refresh
    tau_M is carried over by projection. Ranks, basis, interval and deviations: as in `tezo`.
    """
    perturbation, common = _temporal(rank, scale, basis, lazy_update_interval, options)
    return ZerothOrderOptimizer(model, perturbation, Momentum(beta), lr=lr, **common)


@with_settings
def tezo_adam(
    model: nn.Module,
    *,
    lr: float = 1e-5,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-5,
    rank: int | None = None,
    scale: Scale = "raw",
    basis: str | Basis = "gaussian",
    **options: Unpack[Ranked],
) -> ZerothOrderOptimizer:
    """TeZO-Adam: Adam with both moments stored as temporal factors.

        tau_M <- b1 tau_M + (1 - b1) kappa tau,   tau_V <- b2 tau_V + (1 - b2) kappa^2 tau^2,
        W <- W - lr M / sqrt(V + eps),   M = sum_s tau_M,s u_s v_s^T,   V = sum_s tau_V,s u_s^2 (v_s^2)^T.

    Algorithm 1 and Eq. 8 of the paper, which also gives `betas` and `eps`; no bias correction, eps inside the square
    root. State: 2 r numbers. Because of the division the step is dense: one pass over the weights.

    Deviations: ranks, basis and scale as in `tezo`; bfloat16 and float16 weights are rounded stochastically.
    """
    update = FactoredAdam(betas, eps, eps_in_sqrt=True, bias_correction=False)
    perturbation, common = _temporal(rank, scale, basis, None, options)
    return ZerothOrderOptimizer(model, perturbation, update, lr=lr, **common)


@with_settings
def tezo_cadam(
    model: nn.Module,
    *,
    lr: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-5,
    rank: int | None = 32,
    scale: Scale = "unit",
    basis: str | Basis = "gaussian",
    lazy_update_interval: int | None = None,
    **options: Unpack[Ranked],
) -> ZerothOrderOptimizer:
    """TeZO-cAdam: Adam on the temporal coefficients. Ours, not the paper's.

        tau_M <- b1 tau_M + (1 - b1) kappa tau,   tau_V <- b2 tau_V + (1 - b2) kappa^2 tau^2,
        c <- c - lr tau_M / sqrt(tau_V + eps),   W_t = W_0 + U diag(c_t) V^T.

    As `tezo_adam`, except that r coefficients are divided instead of the matrix. W_0 is not written, and the result is
    an exact LoRA adapter. State: 3 r numbers (c, tau_M, tau_V). At a refresh tau_M is carried over by projection and
    tau_V is kept. Basis and interval: as in `tezo`.

    `lr` and `rank` are from the demo, a 22M-parameter encoder; `betas` and `eps` are TeZO-Adam's. For models with
    billions of parameters start with the paper's learning rates for Adam, 1e-5 to 1e-4; this is not measured.
    """
    update = Adam(betas, eps, eps_in_sqrt=True, bias_correction=False)
    perturbation, common = _temporal(rank, scale, basis, lazy_update_interval, options)
    return ZerothOrderOptimizer(model, perturbation, update, lr=lr, **common)


def _temporal(
    rank: int | None, scale: Scale, basis: str | Basis, interval: int | None, options: Ranked
) -> tuple[Temporal, Common]:
    """Returns (the perturbation with these options, the options that are left for the optimizer)."""
    rule = chosen_rank(
        rank,
        options.pop("rank_rule", LayerwiseRank.criterion),
        options.pop("rank_threshold", LayerwiseRank.threshold),
        options.pop("max_rank", LayerwiseRank.max_rank),
    )
    return Temporal(rule, scale, basis=find_basis(basis), interval=interval), options
