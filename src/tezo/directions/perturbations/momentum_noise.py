"""ZO-AdaMU's perturbation: fresh noise mixed with a momentum of earlier noise."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tezo.directions.perturbations.perturbation import DrawKey, Perturbation, dense
from tezo.directions.spaces import Dense
from tezo.directions.targets import Target


@dataclass(frozen=True)
class Annealing:
    """Schedule of ZO-AdaMU's alpha, beta1 and beta2: constant 1, then a cosine decay to a final value.

    A coefficient with final value b and exponent phi has, at step t, the value

        1                                                                  for t < start,
        b + (1 - b) (1 + cos(pi ((t - start) / (stop - start))^phi)) / 2   for start <= t < stop,
        b                                                                  for t >= stop.

    The defaults are the paper's numbers. The position of the exponent in the paper's Eq. 7 is ambiguous, and its text
    and Eq. 7 disagree on the final values; this is our reading.

    Attributes:
        start: first step of the decay.
        stop: first step with the final value.
        alpha: (final value, exponent) of alpha.
        beta1: (final value, exponent) of beta1.
        beta2: (final value, exponent) of beta2.
    """

    start: int = 1024
    stop: int = 16000
    alpha: tuple[float, float] = (0.5, 1.0)
    beta1: tuple[float, float] = (0.9, 0.1)
    beta2: tuple[float, float] = (0.01, 1.5)

    def at(self, step: int) -> tuple[float, float, float]:
        """(alpha, beta1, beta2) at `step`."""
        a, b, c = (self._value(step, *pair) for pair in (self.alpha, self.beta1, self.beta2))
        return a, b, c

    def _value(self, step: int, final: float, exponent: float) -> float:
        if step < self.start:
            return 1.0
        if step >= self.stop:
            return final
        part = (step - self.start) / (self.stop - self.start)
        return final + (1 - final) * (1 + math.cos(math.pi * part**exponent)) / 2


@dataclass(frozen=True, kw_only=True)
class MomentumNoise(Dense):
    """z = beta1 z1 + (1 - beta1) z2 with z1 ~ N(0, alpha) and z2 ~ N(m, 1 - alpha), entry by entry.

    `history` is m, the z of the previous step; None means zero.
    """

    alpha: float
    beta1: float
    beta2: float
    history: Tensor | None

    def fill_(self, out: Tensor, rows: slice) -> Tensor:
        z1, z2 = self.parts(rows)
        z = z1.mul_(self.beta1).add_(z2, alpha=1 - self.beta1)
        return z if out is z1 else out.copy_(z)

    def parts(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(z1[rows], z2[rows])."""
        z1 = self.noise(rows, self.role).mul_(math.sqrt(self.alpha))
        z2 = self.noise(rows, self.role + ".history").mul_(math.sqrt(1 - self.alpha))
        return z1, z2 if self.history is None else z2.add_(self.history[rows])


class SimulatedMomentum(Perturbation):
    """Draws `MomentumNoise` with m = "exp_avg" of the update rule's state."""

    single_direction = True
    draws = MomentumNoise

    def __init__(self, annealing: Annealing) -> None:
        self.annealing = annealing

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> MomentumNoise:
        alpha, beta1, beta2 = self.annealing.at(key.step)
        return MomentumNoise(
            **vars(dense(target, key)), alpha=alpha, beta1=beta1, beta2=beta2, history=state.get("exp_avg")
        )
