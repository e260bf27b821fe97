"""Low-rank directions in the forward pass: the stored tensor is read, never written.

The output of a Linear with weight W becomes x (W + D)^T = x W^T + ((x V) * c) U^T, where D has what was
trained since the factors were drawn and, during an evaluation, plus or minus rho Z. Every module that
owns the parameter gets the hook, so tied weights move together.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tezo.apply.base import MovingParameter, require_writable
from tezo.directions import Direction, FixedFactors
from tezo.params import Layout, Target
from tezo.perturbations import Moment


class InForward(MovingParameter):
    """A matrix moved in the forward pass: W_t = W + D, with D in the space of the current fixed factors.

    When a direction comes with new fixed factors, D is folded into the stored tensor once and starts
    again from zero; TeZO's factors never change, and its stored tensors stay bit-identical.
    """

    writes_weight = False

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.change: FixedFactors | None = None
        self._shown: FixedFactors | None = None
        self._changed = False
        self._handles = [self._hook(site.module, site.layout) for site in target.sites if site.layout is not None]

    def _hook(self, module: nn.Module, layout: Layout) -> RemovableHandle:
        term = _TERMS[layout]

        def add_term(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            del module
            if self._shown is None:
                return output
            return output + term(self._shown, args[0]).to(output.dtype)

        return module.register_forward_hook(add_term)

    def begin(self, direction: Direction, moment: Moment) -> None:
        super().begin(direction, moment)
        assert isinstance(direction, FixedFactors)
        if self.change is not None and self.change.born != direction.born:
            self.fold()
        if self.change is None:
            self.change = direction.with_coefficient(torch.zeros_like(direction.coefficient))

    def shift(self, direction: Direction, scale: float) -> None:
        assert isinstance(direction, FixedFactors) and self.change is not None
        if scale:
            self._show(self.change.coefficient + scale * direction.coefficient)
        elif self._changed:
            self._show(self.change.coefficient)
        else:
            self._shown = None

    def _show(self, coefficient: Tensor) -> None:
        assert self.change is not None
        self._shown = self.change.with_coefficient(coefficient)

    def add_(self, direction: Direction, rows: slice, delta: Tensor, alpha: float) -> None:
        del direction
        assert self.change is not None
        self.change.coefficient[rows].add_(delta, alpha=alpha)
        self._changed = True
        self._show(self.change.coefficient)

    def decay_(self, factor: float) -> None:
        """Multiplies the change D by `factor`; the base is left alone."""
        if self.change is not None and self._changed:
            self.change.coefficient.mul_(factor)
            self._show(self.change.coefficient)

    def fold(self) -> None:
        """W += D, D = 0: one pass over the stored tensor."""
        if self.change is not None and self._changed:
            require_writable(self.target, "folding trained factors into the base")
            left_MR, right_NR = (factor.to(self.target.state_dtype) for factor in self.change.factors())
            for rows in self.row_tiles():
                self.write_(rows, left_MR[rows] @ right_NR.T, 1.0)
        self.change, self._shown, self._changed = None, None, False

    def state(self) -> dict[str, Tensor]:
        return {"coefficient": self.change.coefficient} if self.change is not None and self._changed else {}

    def load_state(self, direction: Direction, state: dict[str, Tensor]) -> None:
        assert isinstance(direction, FixedFactors)
        self.change, self._shown, self._changed = None, None, False
        if "coefficient" in state:
            self.change = direction.with_coefficient(state["coefficient"].to(direction.coefficient).clone())
            self._changed = True
            self._show(self.change.coefficient)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


_TERMS: dict[Layout, Callable[[FixedFactors, Tensor], Tensor]] = {
    "linear": lambda point, x: point.linear(x.to(point.v_NR.dtype)),
    "transposed": lambda point, x: point.linear_transposed(x.to(point.v_NR.dtype)),
    "embedding": lambda point, ids: point.lookup(ids),
}
