"""Perturbations: rules that draw a parameter's direction as a pure function of (seed, step, index)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tezo.directions.bases import find_basis
from tezo.directions.bases.basis import Basis, FactorStore, Passes, Role
from tezo.directions.ranks import RankRule
from tezo.directions.spaces import Dense, Direction, FixedFactors, OwnNumbers
from tezo.directions.targets import Target
from tezo.system.errors import RequestError

Scale = Literal["unit", "raw"]
"""Scale of low-rank directions. "unit": every entry of Z has variance 1, as in MeZO, so that rho and the learning rate
carry over between methods, ranks and layers, and the estimate is the unbiased one of Theorem 1. "raw": Algorithm 1
exactly as printed. If the entries of the raw Z have standard deviation s, then (rho, lr) with "raw" corresponds to
(rho s, lr s^2) with "unit" for plain and momentum steps, and to (rho s, lr) for Adam."""


@dataclass(frozen=True)
class DrawKey:
    """Key of a direction: the seed of the run, the step (from 0) and the index among the step's directions."""

    seed: int
    step: int
    index: int = 0


class Perturbation(ABC):
    """A rule that draws directions. The evaluations and the update of a step use the same direction object."""

    single_direction = False
    """Whether the method is defined for one direction per step only."""

    interval: int | None = None
    """Steps between two refreshes of the fixed factors; None: they are never refreshed."""

    draws: type[Direction] = Dense
    """Type of the directions of matrices."""

    cost_of_basis: tuple[int, float] = (0, 0.0)
    """(calls of the model, seconds) spent on a data-dependent basis so far."""

    factor_bytes: int = 0
    """Bytes of the stored fixed factors."""

    def prepare(self, targets: Sequence[Target]) -> None:
        """Takes, once, the parameters to be tuned."""
        del targets

    def direction_type(self, target: Target) -> type[Direction]:
        """Returns the type of the directions for `target`; nothing is drawn."""
        del target
        return self.draws

    def set_calibration_passes(self, model: nn.Module, passes: Passes) -> None:
        """Sets the forward passes that a data-dependent basis is computed from; see `tezo.directions.bases`."""
        del model, passes

    def set_factor_store(self, store: FactorStore) -> None:
        """Sets the store for factors that are computed from data."""
        del store

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that the directions depend on and that cannot be redrawn from a key."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the result of `state`."""
        del state

    def rank_of(self, name: str) -> int | None:
        """Returns the rank of a parameter's directions; None if they are dense."""
        del name
        return None

    @abstractmethod
    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> Direction:
        """Returns the direction for `target` at `key`; `state` is the update rule's state of the parameter."""


def dense(target: Target, key: DrawKey) -> Dense:
    """Returns standard normal noise for `target`."""
    return Dense(
        shape=target.stored_shape,
        device=target.device,
        dtype=target.state_dtype,
        seed=key.seed,
        step=key.step,
        name=target.name,
        role=f"z.{key.index}",
    )


class DenseGaussian(Perturbation):
    """MeZO's z ~ N(0, I), drawn on the parameter's device and redrawn from its key instead of being stored."""

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> Dense:
        del state
        return dense(target, key)


class LowRankPerturbation(Perturbation):
    """Low-rank directions for matrices, dense noise for 1-D parameters.

    Args:
        rank: rule for the rank of each matrix.
        scale: scale of the directions, see `Scale`.
        basis: source of the fixed factors, or its name.
        interval: steps between two refreshes of the fixed factors; None: they are fixed for the whole run.
    """

    def __init__(
        self, rank: RankRule, scale: Scale, *, basis: str | Basis = "gaussian", interval: int | None = None
    ) -> None:
        if scale not in get_args(Scale):
            raise RequestError(f"method.scale is {scale!r}; it must be one of {', '.join(get_args(Scale))}.")
        if interval is not None and interval < 1:
            raise RequestError(f"method.lazy_update_interval is {interval}; it must be at least 1.")
        self.rank = rank
        self.scale: Scale = scale
        self.basis = find_basis(basis)
        self.interval = interval
        self._ranks: dict[str, int] = {}
        self._matrices: list[Target] = []
        self._factors: dict[str, tuple[tuple[int, int], dict[str, Tensor]]] = {}

    def prepare(self, targets: Sequence[Target]) -> None:
        self._matrices = [target for target in targets if target.is_matrix]
        self._ranks = self.rank.ranks(self._matrices)
        self._factors.clear()
        self.basis.prepare(self._matrices, self._ranks)

    def direction_type(self, target: Target) -> type[Direction]:
        return self.draws if target.is_matrix else Dense

    def set_calibration_passes(self, model: nn.Module, passes: Passes) -> None:
        self.basis.set_calibration_passes(model, passes)

    def set_factor_store(self, store: FactorStore) -> None:
        self.basis.set_factor_store(store)
        self._factors.clear()

    @property
    def cost_of_basis(self) -> tuple[int, float]:  # type: ignore[override]
        return self.basis.cost

    def state(self) -> dict[str, Tensor]:
        return self.basis.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.basis.load_state(state)
        self._factors.clear()

    def rank_of(self, name: str) -> int | None:
        return self._ranks.get(name)

    @property
    def factor_bytes(self) -> int:  # type: ignore[override]
        return sum(
            self._ranks[target.name] * target.matrix_shape["uv".index(role)] * _factor_dtype(target).itemsize
            for target in self._matrices
            for role in self.fixed(target)
        )

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> Direction:
        del state
        return self.matrix_direction(target, key) if target.is_matrix else dense(target, key)

    @abstractmethod
    def matrix_direction(self, target: Target, key: DrawKey) -> FixedFactors:
        """Returns the low-rank direction for a matrix."""

    def fixed(self, target: Target) -> tuple[Role, ...]:
        """Returns the roles of the factors that are fixed between refreshes."""
        del target
        return ("u", "v")

    @abstractmethod
    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        """Returns the fixed factors from a step on, scale included: role -> (M, r) or (N, r), float64, on the CPU.

        Args:
            target: the matrix.
            seed: seed of the run.
            refresh_step: first step of these factors.
        """

    def refresh_step(self, step: int) -> int:
        """Returns the first step of the interval that contains `step`."""
        return 0 if self.interval is None else step - step % self.interval

    def before(self, target: Target, key: DrawKey) -> Callable[[], dict[str, Tensor]] | None:
        """Returns a function that draws the last interval's factors; None unless the step is a refresh after step 0."""
        if key.step == 0 or self.refresh_step(key.step) != key.step:
            return None
        return partial(self._placed, target, key.seed, self.refresh_step(key.step - 1))

    def _placed(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        drawn = self.draw_factors(target, seed, refresh_step)
        return {role: factor.to(target.device, _factor_dtype(target)) for role, factor in drawn.items()}

    def factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        """Returns `draw_factors` on the parameter's device in its dtype (float32 if packed); caches the latest set."""
        kept = self._factors.get(target.name)
        if kept is None or kept[0] != (seed, refresh_step):
            kept = self._factors[target.name] = ((seed, refresh_step), self._placed(target, seed, refresh_step))
        return kept[1]

    @staticmethod
    def numbers(shape: tuple[int, ...], target: Target, key: DrawKey, role: str) -> OwnNumbers:
        """Returns standard normal coefficients of this step, in the target's state dtype, on its device."""
        return OwnNumbers(
            shape=shape,
            device=target.device,
            dtype=target.state_dtype,
            seed=key.seed,
            step=key.step,
            name=target.name,
            role=f"{role}.{key.index}",
        )


def _factor_dtype(target: Target) -> torch.dtype:
    stored = target.parameter.dtype
    return stored if stored.is_floating_point else torch.float32
