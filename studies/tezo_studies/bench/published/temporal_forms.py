"""TeZO, TeZO-m and TeZO-Adam: Algorithm 1, Z, M and V built in full."""

import torch
from torch import Tensor, nn

from tezo_studies.bench.published.algorithm import Published


class TeZO(Published):
    """Z = sum_s tau_s u_s v_s^T: u and v drawn once, tau every step. Algorithm 1."""

    def init(self, name: str, parameter: nn.Parameter) -> None:
        if parameter.ndim >= 2:
            for role, size in zip("uv", parameter.shape, strict=True):
                self.state[name][role] = self.draws.normal(name, role, (size, self.rank), parameter)

    def tau(self, name: str, parameter: nn.Parameter) -> Tensor:
        """The temporal factor of this step; noise for a vector."""
        if parameter.ndim < 2:
            return self.noise(name, parameter)
        return self.draws.normal(name, "tau", (self.rank,), parameter)

    def expand(self, name: str, tau: Tensor) -> Tensor:
        """sum_s tau_s u_s v_s^T; a vector's tau is its direction."""
        state = self.state[name]
        return (state["u"] * tau) @ state["v"].t() if "u" in state else tau

    def matrix(self, name: str, parameter: nn.Parameter) -> Tensor:
        return self.expand(name, self.tau(name, parameter))

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        parameter.data = parameter.data - self.lr * self.expand(name, kappa * self.tau(name, parameter))


class TeZOm(TeZO):
    """TeZO with momentum on tau."""

    beta = 0.9

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        tau, state = self.tau(name, parameter), self.state[name]
        state["m"] = self.beta * state.get("m", torch.zeros_like(tau)) + (1 - self.beta) * kappa * tau
        parameter.data = parameter.data - self.lr * self.expand(name, state["m"])


class TeZOAdam(TeZO):
    """TeZO with Adam's moments on tau; M and V are built in full."""

    betas, eps = (0.9, 0.99), 1e-5

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        tau, state, (b1, b2) = self.tau(name, parameter), self.state[name], self.betas
        state["m"] = b1 * state.get("m", torch.zeros_like(tau)) + (1 - b1) * kappa * tau
        state["s"] = b2 * state.get("s", torch.zeros_like(tau)) + (1 - b2) * kappa**2 * tau**2
        m, v = state["m"], state["s"]
        if "u" in state:
            m = (state["u"] * m) @ state["v"].t()
            v = (state["u"] ** 2 * v) @ (state["v"] ** 2).t()
        parameter.data = parameter.data - self.lr * (m / torch.sqrt(v + self.eps))
