"""Any update rule, on projected gradients that are cut where they are far out of the ordinary."""

import math
from dataclasses import replace

import torch

from tezo.errors import RequestError
from tezo.estimators.estimate import ParameterEstimate
from tezo.forward import MovingParameter
from tezo.optim.updates.update import State, Update

BETA = 0.99
"""Of the running mean of squares, as the papers' second moments have it."""

_KEY = "clipped_sq"


class Clipped(Update):
    """With kappa_i of the step's q directions, t steps taken before it and c the clip:

        limit = c sqrt(v / (1 - beta^t)),   kappa_i <- min(max(kappa_i, -limit), limit),
        v <- beta v + (1 - beta) mean_i kappa_i^2,   then the inner rule steps along the new kappas.

    v is of earlier steps and of cut values, so that an outlier neither passes nor widens the limit by much. There is
    no limit before a kappa other than 0 has been seen. Every parameter's v is the same.

    Args:
        inner: rule that steps.
        clip: c, above 1: at or below it the limit could only fall.
    """

    def __init__(self, inner: Update, clip: float) -> None:
        if not 1 < clip < math.inf:
            raise RequestError(
                f"method.clip is {clip}; it must be above 1, in multiples of a usual projected gradient, or left out."
            )
        self.inner = inner
        self.clip = clip
        self.takes = inner.takes
        self.writes_weight = inner.writes_weight

    def init(self, estimate: ParameterEstimate, moving: MovingParameter) -> State:
        target = moving.target
        zero = torch.zeros((), dtype=target.state_dtype, device=target.device)
        return {_KEY: zero, **self.inner.init(estimate, moving)}

    def step(self, moving: MovingParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
        mean_sq = float(state[_KEY])
        limit = self.clip * math.sqrt(mean_sq / (1 - BETA**estimate.count)) if mean_sq > 0 else math.inf
        kappas = [max(-limit, min(limit, kappa)) for kappa in estimate.projected_grads]
        mean = sum(kappa**2 for kappa in kappas) / len(kappas)
        state[_KEY].mul_(BETA).add_(mean, alpha=1 - BETA)
        self.inner.step(moving, replace(estimate, projected_grads=kappas), state, lr)

    def divisor(self, kappa_sq: float, num_directions: int) -> float:
        return self.inner.divisor(kappa_sq, num_directions)
