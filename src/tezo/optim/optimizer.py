"""The interface of torch.optim, `loss = optimizer.step(closure)`, with forward passes alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from tezo.directions.bases import FactorStore, Passes
from tezo.directions.perturbations import DrawKey, Perturbation
from tezo.directions.spaces import Direction
from tezo.directions.targets import ALL_LINEAR, Target, select_targets
from tezo.distributed import Ranks
from tezo.errors import NonFiniteLossError, RequestError
from tezo.estimators.estimate import Closure, Estimate, Probe, StepDraw, StepRecord
from tezo.estimators.estimator import Estimator
from tezo.estimators.two_point import TwoPoint
from tezo.forward import MovingParameter
from tezo.forward.evaluation_mode import evaluation_mode
from tezo.numerics.products import float32_on_emulating_cpu
from tezo.optim.limits import check_settings
from tezo.optim.optimizer_state import Moments, OptimizerState
from tezo.optim.tuned_parameters import TunedParameters
from tezo.optim.tuner import LowRankChange
from tezo.optim.updates import Update


@dataclass(frozen=True)
class StepRule:
    """A kind of step.

    Attributes:
        estimator: gives the estimate.
        update: steps along it.
        lr_scale: learning rate of these steps, as a share of the optimizer's.
        restarts: whether the moments of `update` start again after a step of another kind.
    """

    estimator: Estimator
    update: Update
    lr_scale: float = 1.0
    restarts: bool = False


class ZerothOrderOptimizer(torch.optim.Optimizer):
    """A perturbation, an estimator and an update rule, put together over the parameters of a model.

    `step(closure)` draws `num_directions` directions, evaluates the closure at W + rho Z and W - rho Z
    along each, and steps along the average of kappa Z. The closure runs forward passes only and returns
    any scalar; the model is in evaluation mode during the step, so that both evaluations see one function.
    Learning-rate schedulers of torch work on it. Between steps the model computes with the tuned
    parameters, by forward hooks where nothing is written; `merge()` writes them into the weights.

    Args:
        model: to be tuned, already on its device and in its dtype.
        perturbation: draws directions.
        update: steps along two-point estimates; must take the perturbation's type of direction.
        lr: learning rate.
        rho: perturbation scale (the paper's perturbation rate).
        weight_decay: decoupled: what the method trains is multiplied by 1 - lr * weight_decay each step.
            That is the weight where the method writes weights, and the change (c, A or S) where it keeps
            factors beside them. 1-D parameters are not decayed.
        num_directions: directions averaged in a step, at two evaluations each.
        targets: patterns that choose the parameters, see `tezo.directions.targets.select_targets`.
        seed: of every draw.
        in_forward: False moves low-rank directions in place too, as published code does (for comparison).
        frozen_rank: where factors change during a run, what was trained with the old ones is kept beside the base, by
            factors of at most this rank, compressed to it; None: it is folded into the weights, and beside a base that
            cannot be written kept at rank 64.
        more_rules: further kinds of step, chosen by `step(closure, kind=...)`.

    Raises:
        RequestError: a setting is out of range, or the targets cannot be moved this way.
        NonFiniteLossError: from `step`; the parameters are as before the step.
    """

    def __init__(
        self,
        model: nn.Module,
        perturbation: Perturbation,
        update: Update,
        *,
        lr: float,
        rho: float = 1e-3,
        weight_decay: float = 0.0,
        num_directions: int = 1,
        targets: Sequence[str] = (ALL_LINEAR,),
        seed: int = 0,
        in_forward: bool = True,
        frozen_rank: int | None = None,
        more_rules: Sequence[StepRule] = (),
    ) -> None:
        check_settings(lr, rho, weight_decay, num_directions, frozen_rank, perturbation)
        self.model = model
        self.perturbation = perturbation
        self.update = update
        self.num_directions = num_directions
        self.seed = seed
        self.targets = select_targets(model, targets)
        self._calibrated = False
        perturbation.prepare(self.targets)
        self.parameters = TunedParameters(
            model, self.targets, perturbation, update, in_forward=in_forward, frozen_rank=frozen_rank
        )
        self._two_point = TwoPoint(rho)
        self.rules = {rule.estimator.kind: rule for rule in (StepRule(self._two_point, update), *more_rules)}
        for rule in self.rules.values():
            rule.estimator.prepare(model, self.moving, seed)
        self._restarting = [kind for kind, rule in self.rules.items() if rule.restarts]
        self.progress = OptimizerState(counts=dict.fromkeys(self.rules, 0), moments={kind: {} for kind in self.rules})
        super().__init__([t.parameter for t in self.targets], {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by torch's constructor; later calls are refused, since `targets` settles what is tuned."""
        if self.param_groups:
            raise RequestError("add_param_group: what is tuned is settled by `targets`; make another optimizer.")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = ..., *, kind: str | None = ...) -> None: ...
    @overload
    def step(self, closure: Closure, *, kind: str | None = ...) -> float: ...
    @torch.no_grad()
    def step(self, closure: Closure | None = None, *, kind: str | None = None) -> float | None:
        """One step; returns the mean of its losses.

        Args:
            closure: evaluates the objective on this step's batch. It is called twice for every direction, unless
                it is a `BlockClosure` and several evaluations are faster in one forward pass.
            kind: of the step, one of `kinds`; None: the first of them, along random directions.
        """
        if closure is None:
            raise RequestError("step() needs a closure that returns the loss: optimizer.step(lambda: loss_of(batch)).")
        return self.take_step(closure, self.kinds[0] if kind is None else kind)

    @torch.no_grad()
    def take_step(self, closure: Closure, kind: str) -> float:
        """`step` of a kind."""
        rule = self._rule(kind)
        if not self._calibrated:
            self._calibrate_with(lambda _: closure())
        draw = self.draw(kind)
        try:
            estimate = rule.estimator.estimate(closure, draw)
        except FloatingPointError as error:
            raise self._not_finite(error) from None
        lr = float(self.param_groups[0]["lr"]) * rule.lr_scale
        record = StepRecord(self.num_steps, estimate.loss, lr, estimate.probes, kind, estimate.forward_passes)
        self._apply(rule, estimate, record, draw)
        return estimate.loss

    @torch.no_grad()
    def measure(self, closure: Closure, rho: float | None = None, *, others: int = 0) -> tuple[Probe, ...]:
        """What the next step along random directions would measure; no step is taken.

        Args:
            closure: as for `step`.
            rho: the perturbation scale; None: that of the steps.
            others: measures along so many directions that no step draws, in place of the next step's.
        """
        draw = self.draw(others=others)
        try:
            return self._two_point.probes(closure, draw.directions, self.rho if rho is None else rho)
        except FloatingPointError as error:
            raise self._not_finite(error) from None

    @torch.no_grad()
    def replay(self, record: StepRecord) -> None:
        """Takes a finished step again from what was recorded of it, without an evaluation.

        Args:
            record: of step `num_steps` of a run with the same seed and settings.
        """
        rule = self._rule(record.kind)
        count = self.num_directions if record.kind == self.kinds[0] else 0
        if record.step != self.num_steps or len(record.probes) != count:
            raise RequestError(
                f"record is of step {record.step} with {len(record.probes)} directions; the next step is "
                f"{self.num_steps}, with {count}."
            )
        draw = self.draw(record.kind)
        self._apply(rule, rule.estimator.recall(record, draw), record, draw)

    def check_kind(self, kind: str, closure: Closure) -> None:
        """An error where the model does not allow steps of that kind.

        Args:
            kind: one of `kinds`.
            closure: evaluates the objective on some rows.

        Raises:
            RequestError: with the reason.
        """
        self._rule(kind).estimator.check(closure)

    def _rule(self, kind: str) -> StepRule:
        if kind not in self.rules:
            raise RequestError(f"this method takes steps of kind {', '.join(self.rules)}, not {kind}; use lozo-adam.")
        return self.rules[kind]

    def set_calibration_passes(self, passes: Passes) -> None:
        """Says which rows a data-dependent basis looks at; without it, those of the step at hand.

        Args:
            passes: step -> anything: runs the model on some training rows, whose inputs to each layer are looked at.
                It is called when factors are first needed, and at every refresh with the step of the refresh.
        """
        self._calibrate_with(passes)
        self._calibrated = True

    def _calibrate_with(self, passes: Passes) -> None:
        def as_in_a_step(refresh_step: int) -> object:
            with evaluation_mode(self.model), float32_on_emulating_cpu(self.model):
                return passes(refresh_step)

        self.perturbation.set_calibration_passes(self.model, as_in_a_step)

    def set_factor_store(self, store: FactorStore) -> None:
        """Says where to keep what depends on data, so that steps can be replayed without the data."""
        self.perturbation.set_factor_store(store)
        for rule in self.rules.values():
            rule.estimator.set_factor_store(store)

    def share_directions(self, ranks: Ranks) -> None:
        """From now on each rank evaluates directions of its own, and all step along all of them.

        Raises:
            RequestError: the directions cannot be shared out evenly.
        """
        if self.num_directions % ranks.size:
            raise RequestError(
                f"method.num_directions is {self.num_directions}, which {ranks.size} ranks cannot share evenly; "
                "give a multiple, or set train.parallel=rows."
            )
        for rule in self.rules.values():
            rule.estimator.share_directions(ranks)

    def draw(self, kind: str | None = None, *, others: int = 0) -> StepDraw:
        """The directions of the next step; what is trained in the forward pass moves over to their fixed factors.

        Args:
            kind: of the step; None: the usual one.
            others: draws as many directions that no step draws, in place of the step's own.
        """
        if self.parameters.closed:
            raise RequestError("this optimizer was closed, or merged into the weights; make a new one to go on.")
        indices = range(self.num_directions, self.num_directions + others) if others else range(self.num_directions)
        keys = [DrawKey(self.seed, self.num_steps, index) for index in indices]
        drawn: dict[str, list[Direction]] = {}
        try:
            for name, moving in self.moving.items():  # old factors are folded and dropped before the next are drawn
                state = self._moments.get(name, {})
                drawn[name] = [self.perturbation.direction(moving.target, key, state) for key in keys]
                moving.begin(drawn[name][0], keys[0])
        except FloatingPointError as error:  # of the rows that a basis is computed from
            raise self._not_finite(error) from None
        return StepDraw(self.num_steps, self.progress.counts[kind or self.kinds[0]], drawn)

    @property
    def _moments(self) -> Moments:
        """Of two-point steps, on which directions may depend."""
        return self.progress.moments[self.kinds[0]]

    def _apply(self, rule: StepRule, estimate: Estimate, record: StepRecord, draw: StepDraw) -> None:
        for kind, other in self.rules.items():
            if kind != record.kind and not other.restarts:  # no step of its own carries them over now
                for name, state in self.progress.moments[kind].items():
                    other.update.carry_over(draw.directions[name][0], state)
        moments = self.progress.moments[record.kind]
        for name, gradient in estimate.gradients.items():
            moving = self.moving[name]
            if name not in moments:
                moments[name] = rule.update.init(gradient, moving)
            self._decay(rule, moving, record.lr)
            rule.update.step(moving, gradient, moments[name], record.lr)
        self.progress.add(record, self._restarting)

    def _decay(self, rule: StepRule, moving: MovingParameter, lr: float) -> None:
        weight_decay = float(self.param_groups[0]["weight_decay"])
        if weight_decay and moving.target.is_matrix:
            decay = moving.decay_weight_ if rule.update.writes_weight else moving.decay_
            decay(1 - lr * weight_decay)

    def _not_finite(self, error: FloatingPointError) -> NonFiniteLossError:
        loss = float(error.args[0]) if error.args else math.nan
        return NonFiniteLossError(self.num_steps, loss, self.last_step.loss if self.last_step is not None else None)

    @property
    def moving(self) -> dict[str, MovingParameter]:
        """Parameter name -> how it is moved."""
        return self.parameters.moving

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of step, the usual one first."""
        return tuple(self.rules)

    @property
    def needs_gradient(self) -> bool:
        """False: closures need not be differentiable."""
        return False

    @property
    def replays(self) -> bool:
        """True: a record says all that a step did."""
        return True

    @property
    def rho(self) -> float:
        """Perturbation scale."""
        return self._two_point.rho

    @property
    def num_steps(self) -> int:
        """Steps taken."""
        return self.progress.num_steps

    @property
    def num_forward_passes(self) -> int:
        """Evaluations of the closure so far."""
        return self.progress.num_forward_passes

    @property
    def last_step(self) -> StepRecord | None:
        """Record of the last step; None before the first."""
        return self.progress.last_step

    def step_divisor(self, kappa_sq: float) -> float:
        """What a step divides the estimate by, at its least; see `Update.divisor`."""
        return self.update.divisor(kappa_sq, self.num_directions)

    @property
    def cost_of_basis(self) -> tuple[int, float]:
        """(calls of the model, seconds) that a data-dependent basis has spent so far."""
        return self.perturbation.cost_of_basis

    @property
    def factor_bytes(self) -> int:
        """Bytes of what is kept for drawing directions."""
        return self.perturbation.factor_bytes

    @property
    def compression_error(self) -> float:
        """Of the parameter where it is largest: the share of what was trained that compression beside the base lost."""
        return self.parameters.compression_error

    def application(self, name: str) -> tuple[int | None, str]:
        """(rank of a parameter's directions or None, how perturbations reach it, in words)."""
        return self.perturbation.rank_of(name), self.moving[name].application

    def drawn_on_the_device(self) -> str | None:
        """A parameter whose steps depend on the type of its device, by noise or by rounding; None: there is none."""
        return self.parameters.drawn_on_the_device()

    def why_no_adapter(self) -> str | None:
        """None where the run is an exact LoRA adapter; else, in words, what stands in the way."""
        return self.parameters.why_no_adapter()

    def low_rank_changes(self) -> list[LowRankChange]:
        """What training added to each matrix that is moved in the forward pass."""
        return self.parameters.low_rank_changes()

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """Writes what was trained in the forward pass into the weights, removes the hooks, returns the model."""
        self.parameters.fold()
        return self.model

    def close(self) -> None:
        """Removes the hooks: parameters moved in the forward pass are the base's again."""
        self.parameters.close()

    def state_dict(self) -> dict[str, Any]:
        """param_groups as torch has them; everything else by parameter name, in its own dtype.

        The weights themselves are the model's, except where the method keeps its change beside them.
        """
        progress = self.progress
        return {
            "param_groups": super().state_dict()["param_groups"],
            "rule": self._description,
            "num_steps": progress.num_steps,
            "num_forward_passes": progress.num_forward_passes,
            "counts": dict(progress.counts),
            "seed": self.seed,
            "basis": self.perturbation.state(),
            "change": self.parameters.changes(),
            "moments": progress.tensors(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts a `state_dict` back; torch's own would cast float32 state to a bf16 parameter's dtype."""
        if state_dict.get("rule", self._description) != self._description:
            raise RequestError(f"state_dict: it is of {state_dict['rule']}, and this optimizer is {self._description}.")
        names = set(state_dict["change"])
        if names != set(self.moving):
            odd = sorted(names ^ set(self.moving))[0]
            raise RequestError(f"state_dict: it tunes other parameters than this optimizer, {odd} for one.")
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        progress, self.seed = self.progress, state_dict["seed"]
        progress.num_steps, progress.num_forward_passes = state_dict["num_steps"], state_dict["num_forward_passes"]
        progress.counts |= state_dict["counts"]
        self._load_moments(state_dict["moments"])
        self.perturbation.load_state(state_dict["basis"])
        self.parameters.load_changes(state_dict["change"], self._draw_for(self.num_steps))

    @property
    def _description(self) -> str:
        return f"{type(self.update).__name__} over {type(self.perturbation).__name__}"

    def tuned_state(self) -> dict[str, Tensor]:
        """Copies, on the CPU, of all that training changes; see `TunedParameters.tensors`."""
        return {key: value.detach().cpu().clone() for key, value in self.parameters.tensors().items()}

    def load_tuned_state(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        """Puts back a `tuned_state` taken after `num_steps` steps."""
        self.parameters.load_tensors(tuned, self._draw_for(num_steps))

    def resumable_state(self) -> dict[str, Tensor]:
        """All tensors that the next step depends on, by name; not copies. See `load_resumable_state`."""
        return self.parameters.tensors() | self.progress.tensors()

    def load_resumable_state(self, state: Mapping[str, Tensor], records: Sequence[StepRecord]) -> None:
        """Puts back a `resumable_state`; the next step is the one that followed it.

        Args:
            state: as it was saved.
            records: of all steps that had been taken, from the first on.
        """
        self.progress.load_records(records, self._restarting)
        self._load_moments(state)
        self.load_tuned_state(state, self.num_steps)

    def _load_moments(self, tensors: Mapping[str, Tensor]) -> None:
        self.progress.load_tensors(tensors, {name: moving.target.device for name, moving in self.moving.items()})
        for kind, rule in self.rules.items():
            rule.estimator.resume(list(self.progress.moments[kind]))

    def _draw_for(self, num_steps: int) -> Callable[[Target, int | None], Direction]:
        """Draws directions with the fixed factors of a step; by default of the last of `num_steps`."""

        def draw(target: Target, refresh_step: int | None) -> Direction:
            key = DrawKey(self.seed, max(0, num_steps - 1) if refresh_step is None else refresh_step)
            return self.perturbation.direction(target, key, self._moments.get(target.name, {}))

        return draw
