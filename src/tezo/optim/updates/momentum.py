"""Steps along an exponential moving average of the estimates."""

from tezo.directions.spaces import Direction, FixedFactors
from tezo.estimators.estimate import ParameterEstimate
from tezo.forward import MovingParameter
from tezo.optim.updates.update import State, Update, check_average, zeros_like_coefficient


class Momentum(Update):
    """m = beta m + (1 - beta) g, W -= lr * m, on the coefficient of any type of direction.

    m is tau_M in TeZO-m (on tau) and M in LOZO-m (on U). At a refresh it is carried over to the new factors.
    """

    def __init__(self, beta: float) -> None:
        check_average("beta", (beta,))
        self.beta = beta

    def init(self, estimate: ParameterEstimate, moving: MovingParameter) -> State:
        return {"exp_avg": zeros_like_coefficient(estimate, moving)}

    def carry_over(self, direction: Direction, state: State) -> None:
        if isinstance(direction, FixedFactors):
            state["exp_avg"] = direction.carry_over(state["exp_avg"])

    def step(self, moving: MovingParameter, estimate: ParameterEstimate, state: State, lr: float) -> None:
        direction = estimate.direction
        self.carry_over(direction, state)
        for rows, grad in estimate.tiles():
            exp_avg = state["exp_avg"][rows]
            exp_avg.mul_(self.beta).add_(grad, alpha=1 - self.beta)
            moving.add_(direction, rows, exp_avg, -lr)
