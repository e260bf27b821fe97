"""Directions Z: points of the space that a perturbation draws from.

Every type of direction is linear in its `coefficient`, the part that changes every step; the remaining factors are
fixed over several steps. Estimates, momenta and accumulated changes are therefore coefficients too, and update rules
are written once, for coefficients:

| type      | Z                  | coefficient | fixed        | drawn by            |
|-----------|--------------------|-------------|--------------|---------------------|
| `CP`      | U diag(tau) V^T    | tau_R       | u_MR, v_NR   | TeZO                |
| `LowRank` | U V^T              | u_MR        | v_NR         | LOZO, LOZO-Adam     |
| `Core`    | U S V^T            | core_RR     | u_MR, v_NR   | SubZO               |
| `Dense`   | z                  | z itself    | nothing      | MeZO, ZO-AdaMU, 1-D |

`SignedDense` is noise with signs of each example (GRZO).

Shape suffixes: M rows and N columns of the weight as it is stored, R the rank, B examples, G blocks of T input rows.
The fixed factors include the scale that gives every entry of Z variance 1 (see `tezo.directions.low_rank.Scale`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from tezo.directions.random import Key, Signs, fill_normal_
from tezo.directions.scratch import row_slices, scratch
from tezo.directions.side_by_side import joined, split_like

TILE, DEVICE_TILE = 3 << 18, 1 << 25
"""Entries of a dense tile, the largest temporary of a dense draw or write: on a CPU, where a 768 x 768 matrix is one
tile, and on other devices, where each operation has a fixed price and an 8192 x 4096 matrix is one."""

Tile = tuple[slice, Tensor]

Point = Callable[[float, slice, Tensor | None], Tensor]
"""Function (scale, part, origin) -> origin + scale * the coefficients of a part of the examples, (b, *shape), in new
memory. An origin of None is zero."""


class CoefficientDraw(ABC):
    """The coefficients of a direction's examples, drawn at each use or stored.

    Example 0 has the coefficient of the direction that all examples of a batch may share. The numbers of example i
    depend on the key of the draw and on i alone, not on the other examples.
    """

    @abstractmethod
    def __call__(self, examples: Sequence[int]) -> Tensor:
        """Returns the coefficients of B examples: (B, *shape)."""

    def of(self, example: int) -> Tensor:
        """Returns the coefficient of one example."""
        return self((example,))[0]

    def sum(self, factors: Sequence[float]) -> Tensor:
        """Returns sum_i factors[i] * coefficient of example i, a new tensor."""
        if len(factors) == 1:
            return self.of(0) * factors[0]
        coefficients = self(range(len(factors)))
        return torch.einsum("b,b...->...", coefficients.new_tensor(factors), coefficients)

    def points(self, examples: Sequence[int]) -> Point:
        """Returns a function that computes points of these examples, of one draw for all of its calls."""
        coefficients = self(examples)

        def point(scale: float, part: slice, origin: Tensor | None) -> Tensor:
            moved = scale * coefficients[part]
            return moved if origin is None else moved.add_(origin)

        return point


class FixedCoefficient(CoefficientDraw):
    """A coefficient that is stored, the same for all examples; it may be a stack of points, (G, *shape)."""

    def __init__(self, coefficient: Tensor) -> None:
        self.coefficient = coefficient

    def __call__(self, examples: Sequence[int]) -> Tensor:
        return self.coefficient.expand(len(examples), *self.coefficient.shape)

    def of(self, example: int) -> Tensor:
        del example
        return self.coefficient


class Zeros(CoefficientDraw):
    """The coefficient of zero, which takes no memory: its shape, dtype and device."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device

    def __call__(self, examples: Sequence[int]) -> Tensor:
        return torch.zeros(len(examples), *self.shape, dtype=self.dtype, device=self.device)


class OwnNumbers(CoefficientDraw):
    """Coefficients cut from one stream of numbers, in the order of the examples; for few numbers, which are kept.

    `draw` returns the first numbers of the stream, of a given shape; a coefficient is like `zero`.
    """

    def __init__(self, draw: Callable[[tuple[int, ...]], Tensor], zero: Zeros) -> None:
        self._draw, self._shape = draw, zero.shape
        self.dtype, self.device = zero.dtype, zero.device
        self._drawn: Tensor | None = None

    def __call__(self, examples: Sequence[int]) -> Tensor:
        count = 1 + max(examples)
        if self._drawn is None or len(self._drawn) < count:
            self._drawn = self.numbers(count).to(self.device, self.dtype)
        return self._drawn[:count] if tuple(examples) == tuple(range(count)) else self._drawn[list(examples)]

    def lacks(self, count: int) -> bool:
        """Whether the coefficients of the first `count` examples have still to be drawn."""
        return self._drawn is None or len(self._drawn) < count

    def numbers(self, count: int) -> Tensor:
        """Returns the coefficients of the first `count` examples as they are drawn: (count, *shape), on the CPU."""
        return self._draw((count, *self._shape))

    def keep(self, drawn: Tensor) -> None:
        """Takes the result of `numbers`, in the dtype and on the device of the coefficients."""
        self._drawn = drawn


def draw_together(draws: Sequence[OwnNumbers], count: int) -> None:
    """Draws the coefficients of the first `count` examples of all, and moves them to their device at once."""
    places: dict[tuple[torch.dtype, torch.device], list[OwnNumbers]] = {}
    for draw in draws:
        if draw.lacks(count):
            places.setdefault((draw.dtype, draw.device), []).append(draw)
    for (dtype, device), lacking in places.items():
        numbers = [draw.numbers(count) for draw in lacking]
        for draw, own in zip(lacking, split_like(joined(numbers).to(device, dtype), numbers), strict=True):
            draw.keep(own)


class SignedNumbers(CoefficientDraw):
    """One draw (M, ...) for all examples, whose entries along the first dimension have the signs of each example.

    For coefficients of so many numbers that those of each example would cost more than the forward passes.
    """

    def __init__(self, draw: Callable[[], Tensor], signs: Signs) -> None:
        self._draw, self._signs = draw, signs

    def __call__(self, examples: Sequence[int]) -> Tensor:
        numbers = self._draw()
        return numbers.unsqueeze(0) if tuple(examples) == (0,) else numbers * self._signs_of(examples, numbers)

    def of(self, example: int) -> Tensor:
        return self._draw() if example == 0 else super().of(example)

    def sum(self, factors: Sequence[float]) -> Tensor:
        if len(factors) == 1:
            return super().sum(factors)
        numbers = self._draw()
        signs = self._signs_of(range(len(factors)), numbers)
        return numbers * torch.einsum("b,b...->...", signs.new_tensor(factors), signs)

    def points(self, examples: Sequence[int]) -> Point:
        numbers = self._draw()
        signs = self._signs_of(examples, numbers)

        def point(scale: float, part: slice, origin: Tensor | None) -> Tensor:
            factors = scale * signs[part]
            return numbers * factors if origin is None else torch.addcmul(origin, numbers, factors)

        return point

    def _signs_of(self, examples: Sequence[int], numbers: Tensor) -> Tensor:
        signs_BM = self._signs(examples, numbers.dtype, numbers.device)
        return signs_BM.view(*signs_BM.shape, *[1] * (numbers.ndim - 1))


class Direction(ABC):
    """A direction Z for one parameter, or with low-rank matrices and vectors one for each example: Z_0 = Z, Z_1, ..."""

    @abstractmethod
    def tiles(self, factors: Sequence[float] = (1.0,)) -> Iterator[Tile]:
        """Yields the coefficient of sum_i factors[i] * Z_i in parts (rows, values), float32 or wider.

        The next part may overwrite the previous one.
        """

    @abstractmethod
    def add_to_(self, weight_MN: Tensor, alpha: float) -> None:
        """Adds alpha * Z to the weight, in place, without an M x N temporary."""


def row_tiles(shape: torch.Size | tuple[int, ...], device: torch.device) -> Iterator[slice]:
    """Returns slices of the leading dimension, each with at most `tile_entries` entries (at least one row).

    They depend on the shape and the type of the device only, because every tile of a dense direction is a separate
    draw.
    """
    return row_slices(shape, tile_entries(device))


def tile_entries(device: torch.device) -> int:
    """Returns the most entries of a dense tile."""
    return TILE if device.type == "cpu" else DEVICE_TILE


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
            yield slice(None), self.vectors.sum(factors)
            return
        (factor,) = factors
        for rows in row_tiles(self.shape, self.device):
            z = self.fill_(self.buffer(rows, self.role), rows)
            yield rows, z if factor == 1.0 else z.mul_(factor)

    def fill_(self, out: Tensor, rows: slice) -> Tensor:
        """Fills `out` with Z[rows], a slice of `row_tiles`; rounded to nearest where `out` is bfloat16."""
        return fill_normal_(out, **self.key(rows, self.role))

    def key(self, rows: slice, role: str) -> Key:
        """Returns the key of the numbers of these rows and this role."""
        return {"seed": self.seed, "step": self.step, "name": self.name, "role": f"{role}.{rows.start}"}

    def buffer(self, rows: slice, name: str) -> Tensor:
        """Returns a scratch buffer of the shape of Z[rows]."""
        return scratch(name, (rows.stop - rows.start, *self.shape[1:]), self.dtype, self.device)

    @cached_property
    def vectors(self) -> SignedNumbers:
        """Z_i of a vector for B examples: (B, M). Z is not in a scratch buffer."""
        key: Key = {"seed": self.seed, "step": self.step, "name": self.name, "role": self.role}
        z = torch.cat(
            [self.fill_(self.buffer(rows, self.role), rows).clone() for rows in row_tiles(self.shape, self.device)]
        )
        return SignedNumbers(lambda: z, Signs(self.shape[0], key))

    def add_to_(self, weight_MN: Tensor, alpha: float) -> None:
        for rows, z in self.tiles((alpha,)):
            weight_MN[rows] += z.to(weight_MN.dtype)


@dataclass(frozen=True, kw_only=True)
class SignedDense(Dense):
    """Noise whose rows and columns have signs of each example: Z_i = diag(r_i) Z diag(s_i), from one draw of Z.

    Each Z_i is standard normal, and E[Z_i Z_j] = 0 entry by entry for i != j (Flipout). Example 0 has Z itself.
    """

    def tiles(self, factors: Sequence[float] = (1.0,)) -> Iterator[Tile]:
        if len(self.shape) == 1 or len(factors) == 1:
            yield from super().tiles(factors)
            return
        # sum_i f_i Z_i = Z * (R^T diag(f) S), entry by entry
        left_BM, right_BN = self.signs(range(len(factors)))
        weighted_BM = left_BM * left_BM.new_tensor(factors).unsqueeze(1)
        for rows, z in super().tiles():
            yield rows, z.mul_(weighted_BM[:, rows].T @ right_BN)

    def signs(self, examples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns r_i and s_i of B examples: (B, M) and (B, N)."""
        left, right = self._signs
        return left(examples, self.dtype, self.device), right(examples, self.dtype, self.device)

    @cached_property
    def _signs(self) -> tuple[Signs, Signs]:
        key: Key = {"seed": self.seed, "step": self.step, "name": self.name, "role": self.role}
        rows, columns = self.shape
        return Signs(rows, {**key, "role": f"{self.role}.rows"}), Signs(
            columns, {**key, "role": f"{self.role}.columns"}
        )


@dataclass(frozen=True, kw_only=True)
class FixedFactors(Direction):
    """A low-rank direction: at least one factor is fixed from step `refresh_step` on.

    A coefficient may have a leading dimension G: one point for each block of rows. Only the methods `add_linear_`,
    `add_transposed_` and `add_lookup_` accept such points. Inputs and outputs are (G, T, ...); points without a G are
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

    @cached_property
    def coefficient(self) -> Tensor:
        """The coefficient of the direction: its coordinates in the space of the fixed factors."""
        return self.draw.of(0)

    def tiles(self, factors: Sequence[float] = (1.0,)) -> Iterator[Tile]:
        yield slice(None), self.draw.sum(factors)

    def with_coefficient(self, coefficient: Tensor) -> Self:
        """Returns the direction with this coefficient and the same fixed factors."""
        point = replace(self, draw=FixedCoefficient(coefficient))
        vars(point)["coefficient"] = coefficient  # known: products read it once a layer and pass
        return point

    def scaled(self, scales: Sequence[float]) -> Self:
        """Returns G points, each the direction times one of the scales."""
        z = self.coefficient
        return self.with_coefficient(torch.stack([scale * z for scale in scales]))

    def add_to_(self, weight_MN: Tensor, alpha: float) -> None:
        # W += alpha * left @ right^T
        left_MR, right_NR = self.factors()
        weight_MN.addmm_(left_MR.to(weight_MN.dtype), right_NR.to(weight_MN.dtype).T, alpha=alpha)

    @abstractmethod
    def factors(self) -> tuple[Tensor, Tensor]:
        """Returns (left_MR, right_NR) with Z = left @ right^T."""

    def split_factors(self) -> tuple[Tensor, Tensor]:
        """Returns `factors`; where the coefficient allows it, its magnitude is divided equally between both."""
        return self.factors()

    @abstractmethod
    def add_linear_(self, out_GTM: Tensor, x_GTN: Tensor) -> None:
        """Adds X Z^T, the output of a Linear with weight Z; `out_GTM` is contiguous and has the dtype of X."""

    @abstractmethod
    def add_transposed_(self, out_GTN: Tensor, x_GTM: Tensor) -> None:
        """Adds X Z, the output of a Conv1D with weight Z; `out_GTN` is contiguous and has the dtype of X."""

    @abstractmethod
    def add_lookup_(self, out_GTN: Tensor, ids_GT: Tensor) -> None:
        """Adds Z[ids], the output of an Embedding with weight Z; `out_GTN` is contiguous."""

    def carry_over(self, coefficient: Tensor) -> Tensor:
        """Projects a coefficient of the previous step's space onto the space of this direction."""
        return coefficient


@dataclass(frozen=True, kw_only=True)
class BothFixed(FixedFactors):
    """Z = U C V^T with U and V fixed over an interval; C is made of the coefficient."""

    u_MR: Tensor

    @abstractmethod
    def through(self, h_GTR: Tensor, *, transposed: bool) -> Tensor:
        """Returns H C^T, or with `transposed` H C; it may overwrite H."""

    def add_linear_(self, out_GTM: Tensor, x_GTN: Tensor) -> None:
        _add_product_(out_GTM, self.through(_product(x_GTN, self.v_NR), transposed=False), self.u_MR.T)

    def add_transposed_(self, out_GTN: Tensor, x_GTM: Tensor) -> None:
        _add_product_(out_GTN, self.through(_product(x_GTM, self.u_MR), transposed=True), self.v_NR.T)

    def add_lookup_(self, out_GTN: Tensor, ids_GT: Tensor) -> None:
        rows_GTR = self.u_MR[ids_GT].to(out_GTN.dtype)
        _add_product_(out_GTN, self.through(rows_GTR, transposed=True), self.v_NR.T)


@dataclass(frozen=True, kw_only=True)
class CP(BothFixed):
    """Z = U diag(tau) V^T (Eq. 3): the coefficient is tau_R.

    The factors may be in half precision. The coefficient is not: in c + rho tau, tau would be lost to rounding once c
    is large.
    """

    def through(self, h_GTR: Tensor, *, transposed: bool) -> Tensor:
        del transposed
        return h_GTR.mul_(self.coefficient.unsqueeze(-2))  # multiplied in the wider dtype, rounded to that of H

    def carry_over(self, coefficient: Tensor) -> Tensor:
        if self.before is None:
            return coefficient
        # <sum_j m_j u'_j v'_j^T, u_s v_s^T> / |u_s v_s^T|^2: the new terms are nearly orthogonal
        old, dtype = self.before(), coefficient.dtype
        u_MR, v_NR = self.u_MR.to(dtype), self.v_NR.to(dtype)
        overlap_RR = (u_MR.T @ old["u"].to(dtype)) * (v_NR.T @ old["v"].to(dtype))
        lengths_R = u_MR.square().sum(0) * v_NR.square().sum(0)
        return (overlap_RR @ coefficient) / lengths_R.clamp_min(torch.finfo(dtype).tiny)  # 0 of columns of zeros

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.u_MR * self.coefficient, self.v_NR

    def split_factors(self) -> tuple[Tensor, Tensor]:
        root = self.coefficient.abs().sqrt()
        return self.u_MR * (root * self.coefficient.sign()), self.v_NR * root


@dataclass(frozen=True, kw_only=True)
class Core(BothFixed):
    """Z = U S V^T: the coefficient is S, core_RR."""

    def through(self, h_GTR: Tensor, *, transposed: bool) -> Tensor:
        core_RR = self.coefficient
        return h_GTR.to(core_RR.dtype) @ (core_RR if transposed else core_RR.mT)

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.u_MR @ self.coefficient.to(self.u_MR.dtype), self.v_NR


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
        """Multiplies the columns of `coefficient` by the scale of their block; those of `beside` stay as they are."""
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


def _product(x_GTN: Tensor, right_NR: Tensor) -> Tensor:
    """Returns X @ right in the dtype of X: (G, T, R)."""
    x_GTN = x_GTN.contiguous()
    h_TR = torch.mm(x_GTN.view(-1, x_GTN.shape[-1]), right_NR.to(x_GTN.dtype))
    return h_TR.view(*x_GTN.shape[:2], right_NR.shape[1])  # no -1: there may be no rows


def _add_product_(out_GTK: Tensor, left_GTR: Tensor, right: Tensor) -> None:
    """Adds left @ right in place; `right` is (R, K), the same for all blocks, or (G, R, K)."""
    left_GTR, right = left_GTR.to(out_GTK.dtype), right.to(out_GTK.dtype)  # autocast may have changed left's dtype
    if right.ndim == 3:
        out_GTK.baddbmm_(left_GTR, right)
    else:  # one product is faster than G products
        out_GTK.view(-1, out_GTK.shape[-1]).addmm_(left_GTR.reshape(-1, left_GTR.shape[-1]), right)
