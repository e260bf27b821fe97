"""The zeroth-order optimizer: torch.optim's interface, `loss = optimizer.step(closure)`, with forward passes only."""

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypedDict, overload

import torch
from torch import Tensor, nn

from tezo.directions.bases.basis import FactorStore, Passes, RowsOf
from tezo.directions.perturbation import DrawKey, Perturbation
from tezo.directions.products import float32_on_emulating_cpu
from tezo.directions.spaces import Direction, FixedFactors, SignedDense
from tezo.directions.targets import ALL_LINEAR, Target, select_targets
from tezo.forward.perturbed_parameter import evaluation_mode, let_interrupt, uninterrupted
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.closures import Closure, Losses, RowOutputs
from tezo.optim.estimators.estimate import (
    MOST_DIRECTIONS,
    TWO_POINT,
    Estimate,
    Estimator,
    Probe,
    StepDraw,
    StepRecord,
    precise,
)
from tezo.optim.estimators.per_example import PerExample
from tezo.optim.estimators.two_point import TwoPoint
from tezo.optim.tuned_parameters import TunedParameters
from tezo.optim.updates import State, Update
from tezo.system.errors import PerturbationWarning, RequestError
from tezo.system.processes import ProcessGroup
from tezo.system.values import takes

MOST_RATE, MOST_RANK = 1e30, 1 << 16
"""Upper limits. Rates: products with a rate remain finite in float32. Frozen rank: a larger one compresses nothing."""
FAR_ABOVE, FAR_AT_LEAST = 0.5, 0.1
"""A loss is far above the model's own if it is higher by more than half of that, and by more than 0.1."""

IN_STATE = frozenset({"lr", "weight_decay", "rho", "seed", "targets"})
"""Options that a state dict has by themselves, to be restored, or as the names of the parameters that they select."""

SHARED: Final = "shared"
PER_EXAMPLE: Final = "per-example"
Directions = Literal["shared", "per-example"]
"""Whether the examples of a batch share the directions of a step, or each has its own."""


def check_rate(name: str, value: float) -> None:
    """Checks that a rate is a number between 0 and `MOST_RATE`.

    Raises:
        RequestError: it is not; the message has the name of the setting.
    """
    if not 0 <= value <= MOST_RATE:
        raise RequestError(f"method.{name} is {value}; it must lie between 0 and {MOST_RATE:g}.")


def check_rho(value: float) -> None:
    """Checks that a perturbation scale is positive, and at most `MOST_RATE`.

    Raises:
        RequestError: it is not.
    """
    if not 0 < value <= MOST_RATE:
        raise RequestError(f"method.rho is {value}; it must be positive, and at most {MOST_RATE:g}.")


@dataclass(frozen=True)
class StepRule:
    """How a step is taken.

    Attributes:
        estimator: estimates the gradient.
        update: steps along the estimate.
        lr_scale: factor of the optimizer's learning rate for these steps.
        restarts: whether the moments of `update` are dropped by a step of another rule.
    """

    estimator: Estimator
    update: Update
    lr_scale: float = 1.0
    restarts: bool = False


class ZerothOrderOptimizer(BaseOptimizer, torch.optim.Optimizer):
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
            the closure returns the loss of each row, (rows,), whose mean is the objective. Low-rank directions only,
            or noise with signs of each example.
        estimator: how the projected gradients of shared directions are measured.
        frozen_rank: at a refresh of the factors, the change trained so far is stored beside the base, compressed to
            factors of at most this rank. None: the change is folded into the weights; if these cannot be written, it is
            stored beside them with rank 64.
        more_rules: further rules, selected by `step(closure, rule=...)`.

    Raises:
        RequestError: a setting is out of range, or the targets cannot be tuned this way; raised by the first `step` if
            the closure reads a parameter past its modules, where forward hooks do not perturb it.
        NonFiniteLossError: raised by `step`; the parameters are unchanged.

    A `PerturbationWarning` says once that a perturbed point has a loss above the model's own by more than half of it
    and more than 0.1: there the two losses tell little of this model. The model's own is `own_loss`. Runs and Trainers
    set it. Elsewhere the first step takes one more pass for it if its closure is of `tezo.closure`; with another
    closure nothing is compared until `own_loss` is set.

    Attributes:
        per_example: whether each example of a batch has directions of its own.
        moving: parameter name -> the object that perturbs and updates the parameter.
        moments: rule -> parameter name -> the state of the rule's update.
        counts: rule -> number of estimates in its moments.
        own_loss: loss of the model as it is, which a step's losses are compared with; infinite: they are not; None: not
            known.
        warn: what is told of such a step; else a warning is given.
    """

    own_loss: float | None = None

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
        check_rate("lr", lr)
        check_rate("weight_decay", weight_decay)
        check_rho(rho)
        for name, number, most in (
            ("num_directions", num_directions, MOST_DIRECTIONS),
            ("frozen_rank", frozen_rank, MOST_RANK),
        ):
            if number is not None and not 1 <= number <= most:
                raise RequestError(f"method.{name} is {number}; it must lie between 1 and {most}.")
        if frozen_rank is not None and perturbation.interval is None:
            raise RequestError(
                f"method.frozen_rank is {frozen_rank}, and factors are never refreshed here; leave it out, or set "
                "method.lazy_update_interval where the method has it."
            )
        if frozen_rank is not None and not in_forward:
            raise RequestError(
                f"method.frozen_rank is {frozen_rank}, and in place nothing is kept beside the weights; leave it or "
                "method.in_forward=false out."
            )
        if num_directions > 1 and (perturbation.single_direction or estimator.single_direction):
            raise RequestError(f"method.num_directions is {num_directions}; this method is defined for 1 only.")
        self.model = model
        self.perturbation = perturbation
        self.update = update
        self.num_directions = num_directions
        self.per_example = directions != SHARED
        self.seed = seed
        self.targets = select_targets(model, targets)
        self.bind(self.targets)
        self._calibrated = self._has_rows = self._stepping = self._has_warned = False
        self._factor = 1.0
        self.warn: Callable[[str], object] = partial(warnings.warn, category=PerturbationWarning, stacklevel=6)
        perturbation.prepare(self.targets)
        self.parameters = TunedParameters(
            model, self.targets, perturbation, update, in_forward=in_forward, frozen_rank=frozen_rank
        )
        self.moving = self.parameters.moving
        try:
            if self.per_example:
                self._check_per_example(directions, estimator)
                of_examples = estimator if issubclass(estimator, PerExample) else PerExample
                self._two_point: TwoPoint = of_examples(rho, self.parameters.blocks)
            else:
                self._two_point = estimator(rho)
            self._rules = {rule.estimator.rule: rule for rule in (StepRule(self._two_point, update), *more_rules)}
            for rule in self._rules.values():
                rule.estimator.prepare(model, self.moving, seed)
        except BaseException:
            self.parameters.close()
            raise
        self.rules = tuple(self._rules)
        self.drop_moments()
        super().__init__([t.parameter for t in self.targets], {"lr": lr, "weight_decay": weight_decay})

    def _check_per_example(self, directions: str, estimator: type[TwoPoint]) -> None:
        if directions != PER_EXAMPLE:
            raise RequestError(f"method.directions is {directions!r}; it must be shared or per-example.")
        for name, moving in self.moving.items():
            of_examples = issubclass(self.perturbation.direction_type(moving.target), FixedFactors | SignedDense)
            dense = moving.target.is_matrix and not of_examples
            if dense or not moving.in_blocks or not (estimator is TwoPoint or issubclass(estimator, PerExample)):
                raise RequestError(
                    f"method.directions is per-example, which {name} cannot have at bounded memory with this method; "
                    "use tezo, lozo or a variant of them, or method.directions=shared."
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by torch's constructor; later calls are refused, because `targets` determines the parameters."""
        if self.param_groups:
            raise RequestError(
                "add_param_group: the tuned parameters are determined by `targets`; create another optimizer."
            )
        super().add_param_group(param_group)

    @overload  # type: ignore[override]
    def step(self, closure: None = ..., *, rule: str | None = ...) -> None: ...
    @overload
    def step(self, closure: Closure, *, rule: str | None = ...) -> float: ...
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, closure: Closure | None = None, *, rule: str | None = None) -> float | None:
        """Takes one step and returns its loss; see `StepRecord`.

        Args:
            closure: evaluates the objective on this step's batch. It is called twice for every direction, unless it is
                one of `Losses` and one forward pass for several evaluations is faster.
            rule: one of `rules`; None: that of `plan`, or the first one, with random directions.
        """
        if closure is None:
            raise RequestError(
                "step() needs a closure that returns the loss: optimizer.step(lambda: loss_of(batch)). Trainer of "
                "transformers gives none: use tezo.TezoTrainer, or tezo.TezoSFTTrainer for TRL."
            )
        if not callable(closure):
            raise RequestError(
                f"step() needs a function that returns the loss, and was given {type(closure).__name__}; write lambda: "
                "before it."
            )
        name, self._factor = self.planned(self.num_steps) if rule is None else (rule, 1.0)
        estimator = self._rule(name).estimator
        check_rate("lr", self._rate(name))
        if self._stepping:  # it would move the parameters that the outer step measures
            raise RequestError("step() was called by the closure of a step; call it after that step has returned.")
        self._closure = closure
        if not self._calibrated:
            self.set_calibration_passes(lambda _: self._closure())
        if not self._has_rows and isinstance(closure, RowOutputs):
            self.perturbation.set_rows(self.model, lambda *_: closure)
        self._stepping = True
        try:
            with uninterrupted():
                draw = self.draw(name)
                first = not self.parameters.reads_checked
                with self.parameters.refusing_direct_reads() if first else nullcontext():
                    estimate = estimator.estimate(closure, draw)
                self._compare_with_own(closure, estimate.probes)
                let_interrupt(last=True)
                passes = estimate.forward_passes
                record = StepRecord(self.num_steps, estimate.loss, draw.lr, estimate.probes, name, passes)
                self._apply(estimate, record, draw)
        except FloatingPointError as error:
            raise self.not_finite(*error.args) from None
        finally:
            self._stepping = False
        return estimate.loss

    def _compare_with_own(self, closure: Closure, probes: Sequence[Probe]) -> None:
        """Warns, once, where the losses of a step are far above `own_loss`, and above the model's own on its rows."""

        def is_far_above(own: float) -> bool:  # never of a reward, which is negated
            return own > 0 and highest - own > max(FAR_ABOVE * own, FAR_AT_LEAST)

        if self._has_warned or not probes or (self.own_loss is None and not isinstance(closure, Losses)):
            return
        highest = max(statistics.fmean(getattr(p, sign) for p in probes) for sign in ("loss_plus", "loss_minus"))
        if self.own_loss is not None and not is_far_above(self.own_loss):
            return
        with evaluation_mode(self.model), float32_on_emulating_cpu(self.model):
            own = float(torch.as_tensor(precise(closure())).double().mean())
        self.own_loss = own if self.own_loss is None else max(own, self.own_loss)
        if is_far_above(own):
            self._has_warned = True
            self.warn(
                f"step {self.num_steps}: with method.rho {self.rho:g} the loss at a perturbed point is {highest:.4g}, "
                f"and the model's own on these rows is {own:.4g}; such a step says little of this model. Set a smaller "
                "method.rho, beside method.name; most methods measure one where it is auto."
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def measure(self, closure: Closure, rho: float | None = None) -> tuple[Probe, ...]:
        """Measures along the directions of the next step; no step is taken.

        Returns one probe for each direction, or each example and each of its directions: that of example i along the
        j-th of q is at place i q + j.

        Args:
            closure: as in `step`.
            rho: perturbation scale; None: that of the steps.
        """
        try:
            with uninterrupted():
                return self._two_point.probes(closure, self.draw().directions, self.rho if rho is None else rho)
        except FloatingPointError as error:
            raise self.not_finite(*error.args) from None

    @torch.inference_mode(False)
    @torch.no_grad()
    def ahead(self, closure: Closure, rho: float) -> list[float]:
        """Measures the loss at W + rho Z alone, along the directions of the next step, in the order of `measure`."""
        with uninterrupted():
            return self._two_point.ahead(closure, self.draw().directions, rho)

    @torch.inference_mode(False)
    @torch.no_grad()
    def replay(self, record: StepRecord) -> None:
        """Repeats a finished step from its record, without evaluating a closure.

        Args:
            record: record of step `num_steps` of a run with the same seed and settings.

        Raises:
            RequestError: this is not the record of the next step.
        """
        estimator = self._rule(record.rule).estimator
        if record.step != self.num_steps or not estimator.accepts(len(record.probes), self.num_directions):
            raise RequestError(
                f"record is of step {record.step} with {len(record.probes)} directions; the next step is "
                f"{self.num_steps}, and num_directions is {self.num_directions}."
            )
        with uninterrupted():
            draw = self.draw(record.rule)
            estimate = estimator.recall(record, draw)
            let_interrupt(last=True)
            self._apply(estimate, record, draw)

    def passes_of(self, rule: str, *, first: bool) -> int:
        return self._rule(rule).estimator.passes(self.num_directions, first=first)

    @property
    def told(self) -> dict[str, Any]:
        """What the last step, and the last computation of its basis, found beside losses: JSON."""
        return {**self._two_point.told, **self.perturbation.basis.told}

    @property
    def idle_steps(self) -> int | None:
        """Steps in a row without a change, or that hardly lower the dev loss, that end a run; None: none do."""
        return self._two_point.idle_steps

    def check_rule(self, rule: str, closure: Closure) -> None:
        self._rule(rule).estimator.check(closure)

    def _rule(self, name: str) -> StepRule:
        if name not in self._rules:
            raise RequestError(
                f"this method takes steps of kind {', '.join(self.rules)}, not {name}; use head-feedback."
            )
        return self._rules[name]

    def _rate(self, rule: str) -> float:
        return float(self.param_groups[0]["lr"]) * self._factor * self._rules[rule].lr_scale

    def set_calibration_passes(self, passes: Passes) -> None:
        """Sets the forward passes that a data-dependent basis is computed from.

        Args:
            passes: function of the refresh step that runs the model on some training rows; the basis is computed from
                the inputs of each layer. It is called when factors are first needed, and at every refresh.
        """
        if not takes(passes, 0):
            raise RequestError("set_calibration_passes: give a function of a step that runs the model on some rows.")
        self.perturbation.set_calibration_passes(self.model, passes)
        self._calibrated = True

    def set_rows(self, rows: RowsOf) -> None:
        """Sets the rows whose outputs a basis is computed from; without them they are those of each step.

        Args:
            rows: function of the refresh step and of the most rows that are wanted; it returns the `RowOutputs` of
                training rows, such as a closure of `tezo.closure`. Where its first ones are rows of the step, its
                `stepped` says how many.
        """
        if not takes(rows, 0, 1):
            raise RequestError("set_rows: give a function of a step and of a number of rows that returns a closure.")
        self.perturbation.set_rows(self.model, rows)
        self._has_rows = True

    def set_factor_store(self, store: FactorStore) -> None:
        """Sets the store for tensors computed from data, so that steps can be replayed without the data."""
        self.perturbation.set_factor_store(store)
        for rule in self._rules.values():
            rule.estimator.set_factor_store(store)

    def share_directions(self, processes: ProcessGroup) -> None:
        """Distributes the directions of the following steps among the ranks; every rank steps along all of them."""
        if self.num_directions % processes.size:
            raise RequestError(
                f"method.num_directions is {self.num_directions}, which {processes.size} ranks cannot share evenly; "
                "give a multiple, or set train.parallel=rows."
            )
        for rule in self._rules.values():
            rule.estimator.share_directions(processes)

    def draw(self, rule: str | None = None) -> StepDraw:
        """Draws the directions of the next step. At a refresh, the change trained with the old factors is folded first.

        Args:
            rule: rule of the step; None: the first of `rules`.

        Raises:
            FloatingPointError: the rows that a basis is computed from have no finite inputs.
        """
        self._check_open()
        self.check_bound()
        drawn: dict[str, tuple[Direction, ...]] = {}
        with ExitStack() as as_in_a_step:
            if self.perturbation.basis.data_dependent:  # factors may be computed by forward passes
                as_in_a_step.enter_context(torch.no_grad())
                as_in_a_step.enter_context(evaluation_mode(self.model))
                as_in_a_step.enter_context(float32_on_emulating_cpu(self.model))
            count = self.perturbation.num_directions(self.num_steps, self.num_directions)
            keys = [DrawKey(self.seed, self.num_steps, index) for index in range(count)]
            for name, moving in self.moving.items():  # one at a time: old factors are dropped before the next draw
                moments = self.moments[self.rules[0]].get(name, {})
                drawn[name] = tuple(self.perturbation.direction(moving.target, key, moments) for key in keys)
                moving.begin(drawn[name][0], keys[0])
        rule = rule or self.rules[0]
        foretold = self.perturbation.foretold(self.num_steps)
        return StepDraw(self.num_steps, self.counts[rule], self._rate(rule), drawn, foretold, self.num_idle_steps)

    def _apply(self, estimate: Estimate, record: StepRecord, draw: StepDraw) -> None:
        """Updates parameters and moments, and counts the step."""
        rule, moments = self._rules[record.rule], self.moments[record.rule]
        for name, other in self._rules.items():
            if name == record.rule:
                continue  # the update below carries over its own moments
            if other.restarts:
                self.counts[name], self.moments[name] = 0, {}
            for parameter, state in self.moments[name].items():
                other.update.carry_over(draw.directions[parameter][0], state)
        weight_decay = float(self.param_groups[0]["weight_decay"])
        for name, gradient in estimate.gradients.items():
            moving = self.moving[name]
            if name not in moments:
                moments[name] = rule.update.init(gradient, moving)
            if weight_decay and moving.target.is_matrix:
                decay = moving.decay_weight_ if rule.update.writes_weight else moving.decay_
                decay(1 - record.lr * weight_decay)
            rule.update.step(moving, gradient, moments[name], record.lr)
        self.counts[record.rule] += 1
        self.count(record)

    @property
    def rho(self) -> float:
        """Perturbation scale; 0 where nothing is perturbed."""
        return self._two_point.rho

    def set_rho(self, rho: float) -> None:
        """Sets the perturbation scale of the steps that follow; a `RequestError` says that it is no such scale."""
        check_rho(rho)
        self._two_point.rho = rho

    @property
    def cost_of_basis(self) -> tuple[int, float]:
        """(calls of the model, seconds) spent on a data-dependent basis so far."""
        return self.perturbation.cost_of_basis

    @property
    def factor_bytes(self) -> int:
        """Bytes of the stored fixed factors."""
        return self.perturbation.factor_bytes

    @property
    def compression_error(self) -> float:
        """Largest `PerturbedParameter.compression_error` of all parameters; 0.0 if nothing was compressed."""
        return max((moving.compression_error for moving in self.moving.values()), default=0.0)

    def rank_and_way(self, name: str) -> tuple[int | None, str]:
        return self.perturbation.rank_of(name), self.moving[name].way

    def largest_rank(self, steps: int) -> int:
        """Returns the largest rank of a change of a weight in a run of so many steps, with its perturbation."""
        interval = self.perturbation.interval
        refreshes = 0 if interval is None else (steps - 1) // interval
        ranks = {name: self.perturbation.rank_of(name) or 0 for name in self.moving}
        return max(rank + min(self.moving[name].most_kept, refreshes * rank) for name, rank in ranks.items())

    def drawn_on_the_device(self) -> str | None:
        return self.parameters.drawn_on_the_device()

    def why_no_adapter(self) -> str | None:
        return self.parameters.why_no_adapter()

    @torch.inference_mode(False)
    @torch.no_grad()
    def merge(self) -> nn.Module:
        self.parameters.fold()
        return super().merge()

    def close(self) -> None:
        self.parameters.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns `param_groups` as in torch, and the other tensors by the names of `resumable_state`.

        Changes stored beside the weights are included, and so are the weights below them: the model's state dict has
        the two added. Other weights are in the model's state dict alone. Tensors are not copied, as in torch: the next
        step changes them; `copy.deepcopy` of the result keeps a state to go back to.
        """
        tensors = {key: value for key, value in self.resumable_state().items() if not key.startswith("weight/")}
        return {
            "param_groups": super().state_dict()["param_groups"],
            "rule": self._description,
            "num_steps": self.num_steps,
            "num_forward_passes": self.num_forward_passes,
            "num_idle_steps": self.num_idle_steps,
            "counts": dict(self.counts),
            "seed": self.seed,
            "rho": self.rho,
            "options": {  # but for objects, such as a basis, which torch.load(weights_only=True) would refuse
                name: own.value
                for name, own in self.settings.items()
                if name not in IN_STATE and isinstance(own.value, str | float | int | list | tuple | None)
            },
            "parameters": list(self.moving),
            "tensors": tensors | self.parameters.weights_below(),
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a `state_dict`, with its learning rate, weight decay, perturbation scale and seed.

        Raises:
            RequestError: it is of another method, of other parameters, or of other options.
        """
        self._check_open()
        # torch's own method would cast float32 state to the dtype of a bfloat16 parameter
        if "tensors" not in state_dict:
            raise RequestError("state_dict: it is not of an optimizer of this library; give what its state_dict() was.")
        if state_dict["rule"] != self._description:
            raise RequestError(f"state_dict: it is of {state_dict['rule']}, and this optimizer is {self._description}.")
        odd = sorted(set(state_dict["parameters"]) ^ set(self.moving))
        if odd:
            raise RequestError(f"state_dict: it tunes other parameters than this optimizer, {odd[0]} for one.")
        own = {name: setting.value for name, setting in self.settings.items()}
        for name, value in state_dict["options"].items():
            if name in own and own[name] != value:
                raise RequestError(
                    f"state_dict: method.{name} is {value!r} in it, and {own[name]!r} in this optimizer; make the "
                    f"optimizer with {name}={value!r}."
                )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.seed, self.num_steps = state_dict["seed"], state_dict["num_steps"]
        if self.rho:
            self.set_rho(state_dict["rho"])
        restored = {**self.param_groups[0], "rho": self.rho, "seed": self.seed}
        self.settings = self.settings.with_values(restored)
        self.num_forward_passes = state_dict["num_forward_passes"]
        self.num_idle_steps = state_dict["num_idle_steps"]
        self.counts |= state_dict["counts"]
        self._load_moments(state_dict["tensors"])
        self.load_tuned_state(state_dict["tensors"], self.num_steps)

    @property
    def _description(self) -> str:
        return f"{type(self.update).__name__} over {type(self.perturbation).__name__}"

    def tuned_tensors(self) -> dict[str, Tensor]:
        """Returns all tensors that training changes; not copies.

        Names are "change/NAME/KEY" (coefficients), "weight/NAME" (if the method writes the weight) and
        "basis/STEP/NAME" (factors computed from data).
        """
        return self.parameters.tensors()

    def _check_open(self) -> None:
        if self.parameters.closed:
            raise RequestError("this optimizer was closed, or merged into the weights; make a new one to go on.")

    def load_tuned_state(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        self._check_open()
        moments = self.moments[self.rules[0]]

        def draw(target: Target, refresh_step: int | None) -> Direction:
            key = DrawKey(self.seed, max(0, num_steps - 1) if refresh_step is None else refresh_step)
            return self.perturbation.direction(target, key, moments.get(target.name, {}))

        self.parameters.load_tensors(tuned, draw)

    def drop_moments(self) -> None:
        """Drops the moments of all rules."""
        self.counts = dict.fromkeys(self.rules, 0)
        self.moments: dict[str, dict[str, State]] = {rule: {} for rule in self.rules}

    def roll_back(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        self.load_tuned_state(tuned, num_steps)
        self.drop_moments()
        self._load_moments({})

    def resumable_state(self) -> dict[str, Tensor]:
        """Returns `tuned_tensors` and the moments: "update/NAME/KEY" of two-point steps, "RULE/NAME/KEY" of others."""
        return self.tuned_tensors() | {
            f"{_prefix(rule)}{name}/{key}": value
            for rule, moments in self.moments.items()
            for name, state in moments.items()
            for key, value in state.items()
        }

    def load_resumable_state(
        self, state: Mapping[str, Tensor], records: Sequence[StepRecord], moments_since: int = 0
    ) -> None:
        self.count_again(records)
        self.drop_moments()
        for record in records[moments_since:]:
            for name, rule in self._rules.items():
                if rule.restarts and name != record.rule:
                    self.counts[name] = 0
            self.counts[record.rule] += 1
        self._load_moments(state)
        self.load_tuned_state(state, self.num_steps)

    def _load_moments(self, tensors: Mapping[str, Tensor]) -> None:
        for rule, moments in self.moments.items():
            start = _prefix(rule)
            moments.clear()
            for key, value in tensors.items():
                name, _, role = key.removeprefix(start).rpartition("/")
                if key.startswith(start) and name in self.moving:
                    device = self.moving[name].target.device
                    moments.setdefault(name, {})[role] = value.to(device).clone()
            self._rules[rule].estimator.resume(list(moments))


def _prefix(rule: str) -> str:
    """What names of moments begin with."""
    return "update/" if rule == TWO_POINT else f"{rule}/"


class Least(TypedDict, total=False):
    """Options of every method whose default is that of `ZerothOrderOptimizer`."""

    targets: Sequence[str]
    seed: int


class Basic(Least, total=False):
    """Options of most methods; see `ZerothOrderOptimizer`."""

    weight_decay: float


class Common(Basic, total=False):
    """Options of every method by two points; see `ZerothOrderOptimizer`."""

    rho: float
    num_directions: int
    in_forward: bool
    directions: Directions
    frozen_rank: int | None
