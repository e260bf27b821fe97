"""Plain steps divided by a running root mean square of the projected gradient, one number per run."""

import torch

from tezo.estimators.estimate import ParameterEstimate
from tezo.forward import MovingParameter
from tezo.optim.updates.update import State, Update, check_average


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

    def init(self, estimate: ParameterEstimate, moving: MovingParameter) -> State:
        del estimate
        target = moving.target
        return {"kappa_sq": torch.zeros((), dtype=target.state_dtype, device=target.device)}

    def step(self, moving: MovingParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
        mean = sum(kappa**2 for kappa in estimate.projected_grads) / len(estimate.projected_grads)
        kappa_sq = state["kappa_sq"].mul_(self.beta).add_(mean, alpha=1 - self.beta)
        corrected = float(kappa_sq) / (1 - self.beta ** (estimate.count + 1))
        for rows, grad in estimate.tiles():
            moving.add_(estimate.direction, rows, grad, -lr / (corrected**0.5 + self.eps))

    def divisor(self, kappa_sq: float, num_directions: int) -> float:
        del num_directions
        return float(kappa_sq**0.5 + self.eps)
