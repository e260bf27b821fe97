"""MeZO-sign: steps of one size in every entry."""

from typing import Unpack

from torch import nn

from tezo.directions.perturbation import DenseGaussian
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.optim.estimators.estimate import ParameterEstimate
from tezo.optim.method import Method
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Common, with_settings
from tezo.optim.updates import Moments, Update


class SignSGD(Update):
    """W -= lr * sign(g), on the coefficient of the estimate g, entry by entry."""

    def step(self, parameter: PerturbedParameter, estimate: ParameterEstimate, state: Moments, lr: float) -> None:
        del state
        for rows, grad in estimate.tiles():
            parameter.add_(estimate.direction, rows, grad.sign(), -lr)

    def divisor(self, kappa_sq: float, num_directions: int) -> float:
        # sign(g) = g / |g|, entry by entry, and g^2 is kappa^2 / q on average
        return float((kappa_sq / num_directions) ** 0.5)


@with_settings
def mezo_sign(model: nn.Module, *, lr: float = 1e-6, **common: Unpack[Common]) -> ZerothOrderOptimizer:
    """MeZO-sign: steps along the sign of MeZO's estimate, which are of size lr in every entry.

        W <- W - lr sign(kappa z).

    A baseline of Zhang et al. 2024 (ZO-SignSGD, Liu et al. 2019); not in the paper. State: none. `lr`: MeZO's; a rate
    that is right for another method is not for this one, since steps do not depend on the size of the gradient.

    Deviations: as in `mezo`.
    """
    return ZerothOrderOptimizer(model, DenseGaussian(), SignSGD(), lr=lr, **common)


METHOD = Method("mezo-sign", mezo_sign, in_paper=False)
