"""Direct feedback: steps along the error at the last hidden states, combined with zeroth-order steps.

The gradient of a linear layer is G = sum_t delta_t x_t^T, with delta_t the gradient at its output. The output of a
layer that writes the residual stream is a summand of the last hidden states h_t, next to the contributions of later
layers. The error e_t = dL/dh_t therefore replaces delta_t, and is the same for all of these layers (direct feedback
alignment, Nokland 2016, with the identity instead of its random matrices):

    G ~ sum_t e_t x_t^T.

Computing e_t needs no backward pass through a layer (`tezo.estimators.readout`); which layers write the residual stream
is measured (`tezo.estimators.residual_writers`). For W_t = W_0 + A V^T, with V the leading directions of the layer's
inputs, a step is Adam on

    g = sum_t e_t (V^T x_t)^T,   M x r,

for which V^T x_t is stored for each layer, r numbers per position. One forward pass gives the whole g, whereas two
passes give one number kappa, so early steps make fast progress. But g is biased, because it ignores the later layers.
Once the bias dominates, feedback steps make no progress; zeroth-order steps, which are unbiased, continue from there.
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
    """An estimate that is given by its coefficient instead of by projected gradients."""

    coefficient: Tensor

    def tiles(self) -> Iterator[Tile]:
        yield slice(None), self.coefficient


class DirectFeedback(Estimator):
    """The estimate g = sum_t e_t (V^T x_t)^T for the tuned layers that write the residual stream.

    Consecutive steps of this kind are a phase. The first step of a phase finds the layers, with two additional forward
    passes. Where it finds none, as in a model whose layers have grown far apart in size, it takes those that `check`
    found at the start. The loss must be a tensor that is differentiable with respect to the last hidden states.

    Args:
        fixed_sides: target -> roles of its fixed factors; a layer qualifies if only its input side is fixed.
    """

    kind = FEEDBACK

    def __init__(self, fixed_sides: Callable[[Target], tuple[Role, ...]]) -> None:
        self._fixed_sides = fixed_sides
        self._store: FactorStore | None = None
        self._writers: tuple[nn.Module, list[Target]] | None = None
        self._resumed: Sequence[str] = ()
        self._at_start: list[Target] = []

    def prepare(self, model: nn.Module, moving: Mapping[str, MovingParameter], seed: int) -> None:
        self._model, self._seed = model, seed
        self._targets = [parameter.target for parameter in moving.values()]

    def set_factor_store(self, store: FactorStore) -> None:
        self._store = store

    def resume(self, names: Sequence[str]) -> None:
        self._writers, self._resumed = None, names

    def check(self, closure: Closure) -> None:
        with evaluation_mode(self._model):
            base, self._at_start = self._find_writers(closure)
            last_errors(base, closure, {})  # a loss may depend on more than the last hidden states, or on none of them

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        with evaluation_mode(self._model):
            base, writers = self._writers_of_phase(closure, draw)
            taps = {target.name: _tap(target, draw.directions[target.name][0]) for target in writers}
            loss, errors = last_errors(base, closure, taps)
        coefficients = {target.name: _gradient(target, errors) for target in writers}
        if not all(math.isfinite(x) for x in (float(loss), *(float(g.abs().max()) for g in coefficients.values()))):
            raise FloatingPointError(float(loss))
        collected = CollectedFactors(coefficients, self.passes(0, first=draw.count == 0))
        if self._store is not None:
            self._store.save(self.kind, draw.step, collected)
        return self._estimate(float(loss), collected, draw)

    def passes(self, directions: int, *, first: bool) -> int:
        del directions
        return 1 + PASSES * first

    def recall(self, record: StepRecord, draw: StepDraw) -> Estimate:
        collected = self._store.load(self.kind, record.step) if self._store is not None else None
        if collected is None:
            raise RequestError(
                f"the saved gradient of feedback step {record.step} is missing; restore its file, or stop before it."
            )
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
        elif self._writers is None:  # the phase began in an earlier process
            base, _ = last_hidden(self._model, closure)
            self._writers = base, [target for target in self._targets if target.name in self._resumed]
        assert self._writers is not None
        return self._writers

    def _find_writers(self, closure: Closure) -> tuple[nn.Module, list[Target]]:
        candidates = [t for t in self._targets if t.is_matrix and self._fixed_sides(t) == (t.input_role,)]
        base, writers = residual_writers(self._model, candidates, closure, self._seed)
        writers = writers or self._at_start
        if not writers:
            raise RequestError(
                "a feedback step found no tuned layer whose output is added to the residual stream; tune such layers "
                "with method.targets, or set train.feedback_first=0 and train.feedback_last=0."
            )
        return base, writers


def _tap(target: Target, direction: Direction) -> Tap:
    """The tap that stores V^T x of every input x of the target's modules."""
    assert isinstance(direction, LowRank)
    return [site.module for site in target.sites], lambda x: x @ direction.v_NR.to(x.device, x.dtype)


def _gradient(target: Target, errors: Sequence[tuple[dict[str, list[Tensor]], Tensor]]) -> Tensor:
    """sum_t e_t (V^T x_t)^T: (M, r), in the target's state dtype."""
    dtype = target.state_dtype
    parts = [
        e.reshape(-1, e.shape[-1]).to(dtype).T @ h.reshape(-1, h.shape[-1]).to(e.device, dtype)
        for kept, e in errors
        for h in kept[target.name]
    ]
    return torch.stack(parts).sum(0)
