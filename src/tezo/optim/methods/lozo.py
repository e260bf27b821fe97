"""LOZO: one factor fresh every step, the other kept over an interval, or a run."""

from typing import Unpack

from torch import nn

from tezo.directions.bases import Basis
from tezo.directions.perturbations import Lazy, Scale
from tezo.directions.rank_selection import FixedRank
from tezo.estimators.feedback import DirectFeedback
from tezo.optim.limits import check_rate
from tezo.optim.methods.common_options import Common
from tezo.optim.optimizer import StepRule, ZerothOrderOptimizer
from tezo.optim.updates import SGD, Adam, Momentum

FEEDBACK_UPDATE = Adam((0.9, 0.999), 1e-8, eps_in_sqrt=False, bias_correction=True)
"""Of feedback steps: torch's Adam, with torch's settings."""


def lozo(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    rank: int = 8,
    lazy_update_interval: int | None = 100,
    scale: Scale = "unit",
    basis: str | Basis = "gaussian",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """LOZO: low-rank directions with one factor kept over an interval.

        Z = U_t V_k^T,   U_t (M x r) every step, V_k (N x r) every `lazy_update_interval` steps,
        W <- W - lr kappa Z.

    The paper's baseline (Chen et al. 2024). `rank` and the interval: the paper's table. Within an interval
    W + A V_k^T is computed in the forward pass; A (M x r) is folded into W at each refresh. None keeps V for the whole
    run: W is only read, and the result is an exact LoRA adapter of rank r.

    Deviations: the update uses the U that was measured, at refreshes too (the public code draws another
    one there); unit scale divides by sqrt(r).
    """
    perturbation = Lazy(FixedRank(rank=rank), scale, basis=basis, interval=lazy_update_interval)
    return ZerothOrderOptimizer(model, perturbation, SGD(), lr=lr, **common)


def lozo_m(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    beta: float = 0.9,
    rank: int = 8,
    lazy_update_interval: int | None = 100,
    scale: Scale = "unit",
    basis: str | Basis = "gaussian",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """LOZO-m: LOZO with momentum on the fresh factor.

        M <- beta M + (1 - beta) kappa U_t,   W <- W - lr M V_k^T,
        and at a refresh first M <- M V_old^T V_new / N   (N r^-1 under unit scale).

    State: M (M x r), in float32. Interval and deviations: as `lozo`; M starts at zero, as in TeZO-m, where the public
    code starts at kappa U.
    """
    perturbation = Lazy(FixedRank(rank=rank), scale, basis=basis, interval=lazy_update_interval)
    return ZerothOrderOptimizer(model, perturbation, Momentum(beta), lr=lr, **common)


def lozo_adam(
    model: nn.Module,
    *,
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-5,
    rank: int = 8,
    basis: str | Basis = "activation",
    lazy_update_interval: int | None = None,
    scale: Scale = "unit",
    feedback_scale: float = 0.3,
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """LOZO-Adam: Adam on the factor that changes, beside one of leading input directions. Ours, not the paper's.

        Z_t = U_t V^T,   U_t (M x r) every step, V (N x r) once,
        M_t <- b1 M + (1 - b1) kappa U_t,   V_t <- b2 V_t + (1 - b2) kappa^2 U_t^2   (entry by entry),
        A <- A - lr M_t / sqrt(V_t + eps),   W_t = W_0 + A V^T.

    The columns of V are the leading directions of the layer's inputs (`basis`), seen in forward passes over a few
    training rows before the first step. A gradient's rows lie in the span of those inputs, and along the leading ones
    the rows of a batch agree most: docs/theory.md has the measurements. All of the output side is searched, so
    the subspace is not used up, W_0 is only read, and the result is an exact LoRA adapter of rank r.

    State: A and both moments (3 M x r, in float32), V. `lazy_update_interval` looks at the inputs anew every so many
    steps; A V^T is folded (`frozen_rank`: beside the base), the first moment goes over by projection. `lr` and `rank`
    are those of the demo, a 22M-parameter encoder; `betas` and `eps` are TeZO-Adam's.

    Feedback steps, `step(closure, kind="feedback")`, move A along the error at the last hidden states, at
    `feedback_scale` times `lr` (`tezo.estimators.feedback`); a run takes them as `train.feedback_first` and
    `train.feedback_last` say.
    """
    update = Adam(betas, eps, eps_in_sqrt=True, bias_correction=False)
    perturbation = Lazy(FixedRank(rank=rank), scale, basis=basis, interval=lazy_update_interval)
    check_rate("feedback_scale", feedback_scale)
    feedback = StepRule(DirectFeedback(perturbation.fixed), FEEDBACK_UPDATE, lr_scale=feedback_scale, restarts=True)
    return ZerothOrderOptimizer(model, perturbation, update, lr=lr, more_rules=(feedback,), **common)
