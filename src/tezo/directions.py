"""What a direction is: a point Z of the space that a perturbation draws from, at unit scale.

Every type is linear in its `coefficient`, the part that changes from step to step; whatever is fixed
over several steps (the factors) is the rest. Estimates, momenta and accumulated changes are then
coefficients too, and update rules are written once, on coefficients:

| type      | Z                  | coefficient | fixed        | drawn by            |
|-----------|--------------------|-------------|--------------|---------------------|
| `CP`      | U diag(tau) V^T    | tau_R       | u_MR, v_NR   | TeZO                |
| `LowRank` | U V^T              | u_MR        | v_NR         | LOZO                |
| `Core`    | U S V^T            | core_RR     | u_MR, v_NR   | SubZO               |
| `Dense`   | z                  | z itself    | nothing      | MeZO, ZO-AdaMU, 1-D |

Shape suffixes: M rows and N columns of the weight as it is stored, R the rank, G blocks of T rows of inputs.
The scale that gives every entry of Z variance 1 is inside the fixed factors (see `perturbations`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from tezo.random import fill_normal_
from tezo.scratch import scratch

TILE = 1 << 18
"""Entries of a dense tile: the largest temporary that a dense draw or write makes."""

Tile = tuple[slice, Tensor]


def row_tiles(shape: torch.Size | tuple[int, ...]) -> Iterator[slice]:
    """Slices of the leading dimension, each of at most `TILE` entries (at least one row).

    They depend on the shape alone: each tile of a dense direction is a draw of its own.
    """
    per_row = max(1, int(torch.Size(shape[1:]).numel()))
    step = max(1, TILE // per_row)
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


class Direction(ABC):
    """A direction Z for one parameter."""

    @abstractmethod
    def tiles(self, factor: float = 1.0) -> Iterator[Tile]:
        """The coefficient times `factor`, in parts: (rows, values), float32 or wider; the next may overwrite a part."""

    @abstractmethod
    def add_to_(self, weight_MN: Tensor, alpha: float) -> None:
        """Weight += alpha * Z, in place and without building Z."""


@dataclass(frozen=True, kw_only=True)
class Dense(Direction):
    """Standard normal noise of the parameter's shape.

    A matrix of it is redrawn from its key, tile by tile, whenever it is needed; a vector is kept with the direction.
    """

    shape: torch.Size
    device: torch.device
    dtype: torch.dtype
    seed: int
    step: int
    name: str
    role: str = "z"

    def tiles(self, factor: float = 1.0) -> Iterator[Tile]:
        if len(self.shape) == 1:
            yield slice(None), self.vector * factor
            return
        for rows in row_tiles(self.shape):
            z = self.tile(rows)
            yield rows, z if factor == 1.0 else z.mul_(factor)

    def tile(self, rows: slice) -> Tensor:
        """Z[rows], for one of the slices of `row_tiles(shape)`, in scratch memory: the next tile overwrites it."""
        return self.noise(rows, self.role)

    def noise(self, rows: slice, role: str) -> Tensor:
        """Standard normal numbers of the shape of Z[rows], in the scratch memory of `role`."""
        out = scratch(role, (rows.stop - rows.start, *self.shape[1:]), self.dtype, self.device)
        return fill_normal_(out, seed=self.seed, step=self.step, name=self.name, role=f"{role}.{rows.start}")

    @cached_property
    def vector(self) -> Tensor:
        """Z of a vector, in memory of its own."""
        return torch.cat([self.tile(rows).clone() for rows in row_tiles(self.shape)])

    def add_to_(self, weight_MN: Tensor, alpha: float) -> None:
        for rows, z in self.tiles(alpha):
            weight_MN[rows] += z.to(weight_MN.dtype)


@dataclass(frozen=True, kw_only=True)
class FixedFactors(Direction):
    """A low-rank direction: at least one factor stays fixed from step `born` on.

    A coefficient with a leading dimension G stands for G points of one space. `linear`, `linear_transposed` and
    `lookup` then take G blocks of inputs, and block g meets point g; G = 1 and no such dimension are alike. They
    compute in the dtype of the inputs, `lookup` in that of the coefficient, whatever the factors are stored in.
    """

    coefficient: Tensor
    v_NR: Tensor
    born: int

    def tiles(self, factor: float = 1.0) -> Iterator[Tile]:
        yield slice(None), self.coefficient * factor

    def with_coefficient(self, coefficient: Tensor) -> Self:
        """The point with another coefficient and the same fixed factors."""
        return replace(self, coefficient=coefficient)

    def add_to_(self, weight_MN: Tensor, alpha: float) -> None:
        # W += alpha * left @ right^T
        left_MR, right_NR = self.factors()
        weight_MN.addmm_(left_MR.to(weight_MN.dtype), right_NR.to(weight_MN.dtype).T, alpha=alpha)

    @abstractmethod
    def factors(self) -> tuple[Tensor, Tensor]:
        """(left_MR, right_NR) with Z = left @ right^T."""

    def split_factors(self) -> tuple[Tensor, Tensor]:
        """`factors`, with the coefficient's size shared out between them where that can be done."""
        return self.factors()

    @abstractmethod
    def linear(self, x_GTN: Tensor) -> Tensor:
        """X Z^T, what a Linear with weight Z puts out: (G, T, M)."""

    @abstractmethod
    def linear_transposed(self, x_GTM: Tensor) -> Tensor:
        """X Z, what a Conv1D with weight Z puts out: (G, T, N)."""

    @abstractmethod
    def lookup(self, ids_GT: Tensor) -> Tensor:
        """Rows of Z, what an Embedding with weight Z puts out: (G, T, N)."""

    def carry_over(self, coefficient: Tensor) -> Tensor:
        """A coefficient of the last step's space, expressed in this one's."""
        return coefficient


@dataclass(frozen=True, kw_only=True)
class CP(FixedFactors):
    """Z = U diag(tau) V^T (Eq. 3): the coefficient is tau_R.

    The factors may be in half precision; the coefficient is not rounded to it, or c + rho tau would lose tau
    as c grows.
    """

    u_MR: Tensor

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.u_MR * self.coefficient, self.v_NR

    def split_factors(self) -> tuple[Tensor, Tensor]:
        root = self.coefficient.abs().sqrt()
        return self.u_MR * (root * self.coefficient.sign()), self.v_NR * root

    def linear(self, x_GTN: Tensor) -> Tensor:
        return self._scaled(x_GTN @ self.v_NR.to(x_GTN.dtype)) @ self.u_MR.T.to(x_GTN.dtype)

    def linear_transposed(self, x_GTM: Tensor) -> Tensor:
        return self._scaled(x_GTM @ self.u_MR.to(x_GTM.dtype)) @ self.v_NR.T.to(x_GTM.dtype)

    def lookup(self, ids_GT: Tensor) -> Tensor:
        u_GTR = self.u_MR[ids_GT].to(self.coefficient.dtype)
        return self._scaled(u_GTR) @ self.v_NR.T.to(u_GTR.dtype)

    def _scaled(self, h_GTR: Tensor) -> Tensor:
        return (h_GTR * self.coefficient.unsqueeze(-2)).to(h_GTR.dtype)


@dataclass(frozen=True, kw_only=True)
class LowRank(FixedFactors):
    """Z = U V^T with V fixed over an interval: the coefficient is u_MR.

    On the first step of an interval, `previous_v_NR` is the V of the interval before, and `gram` the
    diagonal that V^T V has in expectation; together they carry a momentum over.
    """

    previous_v_NR: Tensor | None
    gram: float

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.coefficient, self.v_NR

    def linear(self, x_GTN: Tensor) -> Tensor:
        return (x_GTN @ self.v_NR.to(x_GTN.dtype)) @ self.coefficient.to(x_GTN.dtype).mT

    def linear_transposed(self, x_GTM: Tensor) -> Tensor:
        return (x_GTM @ self.coefficient.to(x_GTM.dtype)) @ self.v_NR.T.to(x_GTM.dtype)

    def lookup(self, ids_GT: Tensor) -> Tensor:
        u_GMR = self.coefficient if self.coefficient.ndim == 3 else self.coefficient.unsqueeze(0)
        rows_GTR = torch.take_along_dim(u_GMR, ids_GT.unsqueeze(-1), dim=1)
        return rows_GTR @ self.v_NR.T.to(rows_GTR.dtype)

    def carry_over(self, coefficient: Tensor) -> Tensor:
        if self.previous_v_NR is None:
            return coefficient
        # M <- M V_old^T V_new / E[V^T V]
        overlap_RR = self.previous_v_NR.T.to(coefficient.dtype) @ self.v_NR.to(coefficient.dtype)
        return coefficient @ overlap_RR / self.gram


@dataclass(frozen=True, kw_only=True)
class Core(FixedFactors):
    """Z = U S V^T with U and V fixed over an interval: the coefficient is core_RR."""

    u_MR: Tensor

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.u_MR @ self._core(), self.v_NR

    def linear(self, x_GTN: Tensor) -> Tensor:
        dtype = x_GTN.dtype
        return (x_GTN @ self.v_NR.to(dtype)) @ self.coefficient.to(dtype).mT @ self.u_MR.T.to(dtype)

    def linear_transposed(self, x_GTM: Tensor) -> Tensor:
        dtype = x_GTM.dtype
        return (x_GTM @ self.u_MR.to(dtype)) @ self.coefficient.to(dtype) @ self.v_NR.T.to(dtype)

    def lookup(self, ids_GT: Tensor) -> Tensor:
        core_RR = self.coefficient
        return self.u_MR[ids_GT].to(core_RR.dtype) @ core_RR @ self.v_NR.T.to(core_RR.dtype)

    def _core(self) -> Tensor:
        return self.coefficient.to(self.u_MR.dtype)
