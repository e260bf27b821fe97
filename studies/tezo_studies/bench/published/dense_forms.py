"""MeZO with momentum and with Adam, ZO-AdaMU: dense noise, dense state."""

import torch
from torch import Tensor, nn

from tezo.directions.perturbation import Annealing
from tezo_studies.bench.published.algorithm import Published


class MeZOm(Published):
    """MeZO with a dense momentum."""

    beta = 0.9

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        z, state = self.direction(name, parameter), self.state[name]
        m = state.get("m", torch.zeros_like(parameter.data))
        state["m"] = self.beta * m + (1 - self.beta) * kappa * z
        parameter.data = parameter.data - self.lr * state["m"]


class MeZOAdam(Published):
    """MeZO with both of Adam's moments dense, bias-corrected as torch has it."""

    betas, eps = (0.9, 0.999), 1e-8

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        grad, state, (b1, b2) = kappa * self.direction(name, parameter), self.state[name], self.betas
        if not state:
            state |= {"m": torch.zeros_like(parameter.data), "v": torch.zeros_like(parameter.data)}
        state["m"].mul_(b1).add_(grad, alpha=1 - b1)
        state["v"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        t = self.num_steps + 1
        denominator = (state["v"] / (1 - b2**t)).sqrt().add_(self.eps)
        parameter.data.addcdiv_(state["m"], denominator, value=-self.lr / (1 - b1**t))


class ZOAdaMU(Published):
    """Momentum inside the perturbation: z = b1 z1 + (1 - b1) z2, z1 ~ N(0, alpha), z2 ~ N(m, 1 - alpha)."""

    annealing, eps = Annealing(), 1e-8

    def parts(self, name: str, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """(z1, z2)."""
        alpha, _, _ = self.annealing.at(self.num_steps)
        m = self.state[name].get("m", torch.zeros_like(parameter.data))
        history = self.draws.normal(name, "history", parameter.shape, parameter)
        return self.noise(name, parameter) * alpha**0.5, m + history * (1 - alpha) ** 0.5

    def direction(self, name: str, parameter: nn.Parameter) -> Tensor:
        _, beta1, _ = self.annealing.at(self.num_steps)
        z1, z2 = self.parts(name, parameter)
        return beta1 * z1 + (1 - beta1) * z2

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        _, beta1, beta2 = self.annealing.at(self.num_steps)
        z1, z2 = self.parts(name, parameter)
        m, v = beta1 * z1 + (1 - beta1) * z2, beta2 * z1**2 + (1 - beta2) * z2**2
        parameter.data = parameter.data - self.lr * kappa * m / torch.sqrt(v + self.eps)
        self.state[name]["m"] = m
