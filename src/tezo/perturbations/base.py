"""What a perturbation is: it draws a direction for a parameter, as a pure function of (seed, step, index)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tezo.bases import Basis, FactorStore, Passes, Role, find_basis
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
    """Steps between two sets of fixed factors, when the change is folded; None: they stay."""

    draws: type[Direction] = Dense
    """Of the directions of matrices."""

    def prepare(self, targets: Sequence[Target]) -> None:
        """Called once, with what will be tuned."""
        del targets

    def direction_type(self, target: Target) -> type[Direction]:
        """Of the directions for `target`; nothing is drawn."""
        del target
        return self.draws

    def watch(self, model: nn.Module, passes: Passes) -> None:
        """What a basis that sees the data is to look at; see `tezo.bases`."""
        del model, passes

    def keep_in(self, store: FactorStore) -> None:
        """Where it is to keep what it saw."""
        del store

    @property
    def cost_of_basis(self) -> tuple[int, float]:
        """(calls of the model, seconds) that looking has taken so far."""
        return 0, 0.0

    def state(self) -> dict[str, Tensor]:
        """What directions depend on and cannot be drawn again."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Puts a `state` back."""
        del state

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
        basis: where fixed factors come from.
        interval: steps that they are kept for; None: the whole run.
        share_factors: one set of fixed factors for all matrices of the same shape and rank, dtype and device.
    """

    def __init__(
        self,
        rank: RankRule,
        scale: Scale,
        *,
        basis: str | Basis = "gaussian",
        interval: int | None = None,
        share_factors: bool = False,
    ) -> None:
        if scale not in get_args(Scale):
            raise RequestError(f"method.scale is {scale!r}; it must be one of {', '.join(get_args(Scale))}.")
        if interval is not None and interval < 1:
            raise RequestError(f"method.lazy_update_interval is {interval}; it must be at least 1.")
        self.rank = rank
        self.scale: Scale = scale
        self.basis = find_basis(basis)
        self.interval = interval
        if share_factors and self.basis.sees_data:
            raise RequestError(
                "method.share_factors is true, and method.basis sees each matrix's own inputs; set one or the other."
            )
        self.share_factors = share_factors
        self._ranks: dict[str, int] = {}
        self._matrices: list[Target] = []
        self._factors: dict[tuple[str, torch.device, torch.dtype], tuple[tuple[int, int], dict[str, Tensor]]] = {}

    def prepare(self, targets: Sequence[Target]) -> None:
        self._matrices = [target for target in targets if target.is_matrix]
        self._ranks = self.rank.ranks(self._matrices)
        self._factors.clear()
        self.basis.prepare(self._matrices, self._ranks)

    def direction_type(self, target: Target) -> type[Direction]:
        return self.draws if target.is_matrix else Dense

    def watch(self, model: nn.Module, passes: Passes) -> None:
        self.basis.watch(model, passes)

    def keep_in(self, store: FactorStore) -> None:
        self.basis.keep_in(store)
        self._factors.clear()

    @property
    def cost_of_basis(self) -> tuple[int, float]:
        return self.basis.cost

    def state(self) -> dict[str, Tensor]:
        return self.basis.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.basis.load_state(state)
        self._factors.clear()

    def rank_of(self, name: str) -> int | None:
        return self._ranks.get(name)

    def direction(self, target: Target, moment: Moment, state: Mapping[str, Tensor]) -> Direction:
        del state
        return self.matrix_direction(target, moment) if target.is_matrix else dense(target, moment)

    @abstractmethod
    def matrix_direction(self, target: Target, moment: Moment) -> FixedFactors:
        """The low-rank direction for a matrix."""

    def fixed(self, target: Target) -> tuple[Role, ...]:
        """The sides of a matrix whose factors are fixed."""
        del target
        return ("u", "v")

    @abstractmethod
    def draw_factors(self, target: Target, owner: str, seed: int, born: int) -> dict[str, Tensor]:
        """The factors that stay fixed from step `born` on, in float64 on the CPU, scale included.

        Args:
            target: whose shape and rank they have.
            owner: name that they are drawn by.
            seed: of the run.
            born: the first step of theirs.
        """

    def born(self, step: int) -> int:
        """The step from which on the factors of `step` hold."""
        return 0 if self.interval is None else step - step % self.interval

    def before(self, target: Target, moment: Moment) -> Callable[[], dict[str, Tensor]] | None:
        """Draws the factors that were in use until the last step, if there were others."""
        born = self.born(moment.step)
        if born == 0 or born != moment.step:
            return None
        return partial(self._placed, target, self._owner(target), moment.seed, self.born(born - 1))

    def _placed(self, target: Target, owner: str, seed: int, born: int) -> dict[str, Tensor]:
        drawn = self.draw_factors(target, owner, seed, born)
        return {role: factor.to(*self._place_of(target)) for role, factor in drawn.items()}

    def factors(self, target: Target, seed: int, born: int) -> dict[str, Tensor]:
        """`draw_factors`, cast to the parameter's dtype and device; the newest set is kept for the next call."""
        owner, place = self._owner(target), self._place_of(target)
        kept = self._factors.get((owner, *place))
        if kept is None or kept[0] != (seed, born):
            kept = ((seed, born), self._placed(target, owner, seed, born))
            self._factors[(owner, *place)] = kept
        return kept[1]

    def _owner(self, target: Target) -> str:
        rows, columns = target.matrix_shape
        return f"{rows} x {columns}, rank {self._ranks[target.name]}" if self.share_factors else target.name

    @staticmethod
    def _place_of(target: Target) -> tuple[torch.device, torch.dtype]:
        stored = target.parameter.dtype
        return target.device, stored if stored.is_floating_point else torch.float32

    @property
    def factor_bytes(self) -> int:
        """Bytes of the fixed factors."""
        own = {(self._owner(target), *self._place_of(target)): target for target in self._matrices}
        return sum(
            self._ranks[target.name] * sum(target.matrix_shape["uv".index(role)] for role in self.fixed(target))
            * dtype.itemsize
            for (_, _, dtype), target in own.items()
        )  # fmt: skip

    def coefficient(self, shape: tuple[int, ...], target: Target, moment: Moment, role: str) -> Tensor:
        """A fresh standard normal coefficient in the target's state dtype, on its device."""
        drawn = normal(shape, seed=moment.seed, step=moment.step, name=target.name, role=f"{role}.{moment.index}")
        return drawn.to(target.device, target.state_dtype)
