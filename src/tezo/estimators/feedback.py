"""Direct feedback: steps along the error at the last hidden states, taken between zeroth-order ones.

The gradient of a linear layer is G = sum_t delta_t x_t^T, with delta_t the gradient at its output. The output of a
layer that writes the residual stream is still there in the last hidden states h_t, beside what later layers made of it.
So the error e_t = dL/dh_t stands in for delta_t, the same for all of these layers (direct feedback alignment, Nokland
2016, with the identity for its random matrices):

    G ~ sum_t e_t x_t^T.

No layer is passed backwards for e_t (`tezo.estimators.readout`), and which layers these are is measured
(`tezo.estimators.residual_writers`). For W_t = W_0 + A V^T, with V the leading directions of the layer's inputs, a
step is Adam on

    g = sum_t e_t (V^T x_t)^T,   M x r,

which keeps V^T x_t of each layer, r numbers a position. One forward pass gives all of g, where two give the one number
kappa: such steps go far at first. But g is biased by all that later layers do, and where the bias outweighs the rest
they lead nowhere: zeroth-order steps, which are not biased, go on from there.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tezo.directions.bases import CollectedFactors, FactorStore, Role
from tezo.directions.spaces import Direction, LowRank, Tile
from tezo.directions.targets import Target
from tezo.errors import RequestError
from tezo.estimators.estimate import FEEDBACK, Closure, Estimate, ParameterEstimate, StepDraw, StepRecord
from tezo.estimators.estimator import Estimator
from tezo.estimators.readout import Tap, last_errors, last_hidden
from tezo.estimators.residual_writers import PASSES, residual_writers
from tezo.forward import MovingParameter
from tezo.forward.evaluation_mode import evaluation_mode


@dataclass(frozen=True)
class FeedbackEstimate(ParameterEstimate):
    """An estimate whose coefficient is known, rather than measured along directions."""

    coefficient: Tensor

    def tiles(self) -> Iterator[Tile]:
        yield slice(None), self.coefficient


class DirectFeedback(Estimator):
    """g = sum_t e_t (V^T x_t)^T of the tuned layers that write the residual stream.

    Steps of this kind that follow one another are a phase. The layers are found at its first step, in two more forward
    passes. The loss must be a tensor that follows from the last hidden states by differentiable steps.

    Args:
        fixed_sides: target -> the sides whose factors are fixed; only layers whose input side alone is fixed qualify.
    """

    kind = FEEDBACK

    def __init__(self, fixed_sides: Callable[[Target], tuple[Role, ...]]) -> None:
        self._fixed_sides = fixed_sides
        self._store: FactorStore | None = None
        self._writers: tuple[nn.Module, list[Target]] | None = None
        self._resumed: Sequence[str] = ()

    def prepare(self, model: nn.Module, moving: Mapping[str, MovingParameter], seed: int) -> None:
        self._model, self._seed = model, seed
        self._targets = [parameter.target for parameter in moving.values()]

    def set_factor_store(self, store: FactorStore) -> None:
        self._store = store

    def resume(self, names: Sequence[str]) -> None:
        self._writers, self._resumed = None, names

    def check(self, closure: Closure) -> None:
        with evaluation_mode(self._model):
            self._find_writers(closure)

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        with evaluation_mode(self._model):
            base, writers = self._writers_of_phase(closure, draw)
            taps = {target.name: _tap(target, draw.directions[target.name][0]) for target in writers}
            loss, errors = last_errors(base, closure, taps)
        found = {target.name: _gradient(target, errors) for target in writers}
        if not all(math.isfinite(x) for x in (float(loss), *(float(g.abs().max()) for g in found.values()))):
            raise FloatingPointError(float(loss))
        collected = CollectedFactors(found, 1 if draw.count else 1 + PASSES)
        if self._store is not None:
            self._store.save(self.kind, draw.step, collected)
        return self._estimate(float(loss), collected, draw)

    def recall(self, record: StepRecord, draw: StepDraw) -> Estimate:
        collected = self._store.load(self.kind, record.step) if self._store is not None else None
        if collected is None:
            raise RequestError(f"what feedback step {record.step} measured is missing; put it back, or stop before it.")
        self.resume(list(collected.factors))
        return self._estimate(record.loss, collected, draw)

    def _estimate(self, loss: float, collected: CollectedFactors, draw: StepDraw) -> Estimate:
        targets = {target.name: target for target in self._targets}
        gradients = {
            name: FeedbackEstimate(
                draw.directions[name], (), draw.count, g.to(targets[name].device, targets[name].state_dtype)
            )
            for name, g in collected.factors.items()
        }
        return Estimate(loss, gradients, collected.calls)

    def _writers_of_phase(self, closure: Closure, draw: StepDraw) -> tuple[nn.Module, list[Target]]:
        if draw.count == 0:
            self._writers = self._find_writers(closure)
        elif self._writers is None:  # the phase began before this process did
            base, _ = last_hidden(self._model, closure)
            self._writers = base, [target for target in self._targets if target.name in self._resumed]
        assert self._writers is not None
        return self._writers

    def _find_writers(self, closure: Closure) -> tuple[nn.Module, list[Target]]:
        candidates = [t for t in self._targets if t.is_matrix and self._fixed_sides(t) == (t.input_role,)]
        base, writers = residual_writers(self._model, candidates, closure, self._seed)
        if not writers:
            raise RequestError(
                "a feedback step found no tuned layer whose output reaches the last hidden states as it is; tune such "
                "layers with method.targets, or set train.feedback_first=0 and train.feedback_last=0."
            )
        return base, writers


def _tap(target: Target, direction: Direction) -> Tap:
    """Keeps V^T x of every input x."""
    assert isinstance(direction, LowRank)
    return [site.module for site in target.sites], lambda x: x @ direction.v_NR.to(x.device, x.dtype)


def _gradient(target: Target, errors: Sequence[tuple[dict[str, list[Tensor]], Tensor]]) -> Tensor:
    """(M, r): sum_t e_t (V^T x_t)^T."""
    dtype = target.state_dtype
    parts = [
        e.reshape(-1, e.shape[-1]).to(dtype).T @ h.reshape(-1, h.shape[-1]).to(e.device, dtype)
        for kept, e in errors
        for h in kept[target.name]
    ]
    return torch.stack(parts).sum(0)
