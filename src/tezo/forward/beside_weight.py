"""A low-rank change beside a weight, added in the forward pass: the stored tensor is read, not written.

The output of a Linear with weight W becomes x (W + F + D)^T = x W^T + x F^T + ((x V) * c) U^T. D is the change trained
with the current factors, plus or minus rho Z during an evaluation. F is the change trained with earlier factors, if it
is stored beside the base. Every module that owns the parameter gets the hook, so tied weights change together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tezo.directions.products import arithmetic_dtype
from tezo.directions.random import DrawKey
from tezo.directions.spaces import Direction, FixedCoefficient, FixedFactors, LowRank, row_tiles
from tezo.directions.targets import Site, Target, only_input
from tezo.forward import rounding
from tezo.forward.blocks import Blocks, Points, block_points, draw_of
from tezo.forward.interception import EMBEDDING, Interception, untraced
from tezo.forward.perturbed_parameter import PerturbedParameter, Shift, require_writable
from tezo.forward.state_dict import require_plain

FEW = 1 << 14
"""Largest number of coefficient entries of points that are computed before a pass. In the pass itself, small operations
take several times as long, because the products of the model displace them from the processor's caches. More entries
are computed when they are used, because storing them for all layers would take memory."""

_KEEPING: ContextVar[bool] = ContextVar("points are kept", default=False)

FROZEN_RANK = 64
"""Default rank of the factors stored beside a base that cannot be written."""


@contextmanager
def keeping_points() -> Iterator[None]:
    """While open, the points of perturbations are computed once for all passes, as for text written token by token.

    They take the memory of the coefficients of all members in all layers, and are dropped when perturbations change.
    """
    token = _KEEPING.set(True)
    try:
        yield
    finally:
        _KEEPING.reset(token)


class InForward(PerturbedParameter):
    """A matrix perturbed in the forward pass: W_t = W + F + D, with D in the space of the current fixed factors.

    At a refresh of the fixed factors, D (`change`) is folded into the stored tensor, or into F (`frozen`), low-rank
    factors stored beside it; D is then zero again. Without refreshes the stored tensor stays bit-identical. F has at
    most the rank `most_rank`; None: D is folded into the stored tensor if it can be written, else it is `FROZEN_RANK`.
    """

    writes_weight = False
    in_blocks = True

    def __init__(self, target: Target, blocks: Blocks, most_rank: int | None = None) -> None:
        super().__init__(target)
        self._most_rank = most_rank if target.is_writable or most_rank is not None else FROZEN_RANK
        self.folds_into_weight, self.most_kept = self._most_rank is None, self._most_rank or 0
        self._blocks = blocks
        self._prepared: tuple[Points, ...] = ()
        self._kept: dict[torch.dtype, tuple[Points, ...]] = {}
        self._count = 1
        self._forget()
        self._handles += [self._hook(site) for site in target.sites]

    def _forget(self) -> None:
        self.change: FixedFactors | None = None
        self.frozen: LowRank | None = None
        self.compression_error, self._changed = 0.0, False

    def _hook(self, site: Site) -> RemovableHandle | Interception:
        if site.layout == "embedding":
            return Interception(site.module, {EMBEDDING: self._lookup}, lambda: self._moved)
        transposed = site.layout == "transposed"

        def add_term(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
            del module
            if not self._moved:
                return output
            with torch._C.DisableTorchFunction():  # it saves its overhead on every call of torch in here
                out = _writable(output)
                x = only_input(args, kwargs).to(out.device, out.dtype)
                out_GTM, x_GTN = self._blocks.split(out, self._count, 1), self._blocks.split(x, self._count, 1)
                for blocks, points in self._terms(out.dtype):
                    part = (out_GTM, x_GTN) if blocks is None else (out_GTM[blocks], x_GTN[blocks])
                    if transposed:
                        points.add_transposed_(*part)
                    else:
                        points.add_linear_(*part)
                return out.to(output.dtype)

        return site.module.register_forward_hook(untraced(add_term), with_kwargs=True)

    def _lookup(self, ids: Tensor, *others: Any, **options: Any) -> Tensor:
        output: Tensor = EMBEDDING(ids, *others, **options)
        out, split = _writable(output), self._blocks.split
        out_GTN, ids_GT = split(out, self._count, 1), split(ids, self._count, 0)
        for blocks, points in self._terms(out.dtype):
            points.add_lookup_(*((out_GTN, ids_GT) if blocks is None else (out_GTN[blocks], ids_GT[blocks])))
        return out.to(output.dtype)

    @property
    def _moved(self) -> bool:
        """Whether W_t, or its perturbation, differs from the stored tensor."""
        return bool(self.shifts) or self._changed or self.frozen is not None

    def _terms(self, dtype: torch.dtype) -> Iterator[Points]:
        """Returns (blocks, points) of products in `dtype`: F for all blocks, and D + scale_g Z_g for each block g."""
        self.was_called |= bool(self.shifts)
        frozen: list[Points] = [] if self.frozen is None else [(None, self.frozen)]
        if self.change is None:  # a trial before the first step
            return iter(frozen)
        known = self._prepared or self._kept.get(dtype)
        if known is not None:
            return chain(frozen, known)
        points = block_points(self.change, self._changed, self.shifts, dtype)
        if self.shifts and _KEEPING.get():
            points = iter(self._kept.setdefault(dtype, tuple(points)))
        return chain(frozen, points)

    def refresh(self, key: DrawKey, origin: FixedFactors | None) -> None:
        self.key = key
        assert origin is not None
        if self.change is not None and self.change.refresh_step != origin.refresh_step:
            # moves D into the stored tensor or into F
            if self._most_rank is None:
                self.fold()
            elif self._changed:
                left, right, lost = compress(*join(self.trained(), self.target.state_dtype), self._most_rank)
                self.frozen, self.compression_error = low_rank(left, right), self.compression_error + lost
            self._changed = False
        if self.change is None or (not self._changed and self.change.v_NR is not origin.v_NR):
            self.change = origin.with_coefficient(origin.draw.of(0))

    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        self.shifts, self._count = tuple(shifts), sum(len(shift.examples) for shift in shifts) or 1
        self._prepared, self._kept = (), {}
        if self.change is not None and shifts and self.has_few(self._count):
            self._prepared = tuple(block_points(self.change, self._changed, shifts, self.target.state_dtype))

    def has_few(self, count: int) -> bool:
        """Whether so many points, one for each block and example, are few enough to be computed before a pass."""
        change = self.change
        return change is not None and not change.casts_coefficient and count * change.coefficient.numel() <= FEW

    def set_points(self, shifts: Sequence[Shift], points_GX: Tensor) -> None:
        """As `set_perturbations`, with the coefficients of all blocks and examples, (G, *shape), computed already."""
        assert self.change is not None
        self.shifts, self._count = tuple(shifts), len(points_GX)
        self._prepared, self._kept = ((None, self.change.with_coefficient(points_GX)),), {}

    @property
    def coefficient(self) -> Tensor:
        """The coefficient of D, zero before the first change."""
        assert self.change is not None
        return self.change.coefficient

    def set_coefficient(self, coefficient: Tensor) -> None:
        """Takes another tensor for the changed coefficient of D."""
        assert self.change is not None
        self.change, self._changed = self.change.with_coefficient(coefficient), True

    def add_(self, direction: Direction, rows: slice, delta: Tensor, alpha: float) -> None:
        del direction
        assert self.change is not None
        self.change.coefficient[rows].add_(delta, alpha=alpha)
        self._changed = True

    def decay_(self, factor: float) -> None:
        """Multiplies the trained change, F + D, by `factor`; the base is unchanged."""
        if self.change is not None and self._changed:
            self.change.coefficient.mul_(factor)
        if self.frozen is not None:
            self.frozen.coefficient.mul_(factor)

    def trained(self) -> list[tuple[Tensor, Tensor]]:
        frozen = [] if self.frozen is None else [self.frozen.factors()]
        return frozen + ([self.change.split_factors()] if self.change is not None and self._changed else [])

    def changes(self) -> list[tuple[Tensor, Tensor] | None]:
        # F + D + scale_g Z_g; D and Z_g have the same fixed factors, and so has their sum
        self.was_called |= bool(self.shifts)
        if not self._moved:
            return [None]
        points: list[FixedFactors] = []
        if self.change is not None and self.shifts:
            drawn = {id(shift.direction): shift for shift in self.shifts}
            moved = {key: draw_of(shift.direction).points(shift.examples) for key, shift in drawn.items()}
            origin, every = self.change.coefficient if self._changed else None, slice(None)
            stacks = [moved[id(shift.direction)](shift.scale, every, origin) for shift in self.shifts]
            points = [self.change.with_coefficient(coefficient) for stack in stacks for coefficient in stack]
        elif self.change is not None and self._changed:
            points = [self.change]
        frozen = [] if self.frozen is None else [self.frozen.factors()]
        dtype = self.target.state_dtype
        return [join([*frozen, point.factors()], dtype) for point in points] or [join(frozen, dtype)]

    @contextmanager
    def beside(self, left_MK: Tensor, right_NK: Tensor) -> Iterator[None]:
        frozen, place = self.frozen, (self.target.device, self.target.state_dtype)
        kept = [] if frozen is None else [frozen.factors()]
        self.frozen = low_rank(*join([*kept, (left_MK.to(*place), right_NK.to(*place))], place[1]))
        try:
            yield
        finally:
            self.frozen = frozen

    def fold(self) -> None:
        # W += F + D, then F = D = 0, in one pass over the stored tensor
        if self.trained():
            require_writable(self.target, "folding trained factors into the base")
            self._add_trained_(self.weight, self.rounding)
        self.change, self.frozen, self._changed = None, None, False

    def _add_trained_(self, stored: Tensor, draw: torch.Generator) -> None:
        left_MR, right_NR = join(self.trained(), self.target.state_dtype)
        for rows in row_tiles(self.target.stored_shape, self.weight.device):
            rounding.add_(stored[rows], left_MR[rows] @ right_NR.T, 1.0, draw)

    @torch.no_grad()
    def merged(self) -> Tensor | None:
        """Returns W + F + D with the bits that `fold` would write; None before the first change."""
        if not self.trained():
            return None
        require_plain(self.target)
        stored = self.weight.clone()
        self._add_trained_(stored, self.rounding.clone_state())
        return stored

    def replaced(self) -> None:
        super().replaced()
        self._forget()

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        if self.change is not None and self._changed:
            state = {"coefficient": self.change.coefficient, "refresh_step": torch.tensor(self.change.refresh_step)}
        if self.frozen is not None:
            lost = torch.tensor(self.compression_error, dtype=torch.float64)
            state |= {"frozen_left": self.frozen.coefficient, "frozen_right": self.frozen.v_NR, "frozen_lost": lost}
        return state

    def load_state(self, origin: Callable[[int | None], FixedFactors | None], state: Mapping[str, Tensor]) -> None:
        self._forget()
        place = self.target.device, self.target.state_dtype
        if "coefficient" in state:
            zero = origin(int(state["refresh_step"]) if "refresh_step" in state else None)
            assert zero is not None
            self.change = zero.with_coefficient(state["coefficient"].to(*place).clone())
            self._changed = True
        if "frozen_left" in state:
            self.frozen = low_rank(*(state[key].to(*place).clone() for key in ("frozen_left", "frozen_right")))
            self.compression_error = float(state["frozen_lost"])


def _writable(output: Tensor) -> Tensor:
    """Returns the tensor that a low-rank term is added to: the output if it can be written in place, else a copy."""
    out = output.to(arithmetic_dtype(output))
    # the output of a weight of a tensor subclass may ignore an in-place add
    writable = out is not output or (type(output) is Tensor and output.is_contiguous())
    return out.contiguous() if writable else out.clone(memory_format=torch.contiguous_format)


def low_rank(left_MK: Tensor, right_NK: Tensor) -> LowRank:
    """Returns the fixed matrix left @ right^T as a `LowRank` point."""
    return LowRank(draw=FixedCoefficient(left_MK), v_NR=right_NK, refresh_step=-1, gram=1.0)


def join(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns (left, right) of the sum of low-rank matrices: their factors concatenated along the rank."""
    left, right = (torch.cat([part[side].to(dtype) for part in parts], dim=1) for side in (0, 1))
    return left, right


def compress(left_MK: Tensor, right_NK: Tensor, most: int) -> tuple[Tensor, Tensor, float]:
    """Returns (left, right, error): the factors of F, the best rank-`most` approximation of D = left @ right^T.

    error = |D - F| / |D| in the Frobenius norm. Computed by QR of both factors and an SVD of the K x K core, in float64
    on the CPU; each side gets the square roots of the singular values. If K <= `most`, D is returned unchanged.
    """
    if left_MK.shape[1] <= most:
        return left_MK, right_NK, 0.0
    q_MK, a_KK = torch.linalg.qr(left_MK.double().cpu())
    p_NK, b_KK = torch.linalg.qr(right_NK.double().cpu())
    u_KK, singular_K, vh_KK = torch.linalg.svd(a_KK @ b_KK.T, full_matrices=False)
    root = singular_K[:most].sqrt()
    left, right = q_MK @ u_KK[:, :most] * root, p_NK @ vh_KK[:most].T * root
    norm = float(torch.linalg.vector_norm(singular_K))
    lost = float(torch.linalg.vector_norm(singular_K[most:])) / norm if norm else 0.0
    return left.to(left_MK), right.to(right_NK), lost
