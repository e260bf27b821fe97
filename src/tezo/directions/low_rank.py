"""The low-rank perturbations of TeZO, LOZO and SubZO."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from tezo.directions.bases.basis import ROLES, Basis, GaussianBasis, Predictions, Role
from tezo.directions.perturbation import Perturbation, dense
from tezo.directions.random import DrawKey, Signs, fill_normal_, normal
from tezo.directions.ranks import RankRule
from tezo.directions.spaces import (
    CP,
    BothFixed,
    CoefficientDraw,
    Core,
    Direction,
    FixedFactors,
    LowRank,
    OwnNumbers,
    SignedNumbers,
    TransposedLowRank,
    Zeros,
)
from tezo.directions.targets import Target
from tezo.system.errors import RequestError

Scale = Literal["unit", "raw"]
"""Scale of low-rank directions. "unit": every entry of Z has variance 1, as in MeZO, so that rho and the learning rate
carry over between methods, ranks and layers, and the estimate is the unbiased one of Theorem 1. "raw": Algorithm 1
exactly as printed. If the entries of the raw Z have standard deviation s, then (rho, lr) with "raw" corresponds to
(rho s, lr s^2) with "unit" for plain and momentum steps, and to (rho s, lr) for Adam."""


@dataclass(frozen=True)
class Interval:
    """The fixed part of the directions of a matrix, from one refresh to the next.

    Attributes:
        key: (seed, refresh step).
        zero: of their coefficients.
        origin: zero of their space: a direction has another coefficient and the same factors.
        proposals_JR: coefficients that the basis proposes; None: they are drawn.
    """

    key: tuple[int, int]
    zero: Zeros
    origin: FixedFactors
    proposals_JR: Tensor | None


class LowRankPerturbation(Perturbation):
    """Low-rank directions for matrices, dense noise for 1-D parameters.

    Args:
        rank: rule for the rank of each matrix.
        scale: scale of the directions, see `Scale`.
        basis: source of the fixed factors; None: they are Gaussian.
        interval: steps between two refreshes of the fixed factors; None: they are fixed for the whole run.
    """

    def __init__(
        self, rank: RankRule, scale: Scale, *, basis: Basis | None = None, interval: int | None = None
    ) -> None:
        if scale not in get_args(Scale):
            raise RequestError(f"method.scale is {scale!r}; it must be one of {', '.join(get_args(Scale))}.")
        if interval is not None and interval < 1:
            raise RequestError(f"method.lazy_update_interval is {interval}; it must be at least 1.")
        self.rank = rank
        self.scale: Scale = scale
        self.basis = GaussianBasis() if basis is None else basis
        self.interval = interval
        self._ranks: dict[str, int] = {}
        self._matrices: list[Target] = []
        self._kept: dict[str, Interval] = {}

    def prepare(self, targets: Sequence[Target]) -> None:
        self._matrices = [target for target in targets if target.is_matrix]
        self._ranks = self.rank.ranks(self._matrices)
        self.forget()
        self.basis.prepare(self._matrices, self._ranks)

    def rank_of(self, name: str) -> int | None:
        return self._ranks.get(name)

    @property
    def factor_bytes(self) -> int:
        return sum(
            self._ranks[target.name] * target.matrix_shape["uv".index(role)] * _factor_dtype(target).itemsize
            for target in self._matrices
            for role in self.fixed(target)
        )

    def refresh_step(self, step: int) -> int:
        return 0 if self.interval is None else step - step % self.interval

    def refresh(self, target: Target, key: DrawKey) -> FixedFactors | None:
        if target.name not in self._ranks:
            return None
        self._kept[target.name] = kept = self._interval(target, key)
        return kept.origin

    def forget(self) -> None:
        self._kept.clear()

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> Direction:
        del state
        return self.matrix_direction(target, key) if target.name in self._ranks else dense(target, key)

    def matrix_direction(self, target: Target, key: DrawKey) -> FixedFactors:
        """Returns the low-rank direction for a matrix."""
        interval = self._interval(target, key)
        if interval.proposals_JR is not None and key.index < len(interval.proposals_JR):
            drawn = interval.origin.with_coefficient(interval.proposals_JR[key.index])
        else:
            drawn = replace(interval.origin, draw=self.draw(target, key, interval.zero))
        start = interval.key[1]
        if start == key.step > 0:
            before = partial(self._placed, target, key.seed, self.refresh_step(start - 1))
            return replace(drawn, before=before)
        return drawn

    def _interval(self, target: Target, key: DrawKey) -> Interval:
        """Returns the parts that `refresh` has kept if they hold at `key`, else the same from their source."""
        start = self.refresh_step(key.step)
        kept = self._kept.get(target.name)
        if kept is not None and kept.key == (key.seed, start):
            return kept
        zero = Zeros(self.shape(target), target.state_dtype, target.device)
        origin = self.origin(target, zero, start, self._placed(target, key.seed, start))
        proposals_JR = self.proposals(start)
        if proposals_JR is not None:
            proposals_JR = proposals_JR[:, : self._ranks[target.name]].to(target.device, target.state_dtype)
        return Interval((key.seed, start), zero, origin, proposals_JR)

    @abstractmethod
    def shape(self, target: Target) -> tuple[int, ...]:
        """Returns the shape of a coefficient."""

    @abstractmethod
    def origin(self, target: Target, zero: Zeros, refresh_step: int, factors: Mapping[str, Tensor]) -> FixedFactors:
        """Returns zero of the space of directions with these fixed factors."""

    @abstractmethod
    def draw(self, target: Target, key: DrawKey, zero: Zeros) -> CoefficientDraw:
        """Returns the draw of the coefficient of a direction, which is like `zero`."""

    def proposals(self, refresh_step: int) -> Tensor | None:
        """Returns coefficients that the basis proposes, (J, rank); None: they are drawn."""
        del refresh_step
        return None

    def fixed(self, target: Target) -> tuple[Role, ...]:
        """Returns the roles of the factors that are fixed between refreshes."""
        del target
        return ROLES

    @abstractmethod
    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        """Returns the fixed factors from a step on, scale included: role -> (M, r) or (N, r), float64, on the CPU."""

    def _placed(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        """Returns `draw_factors` on the parameter's device, in its dtype (float32 if packed)."""
        drawn = self.draw_factors(target, seed, refresh_step)
        return {role: factor.to(target.device, _factor_dtype(target)) for role, factor in drawn.items()}


def _factor_dtype(target: Target) -> torch.dtype:
    stored = target.parameter.dtype
    return stored if stored.is_floating_point else torch.float32


class Lazy(LowRankPerturbation):
    """LOZO's Z_t = U_t V_k^T: u_MR is drawn every step, v_NR once per interval, or once per run.

    Unit scale: V includes the factor r^(-1/2). V belongs to the columns of W, as published. With a data-dependent basis
    V belongs to the input side of the layer; in GPT-2's Conv1D layers these are the rows of W.
    """

    draws = LowRank

    def shape(self, target: Target) -> tuple[int, ...]:
        (role,) = self.fixed(target)
        return target.matrix_shape[0 if role == "v" else 1], self._ranks[target.name]

    def origin(self, target: Target, zero: Zeros, refresh_step: int, factors: Mapping[str, Tensor]) -> LowRank:
        (role,), v_IR = self.fixed(target), factors["v"]
        gram: float | Tensor = len(v_IR) * self._factor(self._ranks[target.name]) ** 2
        if self.basis.data_dependent:  # columns are orthogonal; their lengths may differ
            gram = v_IR.to(zero.dtype).square().sum(0).clamp_min(torch.finfo(zero.dtype).tiny)  # of columns of zeros
        kind = LowRank if role == "v" else TransposedLowRank
        return kind(draw=zero, v_NR=v_IR, refresh_step=refresh_step, gram=gram)

    def draw(self, target: Target, key: DrawKey, zero: Zeros) -> SignedNumbers:
        draw_key = key.of(target.name, "u")

        def draw() -> Tensor:
            # M x r numbers every step are too many for the CPU; like dense noise they are drawn on the weight's device
            return fill_normal_(torch.empty(zero.shape, dtype=zero.dtype, device=zero.device), **draw_key)

        return SignedNumbers(draw, Signs(zero.shape[0], draw_key))

    def fixed(self, target: Target) -> tuple[Role, ...]:
        return ((target.input_role or "v") if self.basis.data_dependent else "v",)

    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        rank, (role,) = self._ranks[target.name], self.fixed(target)
        return {"v": self.basis.factor(role, target, rank, seed, refresh_step) * self._factor(rank)}

    def _factor(self, rank: int) -> float:
        return 1.0 if self.scale == "raw" else float(rank**-0.5)


class BothSides(LowRankPerturbation):
    """Z_t = U_k C_t V_k^T: U and V are drawn once per interval, or once per run, and C every step."""

    draws: type[BothFixed]
    purpose: ClassVar[str]
    """Name of the draw of the coefficient."""

    def origin(self, target: Target, zero: Zeros, refresh_step: int, factors: Mapping[str, Tensor]) -> BothFixed:
        del target
        return self.draws(draw=zero, u_MR=factors["u"], v_NR=factors["v"], refresh_step=refresh_step)

    def draw(self, target: Target, key: DrawKey, zero: Zeros) -> OwnNumbers:
        return OwnNumbers(partial(normal, **key.of(target.name, self.purpose)), zero)


class Subspace(BothSides):
    """SubZO's Z_t = U_k S_t V_k^T: core_RR is standard normal and drawn every step; U and V once per interval.

    The basis is orthonormal. Unit scale: U includes the factor (M/r)^(1/2) and V (N/r)^(1/2); their product is the
    published sqrt(M N) / r.
    """

    draws = Core
    purpose = "core"

    def shape(self, target: Target) -> tuple[int, ...]:
        return self._ranks[target.name], self._ranks[target.name]

    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        rank = self._ranks[target.name]
        drawn = ((role, self.basis.factor(role, target, rank, seed, refresh_step)) for role in ROLES)
        return {role: factor / (rank if self.scale == "unit" else len(factor)) ** 0.5 for role, factor in drawn}


class Temporal(BothSides):
    """TeZO's Z_t = U diag(tau_t) V^T, low-rank over the model and over time (Eq. 3, Algorithm 1).

    u_MR and v_NR are drawn once per run or interval, tau_R ~ N(0, I_r) every step; a basis may propose tau_R. Unit
    scale: V includes the factor r^(-1/2).
    """

    draws = CP
    purpose = "tau"

    def shape(self, target: Target) -> tuple[int, ...]:
        return (self._ranks[target.name],)

    def num_directions(self, most: int) -> int:
        proposals = self._known_proposals()
        return most if proposals is None else min(most, len(proposals))

    def predictions(self, step: int) -> Predictions | None:
        if self._known_proposals() is None or step != self.refresh_step(step):
            return None  # later steps have other rows
        return self.basis.predictions(step)

    def _known_proposals(self) -> Tensor | None:
        kept = next(iter(self._kept.values()), None)  # alike for all matrices
        return None if kept is None else kept.proposals_JR

    def proposals(self, refresh_step: int) -> Tensor | None:
        return self.basis.proposals(refresh_step)

    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        rank = self._ranks[target.name]
        u_MR, v_NR = (self.basis.factor(role, target, rank, seed, refresh_step) for role in ROLES)
        return {"u": u_MR, "v": v_NR if self.scale == "raw" else v_NR * rank**-0.5}
