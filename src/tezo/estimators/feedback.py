"""Direct feedback: steps along the error at the last hidden states, taken between zeroth-order ones.

The gradient of a linear layer is G = sum_t delta_t x_t^T, with delta_t the gradient at its output. The output of a
layer that writes the residual stream is still there in the last hidden states h_t, beside what later layers made of it.
So the error e_t = dL/dh_t stands in for delta_t, the same for all of these layers (direct feedback alignment, Nokland
2016, with the identity for its random matrices):

    G ~ sum_t e_t x_t^T.

No layer is passed backwards for e_t (`tezo.estimators.readout`), and which layers these are is measured
(`tezo.estimators.residual_writers`). For
W_t = W_0 + A V^T, with V the leading directions of the layer's inputs, a step is Adam on

    g = sum_t e_t (V^T x_t)^T,   M x r,

which keeps V^T x_t of each layer, r numbers a position. One forward pass gives all of g, where two give the one number
kappa: such steps go far at first. But g is biased by all that later layers do, and where the bias outweighs the rest
they lead nowhere: zeroth-order steps, which are not biased, go on from there.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.bases import CollectedFactors, FactorStore
from tezo.directions.perturbations import Lazy
from tezo.directions.spaces import Direction, FixedFactors, LowRank, Tile
from tezo.directions.targets import Target
from tezo.errors import RequestError
from tezo.estimators.estimate import Closure, Estimate, StepRecord
from tezo.estimators.readout import Tap, last_errors, last_hidden
from tezo.estimators.residual_writers import PASSES, residual_writers
from tezo.forward.evaluation_mode import evaluation_mode
from tezo.optim.limits import check_rate
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.updates import Adam, State, Update

UPDATE = Adam((0.9, 0.999), 1e-8, eps_in_sqrt=False, bias_correction=True)
"""Of feedback steps: torch's Adam, with torch's settings."""

KIND = "feedback"
"""By which what such steps measured is kept."""
_START, _COUNTS = "feedback/", "counts"


@dataclass(frozen=True)
class FeedbackEstimate(Estimate):
    """An estimate whose coefficient is known, rather than measured along directions."""

    coefficient: Tensor

    def tiles(self) -> Iterator[Tile]:
        yield slice(None), self.coefficient


class FeedbackOptimizer(ZerothOrderOptimizer):
    """A zeroth-order optimizer that takes feedback steps too, on the same coefficients.

    `feedback_step(closure)` stands where `step(closure)` does. Steps of the kind that follow one another are a phase,
    with Adam's moments of its own; the layers that write the residual stream are found at its first step, in two more
    forward passes.

    Args:
        model: of transformers, or an adapter of PEFT around one.
        perturbation: LOZO's, whose coefficient is a factor.
        update: of zeroth-order steps.
        feedback_scale: learning rate of feedback steps, as a share of `lr`.
        options: as of `ZerothOrderOptimizer`.
    """

    def __init__(
        self, model: nn.Module, perturbation: Lazy, update: Update, *, feedback_scale: float, **options: Any
    ) -> None:
        check_rate("feedback_scale", feedback_scale)
        super().__init__(model, perturbation, update, **options)
        self.feedback_scale = feedback_scale
        self._sides = {target.name: perturbation.fixed(target) for target in self.targets if target.is_matrix}
        self._writers: tuple[nn.Module, list[Target]] | None = None
        self._feedback_state: dict[str, State] = {}
        self._feedback_steps = self._feedback_passes = self._phase = 0
        self._store: FactorStore | None = None

    @torch.no_grad()
    def feedback_step(self, closure: Closure) -> float:
        """One step along the error at the last hidden states; returns the loss before it.

        Args:
            closure: evaluates the objective on this step's batch; the loss must be a tensor that follows from the last
                hidden states by differentiable steps. It is called once, and twice more where a phase begins.

        Raises:
            RequestError: there are no last hidden states, no tuned layer that writes them, or no gradient.
            NonFiniteLossError: the parameters are as before the step.
        """
        if not self._watching:
            self._look_at(lambda _: closure())
        drawn = self._draw()
        with evaluation_mode(self.model):
            loss, seen = self._look_back(closure, drawn)
        if self._store is not None:
            self._store.save(KIND, self.num_steps, seen)
        lr = float(self.param_groups[0]["lr"]) * self.feedback_scale
        self._take_fed(drawn, StepRecord(self.num_steps, loss, lr), seen)
        return loss

    def _look_back(self, closure: Closure, drawn: dict[str, list[Direction]]) -> tuple[float, CollectedFactors]:
        """(loss, g of each layer that writes the residual stream)."""
        self._writers = self._writers or self._find(closure)
        base, writers = self._writers
        taps = {target.name: _tap(target, drawn[target.name][0]) for target in writers}
        loss, errors = last_errors(base, closure, taps)
        found = {target.name: _gradient(target, errors) for target in writers}
        if not all(math.isfinite(x) for x in (float(loss), *(float(g.abs().max()) for g in found.values()))):
            raise self._not_finite(float(loss))
        return float(loss), CollectedFactors(found, 1 if self._phase else 1 + PASSES)

    def find_writers(self, closure: Closure) -> list[str]:
        """The tuned parameters that feedback steps move, in two forward passes.

        Args:
            closure: calls the model on some rows.

        Raises:
            RequestError: there are none, or no last hidden states.
        """
        with evaluation_mode(self.model):
            return [target.name for target in self._find(closure)[1]]

    def _find(self, closure: Closure) -> tuple[nn.Module, list[Target]]:
        if self._phase:  # a run that was taken up in the midst of one
            return last_hidden(self.model, closure)[0], [t for t in self.targets if t.name in self._feedback_state]
        facing = [t for t in self.targets if t.is_matrix and self._sides[t.name] == (t.input_role,)]
        base, writers = residual_writers(self.model, facing, closure, self.seed)
        if not writers:
            raise RequestError(
                "a feedback step found no tuned layer whose output reaches the last hidden states as it is; tune such "
                "layers with method.targets, or set train.feedback_first=0 and train.feedback_last=0."
            )
        return base, writers

    def _take_fed(self, drawn: dict[str, list[Direction]], record: StepRecord, seen: CollectedFactors) -> None:
        for name, state in self._update_state.items():  # which no step of their own takes over to new factors now
            direction = drawn[name][0]
            if isinstance(direction, FixedFactors):
                state["exp_avg"] = direction.carry_over(state["exp_avg"])
        for name, gradient in seen.factors.items():
            moving = self.moving[name]
            g = gradient.to(moving.target.device, moving.target.state_dtype)
            estimate = FeedbackEstimate(drawn[name], (), self._phase, g)
            if name not in self._feedback_state:
                self._feedback_state[name] = UPDATE.init(estimate, moving)
            self._decay(moving, record.lr)
            UPDATE.step(moving, estimate, self._feedback_state[name], record.lr)
        self._phase, self._feedback_steps = self._phase + 1, self._feedback_steps + 1
        self._feedback_passes += seen.calls
        self.last_step = record
        self.num_steps += 1

    def _take(self, drawn: dict[str, list[Direction]], record: StepRecord) -> None:
        self._writers, self._feedback_state, self._phase = None, {}, 0
        super()._take(drawn, record)

    @property
    def _num_estimates(self) -> int:
        return self.num_steps - self._feedback_steps

    @torch.no_grad()
    def replay(self, record: StepRecord) -> None:
        """As `ZerothOrderOptimizer.replay`; a feedback step is taken from what was kept of it.

        Raises:
            RequestError: the record is of another step, or nothing was kept.
        """
        if record.probes or record.step != self.num_steps:
            super().replay(record)
            return
        seen = self._store.load(KIND, record.step) if self._store is not None else None
        if seen is None:
            raise RequestError(f"what feedback step {record.step} measured is missing; put it back, or stop before it.")
        self._take_fed(self._draw(), record, seen)

    def set_factor_store(self, store: FactorStore) -> None:
        self._store = store
        super().set_factor_store(store)

    @property
    def num_forward_passes(self) -> int:
        """Evaluations of the closure so far: one for a feedback step, and two where a phase begins."""
        return super().num_forward_passes - 2 * self.num_directions * self._feedback_steps + self._feedback_passes

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {KIND: self._phase_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._load_phase(state_dict.get(KIND, {}))

    def resumable_state(self) -> dict[str, Tensor]:
        own = {f"{_START}{key}": value for key, value in self._phase_state().items()}
        return super().resumable_state() | own

    def load_resumable_state(self, state: dict[str, Tensor], num_steps: int) -> None:
        super().load_resumable_state({k: v for k, v in state.items() if not k.startswith(_START)}, num_steps)
        self._load_phase({k.removeprefix(_START): v for k, v in state.items() if k.startswith(_START)})

    def _phase_state(self) -> dict[str, Tensor]:
        """What later steps of this kind depend on, as "NAME/KEY"; nothing before the first."""
        if not self._feedback_steps:
            return {}
        counts = torch.tensor([self._feedback_steps, self._feedback_passes, self._phase])
        moments = {f"{name}/{k}": v for name, state in self._feedback_state.items() for k, v in state.items()}
        return {_COUNTS: counts} | moments

    def _load_phase(self, state: dict[str, Tensor]) -> None:
        counts = state.get(_COUNTS, torch.zeros(3)).tolist()
        self._feedback_steps, self._feedback_passes, self._phase = (int(count) for count in counts)
        self._writers, self._feedback_state = None, {}
        for key, value in state.items():
            name, _, role = key.rpartition("/")
            if key != _COUNTS:
                place = self.moving[name].target.device
                self._feedback_state.setdefault(name, {})[role] = value.to(place).clone()


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
