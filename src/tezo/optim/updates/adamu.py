"""ZO-AdaMU's update; its momentum is part of the perturbation."""

import torch

from tezo.directions.perturbations.momentum_noise import MomentumNoise
from tezo.directions.spaces import row_tiles
from tezo.estimators.estimate import ParameterEstimate
from tezo.forward import MovingParameter
from tezo.optim.updates.update import State, Update, check_average, zeros_like_coefficient


class AdaMU(Update):
    """The update of ZO-AdaMU for the perturbation z = beta1 z1 + (1 - beta1) z2 and the projected gradient kappa:

        v = beta2 z1^2 + (1 - beta2) z2^2,   W -= lr * kappa z / sqrt(v + eps).

    z is stored as "exp_avg"; it is the history of the next step.
    """

    takes = (MomentumNoise,)

    def __init__(self, eps: float) -> None:
        check_average("eps", (), eps)
        self.eps = eps

    def init(self, estimate: ParameterEstimate, moving: MovingParameter) -> State:
        return {"exp_avg": zeros_like_coefficient(estimate, moving)}

    def step(self, moving: MovingParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
        noise, (kappa,) = estimate.direction, estimate.projected_grads
        assert isinstance(noise, MomentumNoise)
        for rows in row_tiles(noise.shape):
            z1, z2 = noise.parts(rows)
            z = noise.beta1 * z1 + (1 - noise.beta1) * z2
            v = noise.beta2 * z1.square() + (1 - noise.beta2) * z2.square()
            moving.add_(noise, rows, kappa * z / torch.sqrt(v + self.eps), -lr)
            state["exp_avg"][rows] = z
