"""MeZO-norm: steps over a running root mean square of the projected gradient."""

from typing import Unpack

import torch
from torch import nn

from tezo.directions.perturbation import DenseGaussian
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.optim.estimators.estimate import ParameterEstimate
from tezo.optim.method import Method
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Common, with_settings
from tezo.optim.updates import Moments, Update, check_average


class NormalizedSGD(Update):
    """With the projected gradients kappa_i of the step's q directions and their estimate g:

        v = beta v + (1 - beta) mean_i kappa_i^2,   W -= lr * g / (sqrt(v / (1 - beta^t)) + eps).

    Adam's second moment of kappa z is close to that of kappa, because z^2 averages to 1 over a matrix. This rule is
    Adam without a second moment per entry, and therefore a fair comparison for it. v is the same for every parameter.

    Args:
        beta: decay rate of the second moment.
        eps: smoothing term.
    """

    def __init__(self, beta: float, eps: float) -> None:
        check_average("beta", (beta,), eps)
        self.beta = beta
        self.eps = eps

    def init(self, estimate: ParameterEstimate, parameter: PerturbedParameter) -> Moments:
        del estimate
        target = parameter.target
        return {"kappa_sq": torch.zeros((), dtype=target.state_dtype, device=target.device)}

    def step(self, parameter: PerturbedParameter, estimate: ParameterEstimate, state: Moments, lr: float) -> None:
        mean = sum(kappa**2 for kappa in estimate.projected_grads) / len(estimate.projected_grads)
        kappa_sq = state["kappa_sq"].mul_(self.beta).add_(mean, alpha=1 - self.beta)
        corrected = float(kappa_sq) / (1 - self.beta ** (estimate.count + 1))
        for rows, grad in estimate.tiles():
            parameter.add_(estimate.direction, rows, grad, -lr / (corrected**0.5 + self.eps))

    def divisor(self, kappa_sq: float, num_directions: int) -> float:
        del num_directions
        return float(kappa_sq**0.5 + self.eps)


@with_settings
def mezo_norm(
    model: nn.Module, *, lr: float = 1e-5, beta: float = 0.99, eps: float = 1e-8, **common: Unpack[Common]
) -> ZerothOrderOptimizer:
    """MeZO-norm: MeZO with steps divided by a running root mean square of kappa. Ours, not the paper's.

        v <- beta v + (1 - beta) kappa^2,   W <- W - lr (kappa / (sqrt(v / (1 - beta^t)) + eps)) z.

    This is Adam with z^2 replaced by its mean, 1: a baseline for adaptive methods. State: one number per run. `lr` and
    `beta` are those of the paper's Adam methods.

    Deviations: as in `mezo`.
    """
    return ZerothOrderOptimizer(model, DenseGaussian(), NormalizedSGD(beta, eps), lr=lr, **common)


METHOD = Method("mezo-norm", mezo_norm, in_paper=False)
