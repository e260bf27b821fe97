"""The algorithms that our optimizers are compared with, on the library's draws, in float64.

The published ones are those of `tezo_studies.bench.published`; MeZO-norm, LOZO-Adam and TeZO-cAdam are ours and are
transcribed here. Where ours deviates from a publication, on purpose:

- Low-rank directions have unit variance, see `KeyedDraws`.
- The update of LOZO uses the U of the perturbation at refreshes too, since a draw depends on nothing but its key.
- LOZO-m starts at M = 0.
- ZO-AdaMU: the annealing is the library's documented reading of Eq. 7, which cannot be read with certainty.
- Weight decay and several directions a step, see `AsOurs`.
"""

import math
import statistics
from collections.abc import Callable, Collection, Sequence

import torch
from tezo_studies.bench.published import PUBLISHED, Published
from tezo_studies.bench.published.dense_forms import ZOAdaMU
from tezo_studies.bench.published.lazy_forms import LOZO, LOZOm
from tezo_studies.bench.published.temporal_forms import TeZO
from torch import Tensor, nn

from tezo.directions import random


def gram_schmidt(gaussian: Tensor) -> Tensor:
    columns: list[Tensor] = []
    for x in gaussian.T:
        for _ in range(2):  # twice is enough
            for q in columns:
                x = x - (q @ x) * q
        columns.append(x / x.norm())
    return torch.stack(columns, dim=1)


class KeyedDraws:
    """The library's documented draws: each a function of (seed, step, parameter name, role).

    Roles of fresh draws end in the index of the direction within its step.

    Args:
        seed: of the run.
        unit: V of TeZO and LOZO is divided by sqrt(r), so that every entry of Z has variance 1, and U and V of SubZO
            are orthonormal, as its public code scales Z itself. False: as the papers have it, TeZO's and LOZO's V
            standard normal, and SubZO's factor sqrt(m n) / r taken out again.
    """

    def __init__(self, seed: int, *, unit: bool) -> None:
        self.seed, self.unit = seed, unit
        self.step, self.is_fixed = 0, True
        self.index = 0
        self.weights: Sequence[float] = ()
        """Of the step's directions: fresh draws are then their weighted sum."""

    def reset(self, step: int) -> None:
        self.step, self.is_fixed = (step, False) if step >= 0 else (-1 - step, True)

    def normal(self, name: str, role: str, shape: Sequence[int], like: Tensor) -> Tensor:
        del like
        shape = tuple(shape)
        if role == "v" or self.is_fixed:
            drawn = random.normal(shape, seed=self.seed, step=self.step, name=name, role=role)
            return drawn / shape[1] ** 0.5 if role == "v" and self.unit else drawn
        if not self.weights:
            return self._fresh(name, role, shape, self.index)
        return sum(weight * self._fresh(name, role, shape, i) for i, weight in enumerate(self.weights))

    def _fresh(self, name: str, role: str, shape: tuple[int, ...], index: int) -> Tensor:
        if role in ("tau", "core"):
            return random.normal(shape, seed=self.seed, step=self.step, name=name, role=f"{role}.{index}")
        # noise of one tile, which starts at row 0: no weight of these tests is larger
        keys = {"z": f"z.{index}.0", "history": f"z.{index}.history.0", "u": f"u.{index}"}
        out = torch.empty(shape, dtype=torch.float64)
        return random.fill_normal_(out, seed=self.seed, step=self.step, name=name, role=keys[role])

    def basis(self, name: str, role: str, shape: Sequence[int], like: Tensor) -> Tensor:
        del like
        size, rank = shape
        q = gram_schmidt(random.normal((size, rank), seed=self.seed, step=self.step, name=name, role=role))
        return q if self.unit else q * (rank / size) ** 0.5


class AsOurs(Published):
    """What every method of ours does beside its publication; a mixin before the published class.

    - Weight decay is decoupled and spares 1-D parameters. It shrinks what has been trained since the fixed factors were
      drawn of the matrices in `beside`, which the library keeps beside the base, and W elsewhere.
    - With q directions a step, the fresh draw x of the update is the mean of kappa_i x_i: updates are functions of it.
    """

    draws: KeyedDraws
    decay = 0.0
    beside: Collection[str] = ()
    num_directions = 1

    def begin(self) -> None:
        self.draws.weights = ()
        if self.num_steps == 0 or (self.lazy and self.num_steps % self.interval == 0):
            self.base = {name: w.data if name in self.beside else torch.zeros_like(w) for name, w in self.parameters}
        super().begin()

    def measure(self, loss: Callable[[], Tensor]) -> float:
        self.kappas = []
        for index in range(self.num_directions):
            self.draws.index = index
            self.kappas.append(super().measure(loss))
        if self.num_directions == 1:
            return self.kappas[0]
        self.draws.weights = [kappa / self.num_directions for kappa in self.kappas]
        return 1.0

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        if parameter.ndim >= 2:
            base = self.base[name]
            parameter.data = base + (1 - self.lr * self.decay) * (parameter.data - base)
        super().update(name, parameter, kappa)


class LOZOmFromZero(LOZOm):
    """M starts at zero."""

    def init(self, name: str, parameter: nn.Parameter) -> None:
        shape = (parameter.shape[0], self.rank) if parameter.ndim >= 2 else parameter.shape
        self.state[name]["m"] = torch.zeros(shape, dtype=parameter.dtype)

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        if "carried" in self.state[name] and self.draws.unit:  # V^T V is n / r I on average, not n I
            self.state[name]["carried"] = self.state[name]["carried"] * self.rank
        super().update(name, parameter, kappa)


class Annealed:
    """alpha, beta1 and beta2: 1 on [0, 3), a cosine down to a final value on [3, 12), that value after it (Eq. 7)."""

    def at(self, step: int) -> tuple[float, ...]:
        part = min(1.0, max(0.0, (step - 3) / (12 - 3)))
        finals = ((0.5, 1.0), (0.9, 0.1), (0.01, 1.5))
        return tuple(b + (1 - b) * (0.5 + 0.5 * math.cos(math.pi * part**power)) for b, power in finals)


class AnnealedZOAdaMU(ZOAdaMU):
    """With the schedule of `tests/cases.py`."""

    annealing = Annealed()


class MeZONorm(Published):
    """W <- W - lr kappa Z / (sqrt(v / (1 - beta^t)) + eps), v <- beta v + (1 - beta) kappa^2."""

    beta, eps = 0.99, 1e-8

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        state, mean = self.state[name], sum(k**2 for k in self.kappas) / len(self.kappas)
        state["v"] = self.beta * state.get("v", 0.0) + (1 - self.beta) * mean
        rms = (state["v"] / (1 - self.beta ** (self.num_steps + 1))) ** 0.5
        parameter.data = parameter.data - self.lr * kappa * self.direction(name, parameter) / (rms + self.eps)


class MeZOSign(Published):
    """W <- W - lr sign(kappa Z)."""

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        parameter.data = parameter.data - self.lr * torch.sign(kappa * self.direction(name, parameter))


class MeZOConservative(Published):
    """The weights after a step, after its opposite, and before it, are all made; those with the least loss are kept."""

    def measure(self, loss: Callable[[], Tensor]) -> float:
        kappa, start = super().measure(loss), [w.data for _, w in self.parameters]
        self.draws.reset(self.num_steps)
        z = [self.direction(name, w) for name, w in self.parameters]
        found = []
        for sign in (0, 1, -1):
            for (_, w), before, along in zip(self.parameters, start, z, strict=True):
                w.data = before - sign * self.lr * kappa * along
            found.append((float(loss()), sign))
        for (_, w), before in zip(self.parameters, start, strict=True):
            w.data = before
        return min(found, key=lambda pair: pair[0])[1] * kappa


class SparseMeZO(Published):
    """Z is zero where |W| is above the median of the start."""

    def init(self, name: str, parameter: nn.Parameter) -> None:
        self.state[name]["h"] = parameter.data.flatten().abs().quantile(0.5, interpolation="midpoint")

    def begin(self) -> None:
        super().begin()
        self.masks = {name: (w.data.abs() <= self.state[name]["h"]).to(w.dtype) for name, w in self.parameters}

    def noise(self, name: str, parameter: nn.Parameter) -> Tensor:
        return super().noise(name, parameter) * self.masks[name]


class FZOO(Published):
    """Z is of signs; kappa_i = (l_i - f(W)) / (standard deviation of all l)."""

    draws: KeyedDraws
    num_directions: int

    def noise(self, name: str, parameter: nn.Parameter) -> Tensor:
        weights, self.draws.weights = self.draws.weights, ()
        if not weights:
            return super().noise(name, parameter).sign()
        signs = []
        for self.draws.index in range(len(weights)):
            signs.append(super().noise(name, parameter).sign())
        self.draws.weights = weights
        return sum(weight * sign for weight, sign in zip(weights, signs, strict=True))

    def measure(self, loss: Callable[[], Tensor]) -> float:
        index = self.draws.index
        if index == 0:
            own, losses = float(loss()), []
            for self.draws.index in range(self.num_directions):  # noqa: B020
                self.perturb(1)
                losses.append(float(loss()))
                self.perturb(-1)
            self.found = [(one - own) / statistics.stdev(losses) for one in losses]
            self.draws.index = 0
        return self.found[index]


class LOZOAdam(LOZO):
    """Adam's quotient on kappa U, its eps in the root; V is drawn once."""

    betas, eps = (0.9, 0.99), 1e-5

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        is_matrix = parameter.ndim >= 2
        fresh = kappa * (self.left(name, parameter) if is_matrix else self.noise(name, parameter))
        ratio = adam_ratio(self.state[name], fresh, self.betas, self.eps)
        parameter.data = parameter.data - self.lr * (ratio @ self.state[name]["v"].t() if is_matrix else ratio)


class TeZOcAdam(TeZO):
    """Adam's quotient on kappa tau, its eps in the root."""

    betas, eps = (0.9, 0.99), 1e-5

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        ratio = adam_ratio(self.state[name], kappa * self.tau(name, parameter), self.betas, self.eps)
        parameter.data = parameter.data - self.lr * self.expand(name, ratio)


def adam_ratio(state: dict[str, Tensor], grad: Tensor, betas: tuple[float, float], eps: float) -> Tensor:
    state["m"] = betas[0] * state.get("m", torch.zeros_like(grad)) + (1 - betas[0]) * grad
    state["s"] = betas[1] * state.get("s", torch.zeros_like(grad)) + (1 - betas[1]) * grad**2
    return state["m"] / torch.sqrt(state["s"] + eps)


DEVIATING = {"lozo-m": LOZOmFromZero, "zo-adamu": AnnealedZOAdaMU}
OWN = {
    "mezo-norm": MeZONorm,
    "mezo-sign": MeZOSign,
    "mezo-conservative": MeZOConservative,
    "sparse-mezo": SparseMeZO,
    "fzoo": FZOO,
    "head-feedback": LOZOAdam,
    "tezo-cadam": TeZOcAdam,
}
ALGORITHMS: dict[str, type[AsOurs]] = {
    name: type(form.__name__, (AsOurs, form), {}) for name, form in (PUBLISHED | DEVIATING | OWN).items()
}
