"""Evolution strategies with low-rank members, ours in their composition: scores of a population, no gradient."""

from typing import Unpack

from torch import nn

from tezo.directions.bases.basis import Basis
from tezo.directions.low_rank import Lazy, Scale
from tezo.directions.ranks import FixedRank
from tezo.methods.bases import find_basis
from tezo.optim.estimators.population import AntitheticPopulation, Population
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Least, with_settings
from tezo.optim.updates import SGD
from tezo.system.errors import RequestError


@with_settings
def es(
    model: nn.Module,
    *,
    num_directions: int = 16,
    rho: float = 1e-2,
    lr: float = 3.0,
    antithetic: bool = False,
    rank: int = 8,
    basis: str | Basis = "activation",
    lazy_update_interval: int | None = None,
    scale: Scale = "unit",
    frozen_rank: int | None = None,
    weight_decay: float = 0.02,
    **least: Unpack[Least],
) -> ZerothOrderOptimizer:
    """Evolution strategies: a population of low-rank members, scored on the same rows. Ours in its parts.

        Z_i = U_i V^T,   U_i (M x r) drawn every step, V (N x r) once,   i = 1, ..., P = `num_directions`,
        a_ij = l_ij - mean_i l_ij   of the loss l_ij of member W + r Z_i on row j,
        kappa_i = r mean_j a_ij / sigma,   sigma^2 = sum_i (mean_j a_ij)^2 / (P - 1),
        A <- (1 - lr wd) A - lr (1/P) sum_i kappa_i U_i,   W = W_0 + A V^T,   wd = `weight_decay`.

    For rewards and other losses that no short distance changes smoothly: one score of each member, P evaluations a
    step, which run side by side where the passes allow it. The result is an exact LoRA adapter of rank r.

    The estimate is that of evolution strategies with fitness over its spread (Salimans et al. 2017; Qiu et al. 2025,
    arXiv 2509.24372, for language models); low-rank members are of EGGROLL (Sarkar et al. 2025, arXiv 2511.16652),
    which draws both factors anew for each member, where V here holds the leading inputs of a layer, as in
    `head-feedback`. `lr` has no unit: a step is of about lr / sqrt(P) times a member's distance, whatever the scores
    differ by. So the rate of a run falls to zero: at a constant one a model that has learnt wanders on, and forgets.
    `weight_decay` pulls the change back to nothing, so that what no score asks for fades: with 0.02 two models forgot
    about half as much or less, and scored about as high or higher (docs/rewards.md). A run measures rho, the distance
    at which the text that the model writes becomes less likely by a tenth of a nat a token. r is rho, and 1.5 times as
    long after each step in which all members were alike, up to 1.5^5 rho: where answers that earn a half were all
    that members at rho wrote, those farther away left them (docs/rewards.md). Defaults are of first trials.

    With `antithetic` each direction has two members, W + r Z_i and W - r Z_i: twice the evaluations a step, and
    kappa_i is half the difference of theirs.
    """
    if num_directions < 2:
        raise RequestError(f"method.num_directions is {num_directions}; a population needs at least 2 members.")
    perturbation = Lazy(FixedRank(rank=rank), scale, basis=find_basis(basis), interval=lazy_update_interval)
    return ZerothOrderOptimizer(
        model,
        perturbation,
        SGD(),
        lr=lr,
        rho=rho,
        num_directions=num_directions,
        estimator=AntitheticPopulation if antithetic else Population,
        frozen_rank=frozen_rank,
        weight_decay=weight_decay,
        **least,
    )
