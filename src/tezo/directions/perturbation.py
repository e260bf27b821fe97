"""Perturbations: rules that draw a parameter's direction as a pure function of (seed, step, index); the dense ones."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tezo.directions.bases.basis import Basis, GaussianBasis, Predictions
from tezo.directions.random import DrawKey, fill_normal_
from tezo.directions.spaces import Dense, Direction, FixedFactors
from tezo.directions.targets import Target


class Perturbation(ABC):
    """A rule that draws directions. The evaluations and the update of a step use the same direction object.

    A direction is a function of its key, of the factors that are fixed since the last refresh, and of the state of the
    update rule; to draw it changes nothing. `refresh` computes and keeps the parts that are fixed for several steps.
    """

    single_direction = False
    """Whether the method is defined for one direction per step only."""

    interval: int | None = None
    """Steps between two refreshes of the fixed factors; None: they are never refreshed."""

    draws: type[Direction] = Dense
    """Type of the directions of matrices."""

    basis: Basis = GaussianBasis()
    """Source of the fixed factors, if there are any."""

    def prepare(self, targets: Sequence[Target]) -> None:
        """Takes, once, the parameters to be tuned."""
        del targets

    def refresh_step(self, step: int) -> int:
        """Returns the first step that has the fixed factors of `step`; here there are none."""
        del step
        return 0

    def refresh(self, target: Target, key: DrawKey) -> FixedFactors | None:
        """Keeps the common parts of directions for `target` from the step of `key` on; its basis has been refreshed.

        Returns zero of the space of these directions; None if they are dense.
        """
        del target, key
        return None

    def forget(self) -> None:  # noqa: B027 - nothing to drop is the default
        """Drops the parts that `refresh` has kept, if the factors of a basis have changed since."""

    def direction_type(self, target: Target) -> type[Direction]:
        """Returns the type of the directions for `target`; nothing is drawn."""
        return self.draws if target.is_matrix or issubclass(self.draws, Dense) else Dense

    @property
    def factor_bytes(self) -> int:
        """Bytes of the stored fixed factors."""
        return 0

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that directions depend on, beside those of the basis, and that no key gives again."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the result of `state`; other names are ignored."""
        del state

    def rank_of(self, name: str) -> int | None:
        """Returns the rank of a parameter's directions; None if they are dense."""
        del name
        return None

    def num_directions(self, most: int) -> int:
        """Returns the number of directions of a step, at most `most`: those that a basis proposes, if it does."""
        return most

    def predictions(self, step: int) -> Predictions | None:
        """Returns the predictions of a basis for a step's directions, if they are proposed; see `Basis.predictions`."""
        del step
        return None

    @abstractmethod
    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> Direction:
        """Returns the direction for `target` at `key`; `state` is the update rule's state of the parameter."""


def dense(target: Target, key: DrawKey) -> Dense:
    """Returns standard normal noise for `target`."""
    shape, dtype = target.stored_shape, target.state_dtype
    return Dense(shape=shape, device=target.device, dtype=dtype, **key.of(target.name, "z"))


class DenseGaussian(Perturbation):
    """MeZO's z ~ N(0, I), drawn on the parameter's device and redrawn from its key instead of being stored."""

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> Dense:
        del state
        return dense(target, key)


class SignNoise(Dense):
    """Signs of standard normal noise: 1 and -1 with equal probability."""

    def fill_(self, out: Tensor, rows: slice) -> Tensor:
        return super().fill_(out, rows).sign_()


class DenseRademacher(Perturbation):
    """FZOO's z, whose entries are 1 or -1."""

    draws = SignNoise

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> SignNoise:
        del state
        return SignNoise(**vars(dense(target, key)))


@dataclass(frozen=True)
class Annealing:
    """Schedule of ZO-AdaMU's alpha, beta1 and beta2: constant 1, then a cosine decay to a final value.

    A coefficient with final value b and exponent phi has, at step t, the value

        1                                                                  for t < start,
        b + (1 - b) (1 + cos(pi ((t - start) / (stop - start))^phi)) / 2   for start <= t < stop,
        b                                                                  for t >= stop.

    The defaults are the paper's numbers. The position of the exponent in the paper's Eq. 7 is ambiguous, and its text
    and Eq. 7 disagree on the final values; this is our reading. Each coefficient has (final value, exponent).
    """

    start: int = 1024
    stop: int = 16000
    alpha: tuple[float, float] = (0.5, 1.0)
    beta1: tuple[float, float] = (0.9, 0.1)
    beta2: tuple[float, float] = (0.01, 1.5)

    def at(self, step: int) -> tuple[float, float, float]:
        """Returns (alpha, beta1, beta2) at `step`."""
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
        """Returns (z1[rows], z2[rows]), in scratch buffers."""
        later = f"{self.role}.history"
        z1 = fill_normal_(self.buffer(rows, self.role), **self.key(rows, self.role)).mul_(math.sqrt(self.alpha))
        z2 = fill_normal_(self.buffer(rows, later), **self.key(rows, later)).mul_(math.sqrt(1 - self.alpha))
        return z1, z2 if self.history is None else z2.add_(self.history[rows])


class SimulatedMomentum(Perturbation):
    """ZO-AdaMU's perturbation: draws `MomentumNoise` with m = "exp_avg" of the update rule's state."""

    single_direction = True
    draws = MomentumNoise

    def __init__(self, annealing: Annealing) -> None:
        self.annealing = annealing

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> MomentumNoise:
        alpha, beta1, beta2 = self.annealing.at(key.step)
        return MomentumNoise(
            **vars(dense(target, key)), alpha=alpha, beta1=beta1, beta2=beta2, history=state.get("exp_avg")
        )
