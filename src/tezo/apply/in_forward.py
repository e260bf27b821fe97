"""Low-rank directions in the forward pass: the stored tensor is read, never written.

The output of a Linear with weight W becomes x (W + D)^T = x W^T + ((x V) * c) U^T, where D has what was
trained since the factors were drawn and, during an evaluation, plus or minus rho Z. Every module that
owns the parameter gets the hook, so tied weights move together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tezo.apply.base import MovingParameter, Shift, require_writable
from tezo.apply.blocks import Blocks
from tezo.apply.interception import EMBEDDING, Interception
from tezo.directions import Direction, FixedFactors
from tezo.params import Layout, Site, Target
from tezo.perturbations import Moment


class InForward(MovingParameter):
    """A matrix moved in the forward pass: W_t = W + D, with D in the space of the current fixed factors.

    When a direction comes with new fixed factors, D is folded into the stored tensor once and starts
    again from zero; TeZO's factors never change, and its stored tensors stay bit-identical.
    """

    writes_weight = False
    in_blocks = True

    def __init__(self, target: Target, blocks: Blocks) -> None:
        super().__init__(target)
        self.change: FixedFactors | None = None
        self._blocks = blocks
        self._shifts: tuple[Shift, ...] = ()
        self._changed = False
        # CPUs without half-precision instructions multiply float32 faster, by much where the matrices are thin
        self._dtype = target.state_dtype if target.device.type == "cpu" else None
        self._handles += [self._hook(site) for site in target.sites]

    def _hook(self, site: Site) -> RemovableHandle | Interception:
        if site.layout == "embedding":
            table = {EMBEDDING: self._lookup}
            return Interception(site.module, table, lambda: self._moved)
        assert site.layout is not None
        add_ = _ADD[site.layout]

        def add_term(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            del module
            if not self._moved:
                return output
            out, points = self._sum(output), self._points()
            count, split = len(points.coefficient), self._blocks.split
            add_(points, split(out, count, 1), split(args[0].to(out.device, out.dtype), count, 1))
            return out.to(output.dtype)

        return site.module.register_forward_hook(add_term)

    def _lookup(self, ids: Tensor, *others: Any, **options: Any) -> Tensor:
        output: Tensor = EMBEDDING(ids, *others, **options)
        out, points = self._sum(output), self._points()
        count, split = len(points.coefficient), self._blocks.split
        points.add_lookup_(split(out, count, 1), split(ids, count, 0))
        return out.to(output.dtype)

    def _sum(self, output: Tensor) -> Tensor:
        """What the term is added to: the output itself where that can be written, else a copy."""
        out = output.to(self._dtype) if self._dtype is not None else output
        # a weight of a tensor subclass may give outputs that ignore an add in place
        writable = out is not output or (type(output) is Tensor and output.is_contiguous())
        return out.contiguous() if writable else out.clone(memory_format=torch.contiguous_format)

    @property
    def _moved(self) -> bool:
        """Whether the model is to compute with anything but the stored tensor."""
        return bool(self._shifts) or self._changed

    def _points(self) -> FixedFactors:
        """D plus what is shown, a point a block, made where it is used: all layers' at once would take memory."""
        assert self.change is not None
        if not self._shifts:
            return self.change.with_coefficient(self.change.coefficient.unsqueeze(0))
        directions = {id(shift.direction): shift.direction for shift in self._shifts}
        drawn = {key: _coefficient(direction) for key, direction in directions.items()}  # once for both signs
        steps = [shift.scale * drawn[id(shift.direction)] for shift in self._shifts]
        return self.change.with_coefficient(torch.stack(steps).add_(self.change.coefficient))

    def begin(self, direction: Direction, moment: Moment) -> None:
        super().begin(direction, moment)
        assert isinstance(direction, FixedFactors)
        if self.change is not None and self.change.born != direction.born:
            self.fold()
        if self.change is None:
            self.change = direction.origin()

    def show(self, shifts: Sequence[Shift]) -> None:
        self._shifts = tuple(shifts)

    def add_(self, direction: Direction, rows: slice, delta: Tensor, alpha: float) -> None:
        del direction
        assert self.change is not None
        self.change.coefficient[rows].add_(delta, alpha=alpha)
        self._changed = True

    def decay_(self, factor: float) -> None:
        """Multiplies the change D by `factor`; the base is left alone."""
        if self.change is not None and self._changed:
            self.change.coefficient.mul_(factor)

    def fold(self) -> None:
        """W += D, D = 0: one pass over the stored tensor."""
        if self.change is not None and self._changed:
            require_writable(self.target, "folding trained factors into the base")
            left_MR, right_NR = (factor.to(self.target.state_dtype) for factor in self.change.factors())
            for rows in self.row_tiles():
                self.write_(rows, left_MR[rows] @ right_NR.T, 1.0)
        self.change, self._changed = None, False

    def state(self) -> dict[str, Tensor]:
        return {"coefficient": self.change.coefficient} if self.change is not None and self._changed else {}

    def load_state(self, direction: Direction, state: dict[str, Tensor]) -> None:
        assert isinstance(direction, FixedFactors)
        self.change, self._changed = None, False
        if "coefficient" in state:
            self.change = direction.with_coefficient(state["coefficient"].to(direction.coefficient).clone())
            self._changed = True


def _coefficient(direction: Direction) -> Tensor:
    assert isinstance(direction, FixedFactors)
    return direction.coefficient


_ADD: dict[Layout, Callable[[FixedFactors, Tensor, Tensor], None]] = {
    "linear": lambda point, out, x: point.add_linear_(out, x),
    "transposed": lambda point, out, x: point.add_transposed_(out, x),
}
