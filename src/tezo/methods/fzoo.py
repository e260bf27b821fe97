"""FZOO: signs as noise, one-sided differences, and steps over the spread of the losses."""

from typing import Unpack

from torch import nn

from tezo.directions.perturbation import DenseRademacher
from tezo.optim.estimators.population import OverSpread
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Basic, with_settings
from tezo.optim.updates import SGD
from tezo.system.errors import RequestError


@with_settings
def fzoo(
    model: nn.Module,
    *,
    lr: float = 1e-5,
    rho: float = 1e-3,
    num_directions: int = 8,
    in_forward: bool = True,
    **basic: Unpack[Basic],
) -> ZerothOrderOptimizer:
    """FZOO: one-sided differences along signs, over the spread of their losses.

        z_i uniform in {-1, 1}^(M N),   l_i = f(W + rho z_i),   i = 1, ..., q,
        W <- W - lr (1/q) sum_i ((l_i - f(W)) / sigma) z_i,   sigma^2 = sum_i (l_i - mean l)^2 / (q - 1).

    A baseline of Dang et al. 2025 (arXiv 2506.09034); not in the paper. q + 1 forward passes a step, several of which
    share one where rows are few. State: none. Their paper searches the learning rate; `lr` here is ours, the size of
    an entry's step up to a factor.

    Deviations: as in `mezo`. Where their step is divided by rho, ours has this factor in `lr`.
    """
    if num_directions < 2:
        raise RequestError(f"method.num_directions is {num_directions}; the spread of losses needs at least 2.")
    return ZerothOrderOptimizer(
        model,
        DenseRademacher(),
        SGD(),
        lr=lr,
        rho=rho,
        num_directions=num_directions,
        in_forward=in_forward,
        estimator=OverSpread,
        **basic,
    )
