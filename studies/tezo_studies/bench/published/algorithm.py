"""The skeleton of the published algorithms, which by itself is MeZO."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


class Draws(Protocol):
    """Where random numbers come from; tests put those of the library here."""

    def reset(self, step: int) -> None:
        """Begins the stream of a step again; -1 - step is that of what is drawn once, before the step."""

    def normal(self, name: str, role: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Standard normal numbers in the dtype and on the device of `like`."""

    def basis(self, name: str, role: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """An orthonormal basis of random columns."""


class TorchDraws:
    """torch's global generators, seeded, as public code has it."""

    def reset(self, step: int) -> None:
        """Begins the stream of a step again."""
        torch.manual_seed(step)

    def normal(self, name: str, role: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """`torch.normal` of that shape."""
        del name, role
        return torch.normal(mean=0, std=1, size=tuple(shape), device=like.device, dtype=like.dtype)

    def basis(self, name: str, role: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Q of a QR decomposition in float32."""
        del name, role
        gaussian = torch.randn(tuple(shape), device=like.device, dtype=torch.float32)
        columns: Tensor = torch.linalg.qr(gaussian)[0].to(like.dtype)
        return columns


class Published:
    """The skeleton that all share: perturb by +1, -2, +1 times rho, two losses, an update.

    This class is MeZO: Z dense, W <- W - lr (kappa Z + decay W). Others say what Z is and how they step.

    Args:
        parameters: (name, parameter), those that are trained.
        lr: learning rate.
        rho: perturbation scale.
        rank: of low-rank directions.
        interval: steps between refreshes of lazy factors.
        draws: random numbers.
    """

    lazy = False
    """Whether factors are refreshed every `interval` steps."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        lr: float = 1e-6,
        rho: float = 1e-3,
        rank: int = 32,
        interval: int = 100,
        draws: Draws | None = None,
    ) -> None:
        self.parameters = parameters
        self.lr, self.rho, self.rank, self.interval = lr, rho, rank, interval
        self.weight_decay = 0.0
        self.draws: Draws = draws if draws is not None else TorchDraws()
        self.num_steps = 0
        self.state: dict[str, State] = {name: {} for name, _ in parameters}
        self.draws.reset(-1)
        for name, parameter in parameters:
            self.init(name, parameter)

    def init(self, name: str, parameter: nn.Parameter) -> None:
        """What is made once, before the first step."""

    def perturb(self, scale: int) -> None:
        """W <- W + scale rho Z, for all parameters."""
        self.draws.reset(self.num_steps)
        for name, parameter in self.parameters:
            self.refresh(name, parameter)
            z = self.direction(name, parameter)
            parameter.data = parameter.data + scale * z * self.rho

    @torch.no_grad()
    def step(self, loss: Callable[[], Tensor]) -> float:
        """One step; returns kappa."""
        self.begin()
        kappa = self.measure(loss)
        self.draws.reset(self.num_steps)
        for name, parameter in self.parameters:
            self.update(name, parameter, kappa)
        self.num_steps += 1
        return kappa

    def measure(self, loss: Callable[[], Tensor]) -> float:
        """Kappa along Z; the parameters end where they began, up to rounding."""
        self.perturb(1)
        loss_plus = loss()
        self.perturb(-2)
        loss_minus = loss()
        self.perturb(1)
        return float(((loss_plus - loss_minus) / (2 * self.rho)).item())

    def begin(self) -> None:
        """What comes before the first pass of a step."""

    def refresh(self, name: str, parameter: nn.Parameter) -> None:
        """What a pass draws anew for a parameter before Z, where that is due."""

    def noise(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Dense standard normal noise of the parameter's shape."""
        return self.draws.normal(name, "z", parameter.shape, parameter)

    def direction(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Z of the parameter's shape: matrices may have another than noise."""
        return self.matrix(name, parameter) if parameter.ndim >= 2 else self.noise(name, parameter)

    def matrix(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Z of a matrix."""
        return self.noise(name, parameter)

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        """The step of one parameter."""
        z = self.direction(name, parameter)
        if parameter.ndim >= 2:
            parameter.data = parameter.data - self.lr * (kappa * z + self.weight_decay * parameter.data)
        else:
            parameter.data = parameter.data - self.lr * (kappa * z)
