"""Range checks for the settings of an optimizer.

The zeroth-order optimizer: torch.optim's interface, `loss = optimizer.step(closure)`, with forward passes only.

Options of all zeroth-order methods.
"""

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypedDict, overload

import torch
from torch import Tensor, nn

from tezo.directions.bases.basis import FactorStore, Passes
from tezo.directions.perturbation import DrawKey, Perturbation
from tezo.directions.products import float32_on_emulating_cpu
from tezo.directions.spaces import Direction, FixedFactors
from tezo.directions.targets import ALL_LINEAR, Target, select_targets
from tezo.forward.perturbed_parameter import PerturbedParameter, evaluation_mode, let_interrupt, uninterrupted
from tezo.optim.estimators.estimate import (
    MOST_DIRECTIONS,
    Closure,
    Estimate,
    Estimator,
    Probe,
    RowsClosure,
    StepDraw,
    StepRecord,
    precise,
)
from tezo.optim.estimators.per_example import PerExample
from tezo.optim.estimators.two_point import TwoPoint
from tezo.optim.tuned_parameters import TunedParameters
from tezo.optim.tuner import LowRankChange, Moments, OptimizerState, Tuner
from tezo.optim.updates import Update
from tezo.system.errors import PerturbationWarning, RequestError
from tezo.system.ranks import Ranks

MOST_RATE, MOST_RANK = 1e30, 1 << 16
"""Upper limits. Rates: products with a rate remain finite in float32. Frozen rank: a larger one compresses nothing."""


def check_rate(name: str, value: float) -> None:
    """Checks that a rate is a number between 0 and `MOST_RATE`.

    Raises:
        RequestError: it is not; the message has the name of the setting.
    """
    if not 0 <= value <= MOST_RATE:
        raise RequestError(f"method.{name} is {value}; it must lie between 0 and {MOST_RATE:g}.")


def check_settings(lr: float, rho: float, decay: float, count: int, frozen: int | None, *, single: bool) -> None:
    """Checks the settings of `ZerothOrderOptimizer`.

    Args:
        lr: learning rate.
        rho: perturbation scale.
        decay: weight decay.
        count: directions per step.
        frozen: `frozen_rank`.
        single: whether the method is defined for one direction per step only.

    Raises:
        RequestError: a setting is out of range; the message has its name.
    """
    check_rate("lr", lr)
    check_rate("weight_decay", decay)
    if not 0 < rho <= MOST_RATE:
        raise RequestError(f"method.rho is {rho}; it must be positive, and at most {MOST_RATE:g}.")
    for name, number, most in (("num_directions", count, MOST_DIRECTIONS), ("frozen_rank", frozen, MOST_RANK)):
        if number is not None and not 1 <= number <= most:
            raise RequestError(f"method.{name} is {number}; it must lie between 1 and {most}.")
    if count > 1 and single:
        raise RequestError(f"method.num_directions is {count}; this method is defined for 1 only.")


SHARED: Final = "shared"
PER_EXAMPLE: Final = "per-example"
Directions = Literal["shared", "per-example"]
"""Whether the examples of a batch share the directions of a step, or each has its own."""


@dataclass(frozen=True)
class StepRule:
    """A kind of step.

    Attributes:
        estimator: estimates the gradient.
        update: steps along the estimate.
        lr_scale: factor of the optimizer's learning rate for these steps.
        restarts: whether the moments of `update` are dropped by a step of another kind.
    """

    estimator: Estimator
    update: Update
    lr_scale: float = 1.0
    restarts: bool = False


FAR_ABOVE, FAR_AT_LEAST = 0.5, 0.1
"""A loss is far above the model's own if it is higher by more than half of that, and by more than 0.1."""


def is_far_above(loss: float, own: float) -> bool:
    """Whether the loss at a perturbed point is far above the model's own; never of a reward, which is negated."""
    return own > 0 and loss - own > max(FAR_ABOVE * own, FAR_AT_LEAST)


class ZerothOrderOptimizer(Tuner, torch.optim.Optimizer):
    """An optimizer that combines a perturbation, an estimator and an update rule for the parameters of a model.

    `step(closure)` draws `num_directions` directions, evaluates the closure at W + rho Z and W - rho Z for each of
    them, and steps along the average of kappa Z. The closure runs forward passes only and returns a scalar, which need
    not be differentiable. During a step the model is in evaluation mode, so that both evaluations use the same
    function. Learning-rate schedulers of torch can be used. Between steps the model computes with the tuned parameters,
    by forward hooks where the stored weights are not written; `merge()` adds these changes to the weights.

    Args:
        model: model to be tuned, already on its device and in its dtype.
        perturbation: draws directions.
        update: steps along two-point estimates; must accept the perturbation's type of direction.
        lr: learning rate.
        rho: perturbation scale (the paper's perturbation rate).
        weight_decay: decoupled weight decay: each step multiplies the trained values by 1 - lr * weight_decay. These
            are the weights if the method writes them, else the change stored beside them (c, A or S). 1-D parameters
            are not decayed.
        num_directions: directions averaged in a step, with two evaluations each; of each example, if it has its own.
        targets: patterns that select the parameters, see `tezo.directions.targets.select_targets`.
        seed: seed of all draws.
        in_forward: False perturbs all parameters in place, as published code does (for comparison).
        directions: "shared": all examples of a batch meet the same directions, and the closure returns a scalar.
            "per-example": each has its own at the price of the shared ones, see `tezo.optim.estimators.per_example`;
            the closure returns the loss of each row, (rows,), whose mean is the objective. Low-rank directions only.
        estimator: how the projected gradients of shared directions are measured.
        frozen_rank: at a refresh of the factors, the change trained so far is stored beside the base, compressed to
            factors of at most this rank. None: the change is folded into the weights; if these cannot be written, it is
            stored beside them with rank 64.
        more_rules: further kinds of step, selected by `step(closure, kind=...)`.

    Raises:
        RequestError: a setting is out of range, or the targets cannot be tuned this way; raised by the first `step` if
            the closure reads a parameter past its modules, where forward hooks do not perturb it.
        NonFiniteLossError: raised by `step`; the parameters are unchanged.

    A `PerturbationWarning` says once that a perturbed point has a loss above the model's own by more than half of it
    and more than 0.1: there the two losses tell little of this model. The model's own is `own_loss`. Runs and Trainers
    set it. Elsewhere the first step takes one more pass for it if its closure is of `tezo.closure`; with another
    closure nothing is compared until `own_loss` is set.
    """

    replays = True

    @torch.inference_mode(False)  # state that is made in a user's inference mode could not be written outside of it
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
        directions: Directions = SHARED,
        estimator: type[TwoPoint] = TwoPoint,
        frozen_rank: int | None = None,
        more_rules: Sequence[StepRule] = (),
    ) -> None:
        single = perturbation.single_direction or estimator.single_direction
        check_settings(lr, rho, weight_decay, num_directions, frozen_rank, single=single)
        self.model = model
        self.perturbation = perturbation
        self.update = update
        self.num_directions = num_directions
        self.seed = seed
        self.targets = select_targets(model, targets)
        self.bind(self.targets)
        self._calibrated = self._stepping = self._has_warned = False
        self._tell: Callable[[str], object] = partial(warnings.warn, category=PerturbationWarning, stacklevel=5)
        perturbation.prepare(self.targets)
        self.parameters = TunedParameters(
            model, self.targets, perturbation, update, in_forward=in_forward, frozen_rank=frozen_rank
        )
        try:
            self._prepare(directions, estimator, rho, more_rules)
        except BaseException:
            self.parameters.close()
            raise
        super().__init__([t.parameter for t in self.targets], {"lr": lr, "weight_decay": weight_decay})

    def _prepare(
        self, directions: Directions, estimator: type[TwoPoint], rho: float, more_rules: Sequence[StepRule]
    ) -> None:
        self._two_point = self._simultaneous(directions, estimator, rho)
        self.rules = {rule.estimator.kind: rule for rule in (StepRule(self._two_point, self.update), *more_rules)}
        for rule in self.rules.values():
            rule.estimator.prepare(self.model, self.moving, self.seed)
        self._restarting = [kind for kind, rule in self.rules.items() if rule.restarts]
        self.progress = OptimizerState(counts=dict.fromkeys(self.rules, 0), moments={kind: {} for kind in self.rules})

    def _simultaneous(self, directions: Directions, estimator: type[TwoPoint], rho: float) -> TwoPoint:
        if directions == SHARED:
            return estimator(rho)
        if directions != PER_EXAMPLE:
            raise RequestError(f"method.directions is {directions!r}; it must be shared or per-example.")
        for name, moving in self.moving.items():
            low_rank = issubclass(self.perturbation.direction_type(moving.target), FixedFactors)
            dense = moving.target.is_matrix and not low_rank
            if dense or not moving.in_blocks or estimator is not TwoPoint:
                raise RequestError(
                    f"method.directions is per-example, which {name} cannot have at bounded memory with this method; "
                    "use tezo, lozo or a variant of them, or method.directions=shared."
                )
        return PerExample(rho, self.parameters.blocks)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by torch's constructor; later calls are refused, because `targets` determines the parameters."""
        if self.param_groups:
            raise RequestError(
                "add_param_group: the tuned parameters are determined by `targets`; create another optimizer."
            )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = ..., *, kind: str | None = ...) -> None: ...
    @overload
    def step(self, closure: Closure, *, kind: str | None = ...) -> float: ...
    @torch.no_grad()
    def step(self, closure: Closure | None = None, *, kind: str | None = None) -> float | None:
        """Takes one step and returns the mean of its losses.

        Args:
            closure: evaluates the objective on this step's batch. It is called twice for every direction, unless it is
                a `RowsClosure` and one forward pass for several evaluations is faster.
            kind: kind of the step, one of `kinds`; None: the first one, with random directions.
        """
        if closure is None:
            raise RequestError(
                "step() needs a closure that returns the loss: optimizer.step(lambda: loss_of(batch)). Trainer of "
                "transformers gives none: use tezo.TezoTrainer, or tezo.TezoSFTTrainer for TRL."
            )
        return self.take_step(closure, self.kinds[0] if kind is None else kind)

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_step(self, closure: Closure, kind: str) -> float:
        """Takes one step of this kind and returns the mean of its losses."""
        rule = self._rule(kind)
        lr = self._rate(rule)
        check_rate("lr", lr)
        if not self._calibrated:
            self._calibrate_with(lambda _: closure())
        with uninterrupted(), self._in_step():
            draw = self.draw(kind)
            try:
                with self.parameters.refusing_direct_reads():
                    estimate = rule.estimator.estimate(closure, draw)
            except FloatingPointError as error:
                raise self.not_finite(*error.args) from None
            self._compare_with_own(closure, estimate.probes)
            let_interrupt(last=True)
            record = StepRecord(self.num_steps, estimate.loss, lr, estimate.probes, kind, estimate.forward_passes)
            self._apply(rule, estimate, record, draw)
        return estimate.loss

    def _compare_with_own(self, closure: Closure, probes: Sequence[Probe]) -> None:
        """Warns, once, where the losses of a step are far above `own_loss`, and above the model's own on its rows."""
        if self._has_warned or not probes or (self.own_loss is None and not isinstance(closure, RowsClosure)):
            return
        highest = max(statistics.fmean(getattr(p, sign) for p in probes) for sign in ("loss_plus", "loss_minus"))
        if self.own_loss is not None and not is_far_above(highest, self.own_loss):
            return
        with evaluation_mode(self.model), float32_on_emulating_cpu(self.model):
            own = float(torch.as_tensor(precise(closure())).mean())
        self.own_loss = own if self.own_loss is None else max(own, self.own_loss)
        if is_far_above(highest, own):
            self._has_warned = True
            self._tell(
                f"step {self.num_steps}: with method.rho {self.rho:g} the loss at a perturbed point is {highest:.4g}, "
                f"and the model's own on these rows is {own:.4g}; such a step says little of this model. Set a smaller "
                "method.rho; runs measure one where it is auto."
            )

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """While open, another step is refused: it would move the parameters that this one measures."""
        if self._stepping:
            raise RequestError("step() was called by the closure of a step; call it after that step has returned.")
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    @torch.inference_mode(False)
    @torch.no_grad()
    def measure(self, closure: Closure, rho: float | None = None) -> tuple[Probe, ...]:
        with uninterrupted():
            draw = self.draw()
            try:
                return self._two_point.probes(closure, draw.directions, self.rho if rho is None else rho)
            except FloatingPointError as error:
                raise self.not_finite(*error.args) from None

    @torch.inference_mode(False)
    @torch.no_grad()
    def replay(self, record: StepRecord) -> None:
        rule = self._rule(record.kind)
        if record.step != self.num_steps or not rule.estimator.accepts(len(record.probes), self.num_directions):
            raise RequestError(
                f"record is of step {record.step} with {len(record.probes)} directions; the next step is "
                f"{self.num_steps}, and num_directions is {self.num_directions}."
            )
        with uninterrupted():
            draw = self.draw(record.kind)
            estimate = rule.estimator.recall(record, draw)
            let_interrupt(last=True)
            self._apply(rule, estimate, record, draw)

    def passes_of(self, kind: str, *, first: bool) -> int:
        """Number of closure evaluations of a step; `first`: no step of its kind comes before it."""
        return self._rule(kind).estimator.passes(self.num_directions, first=first)

    def check_kind(self, kind: str, closure: Closure) -> None:
        self._rule(kind).estimator.check(closure)

    def _rule(self, kind: str) -> StepRule:
        if kind not in self.rules:
            raise RequestError(f"this method takes steps of kind {', '.join(self.rules)}, not {kind}; use lozo-adam.")
        return self.rules[kind]

    def set_calibration_passes(self, passes: Passes) -> None:
        self._calibrate_with(passes)
        self._calibrated = True

    def _calibrate_with(self, passes: Passes) -> None:
        def as_in_a_step(refresh_step: int) -> object:
            with evaluation_mode(self.model), float32_on_emulating_cpu(self.model):
                return passes(refresh_step)

        self.perturbation.set_calibration_passes(self.model, as_in_a_step)

    def set_factor_store(self, store: FactorStore) -> None:
        self.perturbation.set_factor_store(store)
        for rule in self.rules.values():
            rule.estimator.set_factor_store(store)

    def share_directions(self, ranks: Ranks) -> None:
        if self.num_directions % ranks.size:
            raise RequestError(
                f"method.num_directions is {self.num_directions}, which {ranks.size} ranks cannot share evenly; "
                "give a multiple, or set train.parallel=rows."
            )
        for rule in self.rules.values():
            rule.estimator.share_directions(ranks)

    def draw(self, kind: str | None = None) -> StepDraw:
        """The directions of the next step. At a refresh, the change trained with the old factors is folded first.

        Args:
            kind: kind of the step; None: the first of `kinds`.
        """
        if self.parameters.closed:
            raise RequestError("this optimizer was closed, or merged into the weights; make a new one to go on.")
        self.check_bound()
        drawn: dict[str, tuple[Direction, ...]] = {}
        try:
            for name, moving in self.moving.items():  # one at a time: old factors are dropped before the next draw
                keys = [DrawKey(self.seed, self.num_steps, index) for index in range(self.num_directions)]
                own = self._moments.get(name, {})
                drawn[name] = tuple(self.perturbation.direction(moving.target, key, own) for key in keys)
                moving.begin(drawn[name][0], keys[0])
        except FloatingPointError as error:  # raised for the rows that a basis is computed from
            raise self.not_finite(*error.args) from None
        kind = kind or self.kinds[0]
        return StepDraw(self.num_steps, self.progress.counts[kind], self._rate(self.rules[kind]), drawn)

    def _rate(self, rule: StepRule) -> float:
        """Learning rate of the next step by this rule."""
        return float(self.param_groups[0]["lr"]) * rule.lr_scale

    @property
    def _moments(self) -> Moments:
        """The moments of two-point steps; directions may depend on them."""
        return self.progress.moments[self.kinds[0]]

    def _apply(self, rule: StepRule, estimate: Estimate, record: StepRecord, draw: StepDraw) -> None:
        for kind, other in self.rules.items():
            if kind != record.kind and not other.restarts:  # the update below carries over only its own moments
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

    def _decay(self, rule: StepRule, moving: PerturbedParameter, lr: float) -> None:
        weight_decay = float(self.param_groups[0]["weight_decay"])
        if weight_decay and moving.target.is_matrix:
            decay = moving.decay_weight_ if rule.update.writes_weight else moving.decay_
            decay(1 - lr * weight_decay)

    @property
    def moving(self) -> dict[str, PerturbedParameter]:
        """Parameter name -> the object that perturbs and updates the parameter."""
        return self.parameters.moving

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.rules)

    @property
    def rho(self) -> float:
        return self._two_point.rho

    def warn_by(self, tell: Callable[[str], object]) -> None:
        self._tell = tell

    @property
    def per_example(self) -> bool:
        return isinstance(self._two_point, PerExample)

    def set_rho(self, rho: float) -> None:
        self._two_point.rho = rho

    def step_divisor(self, kappa_sq: float) -> float:
        return self.update.divisor(kappa_sq, self.num_directions)

    @property
    def cost_of_basis(self) -> tuple[int, float]:
        return self.perturbation.cost_of_basis

    @property
    def factor_bytes(self) -> int:
        return self.perturbation.factor_bytes

    @property
    def compression_error(self) -> float:
        return self.parameters.compression_error

    def rank_and_way(self, name: str) -> tuple[int | None, str]:
        return self.perturbation.rank_of(name), self.moving[name].way

    def drawn_on_the_device(self) -> str | None:
        return self.parameters.drawn_on_the_device()

    def why_no_adapter(self) -> str | None:
        return self.parameters.why_no_adapter()

    def low_rank_changes(self) -> list[LowRankChange]:
        return self.parameters.low_rank_changes()

    @torch.inference_mode(False)
    @torch.no_grad()
    def merge(self) -> nn.Module:
        self.parameters.fold()
        model: nn.Module = self.model
        return model

    def close(self) -> None:
        self.parameters.close()

    def state_dict(self) -> dict[str, Any]:
        """`param_groups` as in torch; the other tensors by parameter name, in their own dtype.

        Changes stored beside the weights are included, and so are the weights below them: the model's state dict has
        the two added. Other weights are in the model's state dict alone.
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
            "weights": self.parameters.weights_below(),
            "moments": progress.tensors(),
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a `state_dict`; torch's own method would cast float32 state to the dtype of a bfloat16 parameter."""
        if "change" not in state_dict:
            raise RequestError("state_dict: it is not of an optimizer of this library; give what its state_dict() was.")
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
        self.parameters.load_weights(state_dict.get("weights", {}))
        self.parameters.load_changes(state_dict["change"], self._draw_for(self.num_steps))

    @property
    def _description(self) -> str:
        return f"{type(self.update).__name__} over {type(self.perturbation).__name__}"

    def tuned_state(self) -> dict[str, Tensor]:
        return {key: value.detach().cpu().clone() for key, value in self.parameters.tensors().items()}

    def load_tuned_state(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        self.parameters.load_tensors(tuned, self._draw_for(num_steps))

    def roll_back(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        self.load_tuned_state(tuned, num_steps)
        self.progress.drop_moments()
        self._load_moments({})

    def resumable_state(self) -> dict[str, Tensor]:
        return self.parameters.tensors() | self.progress.tensors()

    def load_resumable_state(
        self, state: Mapping[str, Tensor], records: Sequence[StepRecord], moments_since: int = 0
    ) -> None:
        self.progress.load_records(records, self._restarting, moments_since)
        self._load_moments(state)
        self.load_tuned_state(state, self.num_steps)

    def _load_moments(self, tensors: Mapping[str, Tensor]) -> None:
        self.progress.load_tensors(tensors, {name: moving.target.device for name, moving in self.moving.items()})
        for kind, rule in self.rules.items():
            rule.estimator.resume(list(self.progress.moments[kind]))

    def _draw_for(self, num_steps: int) -> Callable[[Target, int | None], Direction]:
        """A function that draws a direction with the fixed factors of a given step; None: the last of `num_steps`."""

        def draw(target: Target, refresh_step: int | None) -> Direction:
            key = DrawKey(self.seed, max(0, num_steps - 1) if refresh_step is None else refresh_step)
            return self.perturbation.direction(target, key, self._moments.get(target.name, {}))

        return draw


class Common(TypedDict, total=False):
    """Options of every zeroth-order method; see `ZerothOrderOptimizer`."""

    rho: float
    weight_decay: float
    num_directions: int
    targets: Sequence[str]
    seed: int
    in_forward: bool
    directions: Directions
    frozen_rank: int | None
