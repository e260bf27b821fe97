"""Plain steps: W -= lr * kappa Z."""

from tezo.estimators.estimate import ParameterEstimate
from tezo.forward import MovingParameter
from tezo.optim.updates.update import State, Update


class SGD(Update):
    """W_t+1 = W_t - lr * g, with g the estimate; for every type of direction."""

    def init(self, estimate: ParameterEstimate, moving: MovingParameter) -> State:
        del estimate, moving
        return {}

    def step(self, moving: MovingParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
        del state
        for rows, grad in estimate.tiles():
            moving.add_(estimate.direction, rows, grad, -lr)
