"""Steps along the sign of the estimate, all entries of one size."""

from tezo.estimators.estimate import ParameterEstimate
from tezo.forward import MovingParameter
from tezo.optim.updates.update import State, Update


class SignSGD(Update):
    """W -= lr * sign(g), on the coefficient of the estimate g, entry by entry."""

    def init(self, estimate: ParameterEstimate, moving: MovingParameter) -> State:
        del estimate, moving
        return {}

    def step(self, moving: MovingParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
        del state
        for rows, grad in estimate.tiles():
            moving.add_(estimate.direction, rows, grad.sign(), -lr)

    def divisor(self, kappa_sq: float, num_directions: int) -> float:
        # sign(g) = g / |g|, entry by entry, and g^2 is kappa^2 / q on average
        return float((kappa_sq / num_directions) ** 0.5)
