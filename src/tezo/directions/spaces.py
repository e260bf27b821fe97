"""Directions: points Z of the space that a perturbation draws from.

Every type of direction is linear in its `coefficient`, the part that changes every step; the remaining factors are
fixed over several steps. Estimates, momenta and accumulated changes are therefore coefficients too, and update rules
are written once, for coefficients:

| type      | Z                  | coefficient | fixed        | drawn by            |
|-----------|--------------------|-------------|--------------|---------------------|
| `CP`      | U diag(tau) V^T    | tau_R       | u_MR, v_NR   | TeZO                |
| `LowRank` | U V^T              | u_MR        | v_NR         | LOZO, LOZO-Adam     |
| `Core`    | U S V^T            | core_RR     | u_MR, v_NR   | SubZO               |
| `Dense`   | z                  | z itself    | nothing      | MeZO, ZO-AdaMU, 1-D |

Shape suffixes: M rows and N columns of the weight as it is stored, R the rank, B examples, G blocks of T input rows.
The fixed factors include the scale that gives every entry of Z variance 1 (see `perturbations`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from tezo.directions.coefficients import CoefficientDraw, FixedCoefficient, SignedNumbers
from tezo.directions.products import row_slices, scratch
from tezo.directions.random import Signs, fill_normal_

TILE = 3 << 18
"""Entries of a dense tile, the largest temporary of a dense draw or write: a 768 x 768 matrix is one tile."""

Tile = tuple[slice, Tensor]


def row_tiles(shape: torch.Size | tuple[int, ...]) -> Iterator[slice]:
    """Slices of the leading dimension, each with at most `TILE` entries (at least one row).

    They depend on the shape only, because every tile of a dense direction is a separate draw.
    """
    yield from row_slices(shape, TILE)


class Direction(ABC):
    """A direction Z for one parameter, or with low-rank matrices and vectors one for each example: Z_0 = Z, Z_1, ..."""

    @abstractmethod
    def tiles(self, factors: Sequence[float] = (1.0,)) -> Iterator[Tile]:
        """Yields the coefficient of sum_i factors[i] * Z_i in parts (rows, values), float32 or wider.

        The next part may overwrite the previous one.
        """

    @abstractmethod
    def add_to_(self, weight_MN: Tensor, alpha: float) -> None:
        """Weight += alpha * Z, in place, without an M x N temporary."""


@dataclass(frozen=True, kw_only=True)
class Dense(Direction):
    """Standard normal noise of the parameter's shape.

    For a matrix, Z is redrawn from its key tile by tile whenever it is needed, and is the same for all examples; for a
    vector, Z is stored.
    """

    shape: torch.Size
    device: torch.device
    dtype: torch.dtype
    seed: int
    step: int
    name: str
    role: str = "z"

    def tiles(self, factors: Sequence[float] = (1.0,)) -> Iterator[Tile]:
        if len(self.shape) == 1:
            yield slice(None), self._vectors.sum(factors)
            return
        (factor,) = factors
        for rows in row_tiles(self.shape):
            z = self.tile(rows)
            yield rows, z if factor == 1.0 else z.mul_(factor)

    def tile(self, rows: slice) -> Tensor:
        """Z[rows] for a slice of `row_tiles(shape)`, in a scratch buffer that the next tile overwrites."""
        return self.fill_(scratch(self.role, self._shape_of(rows), self.dtype, self.device), rows)

    def fill_(self, out: Tensor, rows: slice) -> Tensor:
        """Out <- Z[rows] for a slice of `row_tiles(shape)`, rounded to nearest where `out` is bfloat16."""
        return self._fill_noise_(out, rows, self.role)

    def noise(self, rows: slice, role: str) -> Tensor:
        """Standard normal numbers of the shape of Z[rows], in the scratch buffer of `role`."""
        return self._fill_noise_(scratch(role, self._shape_of(rows), self.dtype, self.device), rows, role)

    def _shape_of(self, rows: slice) -> tuple[int, ...]:
        return rows.stop - rows.start, *self.shape[1:]

    def _fill_noise_(self, out: Tensor, rows: slice, role: str) -> Tensor:
        return fill_normal_(out, seed=self.seed, step=self.step, name=self.name, role=f"{role}.{rows.start}")

    @cached_property
    def vector(self) -> Tensor:
        """Z of a vector: (M,), in its own memory."""
        return torch.cat([self.tile(rows).clone() for rows in row_tiles(self.shape)])

    def vectors(self, examples: Sequence[int]) -> Tensor:
        """Z_i of a vector for each of the examples: (B, M)."""
        return self._vectors(examples)

    @cached_property
    def _vectors(self) -> SignedNumbers:
        signs = Signs(self.shape[0], self.seed, self.step, self.name, f"{self.role}.signs")
        return SignedNumbers(lambda: self.vector, signs)

    def add_to_(self, weight_MN: Tensor, alpha: float) -> None:
        for rows, z in self.tiles((alpha,)):
            weight_MN[rows] += z.to(weight_MN.dtype)


@dataclass(frozen=True, kw_only=True)
class FixedFactors(Direction):
    """A low-rank direction: at least one factor is fixed from step `refresh_step` on.

    A coefficient with a leading dimension G represents G points of one space. `add_linear_`, `add_transposed_` and
    `add_lookup_` then take G blocks of inputs and apply point g to block g; a coefficient without this dimension is
    treated as G = 1. They compute in the dtype of the output, independent of the dtype of the factors.

    On the first step of an interval, `before` draws the factors of the previous interval, which are needed to carry
    over a momentum; otherwise it is None.
    """

    draw: CoefficientDraw
    v_NR: Tensor
    refresh_step: int
    before: Callable[[], Mapping[str, Tensor]] | None = None

    casts_coefficient: ClassVar[bool] = False
    """Whether the products cast the coefficient to the dtype of the output, instead of multiplying it as it is."""

    @property
    def coefficient(self) -> Tensor:
        """The coefficient of the direction: its coordinates in the space of the fixed factors."""
        return self.draw.of(0)

    def tiles(self, factors: Sequence[float] = (1.0,)) -> Iterator[Tile]:
        yield slice(None), self.draw.sum(factors)

    def with_coefficient(self, coefficient: Tensor) -> Self:
        """The direction with this coefficient and the same fixed factors."""
        return replace(self, draw=FixedCoefficient(coefficient))

    def scaled(self, scales: Sequence[float]) -> Self:
        """G points, each the direction times one of the scales."""
        z = self.coefficient
        return self.with_coefficient(torch.stack([scale * z for scale in scales]))

    def origin(self) -> Self:
        """The zero direction with the same fixed factors."""
        return self.with_coefficient(torch.zeros_like(self.coefficient))

    def add_to_(self, weight_MN: Tensor, alpha: float) -> None:
        # W += alpha * left @ right^T
        left_MR, right_NR = self.factors()
        weight_MN.addmm_(left_MR.to(weight_MN.dtype), right_NR.to(weight_MN.dtype).T, alpha=alpha)

    @abstractmethod
    def factors(self) -> tuple[Tensor, Tensor]:
        """(left_MR, right_NR) with Z = left @ right^T."""

    def split_factors(self) -> tuple[Tensor, Tensor]:
        """As `factors`; where the coefficient allows it, its magnitude is divided equally between both factors."""
        return self.factors()

    @abstractmethod
    def add_linear_(self, out_GTM: Tensor, x_GTN: Tensor) -> None:
        """Out += X Z^T, the output of a Linear with weight Z; `out_GTM` is contiguous and has the dtype of X."""

    @abstractmethod
    def add_transposed_(self, out_GTN: Tensor, x_GTM: Tensor) -> None:
        """Out += X Z, the output of a Conv1D with weight Z; `out_GTN` is contiguous and has the dtype of X."""

    @abstractmethod
    def add_lookup_(self, out_GTN: Tensor, ids_GT: Tensor) -> None:
        """Out += Z[ids], the output of an Embedding with weight Z; `out_GTN` is contiguous."""

    def carry_over(self, coefficient: Tensor) -> Tensor:
        """Projects a coefficient of the previous step's space onto the space of this direction."""
        return coefficient


@dataclass(frozen=True, kw_only=True)
class CP(FixedFactors):
    """Z = U diag(tau) V^T (Eq. 3): the coefficient is tau_R.

    The factors may be in half precision. The coefficient is not: in c + rho tau, tau would be lost to rounding once c
    is large.
    """

    u_MR: Tensor

    def carry_over(self, coefficient: Tensor) -> Tensor:
        if self.before is None:
            return coefficient
        # <sum_j m_j u'_j v'_j^T, u_s v_s^T> / |u_s v_s^T|^2: the new terms are nearly orthogonal
        old, dtype = self.before(), coefficient.dtype
        u_MR, v_NR = self.u_MR.to(dtype), self.v_NR.to(dtype)
        overlap_RR = (u_MR.T @ old["u"].to(dtype)) * (v_NR.T @ old["v"].to(dtype))
        return (overlap_RR @ coefficient) / (u_MR.square().sum(0) * v_NR.square().sum(0))

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.u_MR * self.coefficient, self.v_NR

    def split_factors(self) -> tuple[Tensor, Tensor]:
        root = self.coefficient.abs().sqrt()
        return self.u_MR * (root * self.coefficient.sign()), self.v_NR * root

    def add_linear_(self, out_GTM: Tensor, x_GTN: Tensor) -> None:
        _add_product_(out_GTM, self._scaled(_product(x_GTN, self.v_NR)), self.u_MR.T)

    def add_transposed_(self, out_GTN: Tensor, x_GTM: Tensor) -> None:
        _add_product_(out_GTN, self._scaled(_product(x_GTM, self.u_MR)), self.v_NR.T)

    def add_lookup_(self, out_GTN: Tensor, ids_GT: Tensor) -> None:
        _add_product_(out_GTN, self._scaled(self.u_MR[ids_GT].to(out_GTN.dtype)), self.v_NR.T)

    def _scaled(self, h_GTR: Tensor) -> Tensor:
        return (h_GTR * self.coefficient.unsqueeze(-2)).to(h_GTR.dtype)


@dataclass(frozen=True, kw_only=True)
class LowRank(FixedFactors):
    """Z = U V^T with V fixed over an interval: the coefficient is u_MR.

    `gram` is the diagonal of V^T V (its expectation if V is random), a number or (R,). `carry_over` divides by it.
    `scales` are factors of the points of G blocks that share one coefficient; None: it is the point of all. `beside`
    is the coefficient of a term that the points of all blocks have in addition, without a factor: in half precision,
    the sum of both coefficients would be rounded. Both terms are computed by the same products.
    """

    gram: float | Tensor
    scales: tuple[float, ...] | None = None
    beside: Tensor | None = None

    casts_coefficient = True

    def scaled(self, scales: Sequence[float]) -> Self:
        return replace(self, scales=tuple(scales))

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.coefficient, self.v_NR

    def add_linear_(self, out_GTM: Tensor, x_GTN: Tensor) -> None:
        h_GTR = _product(x_GTN, self.v_NR)
        _add_product_(out_GTM, self._scaled(self._twice(h_GTR)), self._both(out_GTM.dtype).mT)

    def add_transposed_(self, out_GTN: Tensor, x_GTM: Tensor) -> None:
        _add_product_(out_GTN, self._scaled(x_GTM @ self._both(x_GTM.dtype)), self._twice(self.v_NR).T)

    def add_lookup_(self, out_GTN: Tensor, ids_GT: Tensor) -> None:
        u_MR = self._both(out_GTN.dtype)
        u_GMR = u_MR if u_MR.ndim == 3 else u_MR.unsqueeze(0)
        rows_GTR = torch.take_along_dim(u_GMR, ids_GT.unsqueeze(-1), dim=1)
        _add_product_(out_GTN, self._scaled(rows_GTR), self._twice(self.v_NR).T)

    def _both(self, dtype: torch.dtype) -> Tensor:
        u_MR = self.coefficient.to(dtype)
        return u_MR if self.beside is None else torch.cat([u_MR, self.beside.to(dtype)], -1)

    def _twice(self, values: Tensor) -> Tensor:
        return values if self.beside is None else torch.cat([values, values], -1)

    def _scaled(self, h_GTR: Tensor) -> Tensor:
        """The columns of `coefficient` times the scale of their block; those of `beside`, if any, as they are."""
        if self.scales is not None:
            for scale, h_TR in zip(self.scales, h_GTR, strict=True):
                h_TR[:, : self.v_NR.shape[1]].mul_(scale)
        return h_GTR

    def carry_over(self, coefficient: Tensor) -> Tensor:
        if self.before is None:
            return coefficient
        # M <- M V_old^T V_new / E[V^T V]
        overlap_RR = self.before()["v"].T.to(coefficient.dtype) @ self.v_NR.to(coefficient.dtype)
        return coefficient @ overlap_RR / self.gram


@dataclass(frozen=True, kw_only=True)
class TransposedLowRank(LowRank):
    """Z = V U^T for a weight whose rows are its inputs (Conv1D): v_MR is fixed and u_NR is the coefficient."""

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.v_NR, self.coefficient

    def add_linear_(self, out_GTM: Tensor, x_GTN: Tensor) -> None:
        super().add_transposed_(out_GTM, x_GTN)

    def add_transposed_(self, out_GTN: Tensor, x_GTM: Tensor) -> None:
        super().add_linear_(out_GTN, x_GTM)


@dataclass(frozen=True, kw_only=True)
class Core(FixedFactors):
    """Z = U S V^T with U and V fixed over an interval: the coefficient is S, core_RR."""

    u_MR: Tensor

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.u_MR @ self._core(), self.v_NR

    def add_linear_(self, out_GTM: Tensor, x_GTN: Tensor) -> None:
        h_GTR = _product(x_GTN, self.v_NR)
        _add_product_(out_GTM, h_GTR.to(self.coefficient.dtype) @ self.coefficient.mT, self.u_MR.T)

    def add_transposed_(self, out_GTN: Tensor, x_GTM: Tensor) -> None:
        h_GTR = _product(x_GTM, self.u_MR)
        _add_product_(out_GTN, h_GTR.to(self.coefficient.dtype) @ self.coefficient, self.v_NR.T)

    def add_lookup_(self, out_GTN: Tensor, ids_GT: Tensor) -> None:
        h_GTR = self.u_MR[ids_GT].to(self.coefficient.dtype)
        _add_product_(out_GTN, h_GTR @ self.coefficient, self.v_NR.T)

    def _core(self) -> Tensor:
        return self.coefficient.to(self.u_MR.dtype)


def _product(x_GTN: Tensor, right_NR: Tensor) -> Tensor:
    """X @ right in the dtype of X: (G, T, R)."""
    x_GTN = x_GTN.contiguous()
    h_TR = torch.mm(x_GTN.view(-1, x_GTN.shape[-1]), right_NR.to(x_GTN.dtype))
    return h_TR.view(*x_GTN.shape[:2], right_NR.shape[1])  # no -1: there may be no rows


def _add_product_(out_GTK: Tensor, left_GTR: Tensor, right: Tensor) -> None:
    """Out += left @ right in place; `right` is (R, K), the same for all blocks, or (G, R, K)."""
    left_GTR, right = left_GTR.to(out_GTK.dtype), right.to(out_GTK.dtype)  # autocast may have changed left's dtype
    if right.ndim == 3:
        out_GTK.baddbmm_(left_GTR, right)
    else:  # one product is faster than G products
        out_GTK.view(-1, out_GTK.shape[-1]).addmm_(left_GTR.reshape(-1, left_GTR.shape[-1]), right)
