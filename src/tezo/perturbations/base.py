"""What a perturbation is: it draws a direction for a parameter, as a pure function of (seed, step, index)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tezo.directions import Dense, Direction, FixedFactors
from tezo.errors import RequestError
from tezo.params import Target
from tezo.random import normal
from tezo.rank import RankRule

Scale = Literal["unit", "raw"]
"""Of low-rank directions. "unit": every entry of Z has variance 1, as MeZO's has, so that rho and the
learning rate carry over between methods, ranks and layers, and the estimate is the unbiased one of
Theorem 1. "raw": Algorithm 1 to the letter. With entries of standard deviation s, (rho, lr) under raw is
(rho s, lr s^2) under unit for plain and momentum steps, and (rho s, lr) for Adam."""


@dataclass(frozen=True)
class Moment:
    """When a direction is drawn: the run's seed, the step from 0, and which of the step's directions."""

    seed: int
    step: int
    index: int = 0


class Perturbation(ABC):
    """A rule that draws directions. Update and perturbation use the one direction that it returns."""

    single_direction = False
    """Whether only one direction a step is defined."""

    interval: int | None = None
    """Steps between two sets of fixed factors, when the change is folded into the weights; None: they stay."""

    def prepare(self, targets: Sequence[Target]) -> None:
        """Called once, with what will be tuned."""
        del targets

    def rank_of(self, name: str) -> int | None:
        """The rank of a parameter's directions; None where they are dense."""
        del name
        return None

    @property
    def factor_bytes(self) -> int:
        """Bytes of what is kept for drawing directions."""
        return 0

    @abstractmethod
    def direction(self, target: Target, moment: Moment, state: Mapping[str, Tensor]) -> Direction:
        """The direction for `target` at `moment`; `state` is what the update rule keeps for it."""


def dense(target: Target, moment: Moment) -> Dense:
    """Standard normal noise for `target`."""
    return Dense(
        shape=target.stored_shape,
        device=target.device,
        dtype=target.state_dtype,
        seed=moment.seed,
        step=moment.step,
        name=target.name,
        role=f"z.{moment.index}",
    )


class LowRankPerturbation(Perturbation):
    """Low-rank directions for matrices, dense noise for 1-D parameters.

    Args:
        rank: rule that gives each matrix its rank.
        scale: see `Scale`.
        share_factors: one set of fixed factors for all matrices of the same shape and rank, dtype and device.
    """

    def __init__(self, rank: RankRule, scale: Scale, *, share_factors: bool = False) -> None:
        if scale not in get_args(Scale):
            raise RequestError(f"method.scale is {scale!r}; it must be one of {', '.join(get_args(Scale))}.")
        self.rank = rank
        self.scale: Scale = scale
        self.share_factors = share_factors
        self._ranks: dict[str, int] = {}
        self._factors: dict[str, tuple[tuple[int, int], dict[str, Tensor]]] = {}

    def prepare(self, targets: Sequence[Target]) -> None:
        self._ranks = self.rank.ranks([target for target in targets if target.is_matrix])
        self._factors.clear()

    def rank_of(self, name: str) -> int | None:
        return self._ranks.get(name)

    def direction(self, target: Target, moment: Moment, state: Mapping[str, Tensor]) -> Direction:
        del state
        return self.matrix_direction(target, moment) if target.is_matrix else dense(target, moment)

    @abstractmethod
    def matrix_direction(self, target: Target, moment: Moment) -> FixedFactors:
        """The low-rank direction for a matrix."""

    @abstractmethod
    def draw_factors(self, target: Target, owner: str, seed: int, born: int) -> dict[str, Tensor]:
        """The factors that stay fixed from step `born` on, in float64 on the CPU, scale included.

        Args:
            target: whose shape and rank they have.
            owner: name that they are drawn by.
            seed: of the run.
            born: the first step of theirs.
        """

    def factors(self, target: Target, seed: int, born: int) -> dict[str, Tensor]:
        """`draw_factors`, cast to the parameter's dtype and device; the newest set is kept for the next call."""
        owner, place = target.name, ""
        if self.share_factors:
            rows, columns = target.matrix_shape
            owner = f"{rows} x {columns}, rank {self._ranks[target.name]}"
            place = f" {target.parameter.dtype} {target.device}"
        kept = self._factors.get(owner + place)
        if kept is None or kept[0] != (seed, born):
            drawn = self.draw_factors(target, owner, seed, born)
            kept = ((seed, born), {role: self._place(factor, target) for role, factor in drawn.items()})
            self._factors[owner + place] = kept
        return kept[1]

    @property
    def factor_bytes(self) -> int:
        """Bytes of the fixed factors."""
        return sum(factor.nbytes for _, factors in self._factors.values() for factor in factors.values())

    def coefficient(self, shape: tuple[int, ...], target: Target, moment: Moment, role: str) -> Tensor:
        """A fresh standard normal coefficient in the target's state dtype, on its device."""
        drawn = normal(shape, seed=moment.seed, step=moment.step, name=target.name, role=f"{role}.{moment.index}")
        return drawn.to(target.device, target.state_dtype)

    @staticmethod
    def _place(factor: Tensor, target: Target) -> Tensor:
        stored = target.parameter.dtype
        return factor.to(target.device, stored if stored.is_floating_point else torch.float32)


def check_interval(lazy_update_interval: int) -> None:
    """An error where an interval between refreshes is not a positive number of steps."""
    if lazy_update_interval < 1:
        raise RequestError(f"method.lazy_update_interval is {lazy_update_interval}; it must be at least 1.")
