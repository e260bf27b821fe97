"""LOZO, LOZO-m and SubZO: low-rank directions with factors kept over an interval."""

import math

from torch import Tensor, nn

from tezo_studies.bench.published.algorithm import Published


class LOZO(Published):
    """Z = U V^T: U new every step, V every interval."""

    lazy = True

    def refresh(self, name: str, parameter: nn.Parameter) -> None:
        if parameter.ndim >= 2 and self.num_steps % self.interval == 0:
            self.state[name]["v"] = self.draws.normal(name, "v", (parameter.shape[1], self.rank), parameter)

    def left(self, name: str, parameter: nn.Parameter) -> Tensor:
        """U of this step."""
        return self.draws.normal(name, "u", (parameter.shape[0], self.rank), parameter)

    def matrix(self, name: str, parameter: nn.Parameter) -> Tensor:
        return self.left(name, parameter) @ self.state[name]["v"].t()


class LOZOm(LOZO):
    """LOZO with momentum on U, carried over to each new V."""

    beta = 0.9

    def refresh(self, name: str, parameter: nn.Parameter) -> None:
        state, due = self.state[name], self.num_steps > 0 and self.num_steps % self.interval == 0
        if due and parameter.ndim >= 2 and "carried" not in state:
            state["carried"] = state["v"]
        super().refresh(name, parameter)

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        state, is_matrix = self.state[name], parameter.ndim >= 2
        fresh = kappa * (self.left(name, parameter) if is_matrix else self.noise(name, parameter))
        if "carried" in state:  # M <- M V_old^T V / n
            state["m"] = state["m"] @ (state.pop("carried").t() @ state["v"]) / parameter.shape[1]
        state["m"] = self.beta * state["m"] + (1 - self.beta) * fresh if "m" in state else fresh
        grad = state["m"] @ state["v"].t() if is_matrix else state["m"]
        parameter.data = parameter.data - self.lr * (grad + self.weight_decay * parameter.data)


class SubZO(Published):
    """Z = U S V^T sqrt(m n) / r: S new every step, U and V orthonormal, new every interval."""

    lazy = True

    def begin(self) -> None:
        if self.num_steps % self.interval == 0:
            self.draws.reset(-1 - self.num_steps)
            for name, parameter in self.parameters:
                if parameter.ndim >= 2:
                    for role, size in zip("uv", parameter.shape, strict=True):
                        self.state[name][role] = self.draws.basis(name, role, (size, self.rank), parameter)

    def matrix(self, name: str, parameter: nn.Parameter) -> Tensor:
        core = self.draws.normal(name, "core", (self.rank, self.rank), parameter)
        z = self.state[name]["u"] @ core @ self.state[name]["v"].t()
        return z * math.sqrt(parameter.numel() / self.rank**2)

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        parameter.grad = kappa * self.direction(name, parameter)
        parameter.data.add_(parameter.grad, alpha=-self.lr)
        parameter.grad = None
