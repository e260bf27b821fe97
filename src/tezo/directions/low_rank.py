"""The low-rank perturbations of TeZO, LOZO and SubZO."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from tezo.directions.bases.basis import ROLES, Basis, Foretold, GaussianBasis, Role
from tezo.directions.perturbation import DrawKey, Perturbation, dense
from tezo.directions.random import Signs, fill_normal_, normal
from tezo.directions.ranks import RankRule
from tezo.directions.spaces import (
    CP,
    BothFixed,
    Core,
    Direction,
    FixedFactors,
    LowRank,
    OwnNumbers,
    SignedNumbers,
    TransposedLowRank,
)
from tezo.directions.targets import Target
from tezo.system.errors import RequestError

Scale = Literal["unit", "raw"]
"""Scale of low-rank directions. "unit": every entry of Z has variance 1, as in MeZO, so that rho and the learning rate
carry over between methods, ranks and layers, and the estimate is the unbiased one of Theorem 1. "raw": Algorithm 1
exactly as printed. If the entries of the raw Z have standard deviation s, then (rho, lr) with "raw" corresponds to
(rho s, lr s^2) with "unit" for plain and momentum steps, and to (rho s, lr) for Adam."""

Before = Callable[[], dict[str, Tensor]] | None
"""Draws the factors of the last interval; None unless the step is a refresh after step 0."""


class LowRankPerturbation(Perturbation):
    """Low-rank directions for matrices, dense noise for 1-D parameters.

    Args:
        rank: rule for the rank of each matrix.
        scale: scale of the directions, see `Scale`.
        basis: source of the fixed factors; None: they are Gaussian.
        interval: steps between two refreshes of the fixed factors; None: they are fixed for the whole run.
    """

    coefficient: ClassVar[tuple[str, int]]
    """Purpose of the draw of a coefficient that is drawn on the CPU, and its dimensions, each of the rank's size."""

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
        self._factors: dict[str, tuple[tuple[int, ...], dict[str, Tensor]]] = {}

    def prepare(self, targets: Sequence[Target]) -> None:
        self._matrices = [target for target in targets if target.is_matrix]
        self._ranks = self.rank.ranks(self._matrices)
        self._factors.clear()
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

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> Direction:
        del state
        return self.matrix_direction(target, key) if target.is_matrix else dense(target, key)

    def matrix_direction(self, target: Target, key: DrawKey) -> FixedFactors:
        """Returns the low-rank direction for a matrix; here U and V are fixed."""
        factors, start, before = self.interval_of(target, key)
        purpose, dimensions = self.coefficient
        shape = (self._ranks[target.name],) * dimensions
        draw = OwnNumbers(partial(normal, **key.of(target, purpose)), shape, target.device, target.state_dtype)
        assert issubclass(self.draws, BothFixed)
        return self.draws(draw=draw, u_MR=factors["u"], v_NR=factors["v"], refresh_step=start, before=before)

    def interval_of(self, target: Target, key: DrawKey) -> tuple[dict[str, Tensor], int, Before]:
        """Returns the fixed factors at a step, the first step that has them, and a draw of those before at that step.

        They are on the parameter's device in its dtype (float32 if packed).
        """
        start, before = self.refresh_step(key.step), None
        cached = key.seed, start, self.basis.version
        if self._factors.get(target.name, ((),))[0] != cached:
            self._factors[target.name] = cached, self._placed(target, key.seed, start)
        if start == key.step > 0:
            before = partial(self._placed, target, key.seed, self.refresh_step(start - 1))
        return self._factors[target.name][1], start, before

    def fixed(self, target: Target) -> tuple[Role, ...]:
        """Returns the roles of the factors that are fixed between refreshes."""
        del target
        return ROLES

    @abstractmethod
    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        """Returns the fixed factors from a step on, scale included: role -> (M, r) or (N, r), float64, on the CPU."""

    def refresh_step(self, step: int) -> int:
        """Returns the first step of the interval that contains `step`."""
        return 0 if self.interval is None else step - step % self.interval

    def _placed(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
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

    def matrix_direction(self, target: Target, key: DrawKey) -> LowRank:
        factors, start, before = self.interval_of(target, key)
        (role,), rank, v_IR = self.fixed(target), self._ranks[target.name], factors["v"]
        rows, device, dtype = target.matrix_shape[0 if role == "v" else 1], target.device, target.state_dtype

        def draw() -> Tensor:
            # M x r numbers every step are too many for the CPU; like dense noise they are drawn on the weight's device
            return fill_normal_(torch.empty(rows, rank, dtype=dtype, device=device), **key.of(target, "u"))

        gram: float | Tensor = len(v_IR) * self._factor(rank) ** 2
        if self.basis.data_dependent:  # columns are orthogonal; their lengths may differ
            gram = v_IR.to(dtype).square().sum(0).clamp_min(torch.finfo(dtype).tiny)  # of columns of zeros
        numbers = SignedNumbers(draw, Signs(rows, key.of(target, "u")))
        kind = LowRank if role == "v" else TransposedLowRank
        return kind(draw=numbers, v_NR=v_IR, refresh_step=start, before=before, gram=gram)

    def fixed(self, target: Target) -> tuple[Role, ...]:
        return ((target.input_role or "v") if self.basis.data_dependent else "v",)

    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        rank, (role,) = self._ranks[target.name], self.fixed(target)
        return {"v": self.basis.factor(role, target, rank, seed, refresh_step) * self._factor(rank)}

    def _factor(self, rank: int) -> float:
        return 1.0 if self.scale == "raw" else float(rank**-0.5)


class Subspace(LowRankPerturbation):
    """SubZO's Z_t = U_k S_t V_k^T: core_RR is standard normal and drawn every step; U and V once per interval.

    The basis is orthonormal. Unit scale: U includes the factor (M/r)^(1/2) and V (N/r)^(1/2); their product is the
    published sqrt(M N) / r.
    """

    draws = Core
    coefficient = "core", 2

    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        rank = self._ranks[target.name]
        drawn = ((role, self.basis.factor(role, target, rank, seed, refresh_step)) for role in ROLES)
        return {role: factor / (rank if self.scale == "unit" else len(factor)) ** 0.5 for role, factor in drawn}


class Temporal(LowRankPerturbation):
    """TeZO's Z_t = U diag(tau_t) V^T, low-rank over the model and over time (Eq. 3, Algorithm 1).

    u_MR and v_NR are drawn once per run or interval, tau_R ~ N(0, I_r) every step; a basis may propose tau_R. Unit
    scale: V includes the factor r^(-1/2).
    """

    draws = CP
    coefficient = "tau", 1

    def num_directions(self, step: int, most: int) -> int:
        proposed_JR = self.basis.proposed(self.refresh_step(step))
        return most if proposed_JR is None else min(most, len(proposed_JR))

    def foretold(self, step: int) -> Foretold | None:
        return self.basis.foretold(step) if step == self.refresh_step(step) else None  # later ones have other rows

    def matrix_direction(self, target: Target, key: DrawKey) -> FixedFactors:
        drawn = super().matrix_direction(target, key)
        proposed_JR = self.basis.proposed(drawn.refresh_step)
        if proposed_JR is None or key.index >= len(proposed_JR):
            return drawn
        tau_R = proposed_JR[key.index, : self._ranks[target.name]]
        return drawn.with_coefficient(tau_R.to(target.device, target.state_dtype))

    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        rank = self._ranks[target.name]
        u_MR, v_NR = (self.basis.factor(role, target, rank, seed, refresh_step) for role in ROLES)
        return {"u": u_MR, "v": v_NR if self.scale == "raw" else v_NR * rank**-0.5}
