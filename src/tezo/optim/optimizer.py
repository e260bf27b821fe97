"""The zeroth-order optimizer: torch.optim's interface, `loss = optimizer.step(closure)`, with forward passes only.

A step is `refresh`, `draw`, the estimate of an estimator, and `_apply`. `replay` takes the same step from its record.
"""

import statistics
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, Literal, NoReturn, overload

import torch
from torch import nn

from tezo.directions.bases.basis import FactorStore, Passes, RowsOf, Source
from tezo.directions.perturbation import Perturbation
from tezo.directions.products import evaluating
from tezo.directions.random import DrawKey
from tezo.directions.spaces import FixedFactors, SignedDense
from tezo.directions.targets import ALL_LINEAR, select_targets
from tezo.optim.base_optimizer import MOST_RANK, MOST_RATE, check_closure, check_count, check_rate, check_rho
from tezo.optim.closures import Closure, Losses, RowAnswers, RowOutputs
from tezo.optim.estimators.estimate import MOST_DIRECTIONS, Estimate, Probe, StepDraw, StepRecord, precise
from tezo.optim.estimators.per_example import PerExample
from tezo.optim.estimators.two_point import TwoPoint
from tezo.optim.hooked_optimizer import CLOSED, HookedOptimizer
from tezo.optim.stepping import Stepped, step_all
from tezo.optim.tuned_parameters import TunedParameters
from tezo.optim.updates import StepRule, Update
from tezo.system.errors import PerturbationWarning, RequestError
from tezo.system.processes import ProcessGroup
from tezo.system.signals import let_interrupt, uninterrupted
from tezo.system.values import takes

SHARED: Final = "shared"
PER_EXAMPLE: Final = "per-example"
Directions = Literal["shared", "per-example"]
"""Whether the examples of a batch share the directions of a step, or each has separate ones."""


FAR_ABOVE, FAR_AT_LEAST = 0.5, 0.1
"""A loss is far above the unperturbed one if it is higher by more than half of that, and by more than 0.1."""


class ZerothOrderOptimizer(HookedOptimizer):
    """An optimizer that combines a perturbation, an estimator and an update rule for the parameters of a model.

    `step(closure)` draws `num_directions` directions, has the estimator measure kappa along each of them, and steps
    along the average of kappa Z. By default the closure is evaluated at W + rho Z and W - rho Z; it runs forward passes
    only and returns a scalar, which need not be differentiable. During a step the model is in evaluation mode, so that
    both evaluations use the same function. Learning-rate schedulers of torch can be used. Between steps the model
    computes with the tuned parameters, by forward hooks where the stored weights are not written; `merge()` adds these
    changes to the weights.

    Args:
        model: model to be tuned, already on its device and in its dtype.
        perturbation: draws directions.
        update: steps along two-point estimates; must accept the perturbation's type of direction.
        lr: learning rate.
        rho: perturbation scale (the paper's perturbation rate).
        weight_decay: decoupled weight decay: each step multiplies the trained values by 1 - lr * weight_decay. These
            are the weights if the method writes them, else the change stored beside them: its coefficients, and what
            was trained before a refresh. 1-D parameters are not decayed.
        num_directions: directions averaged in a step, by default with two evaluations each; if directions are per
            example, the number for each example.
        targets: patterns that select the parameters, see `tezo.directions.targets.select_targets`.
        seed: seed of all draws.
        in_forward: False perturbs all parameters in place, as published code does (for comparison).
        directions: "shared": all examples of a batch meet the same directions, and the closure returns a scalar.
            "per-example": each has separate ones at the cost of shared ones, see `tezo.optim.estimators.per_example`;
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

    A `PerturbationWarning` says once that a perturbed point has a loss far above `unperturbed_loss`: there the two
    losses contain little about this model. Runs and Trainers set it. Elsewhere the first step takes one more pass for
    it if its closure is of `tezo.closure`; with another closure nothing is compared until it is set.

    Attributes:
        per_example: whether each example of a batch has separate directions.
        parameters: parameter name -> the object that perturbs and updates the parameter.
        basis: source of the fixed factors of directions.
        estimator: of the first rule.
        moments: rule -> parameter name -> the state of the rule's update.
        counts: rule -> number of estimates in its moments.
    """

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
        check_decay(lr, weight_decay)
        check_rho(rho)
        check_count("num_directions", num_directions, MOST_DIRECTIONS)
        check_count("frozen_rank", frozen_rank, MOST_RANK)
        _check_frozen_rank(frozen_rank, perturbation, in_forward=in_forward)
        if num_directions > 1 and (perturbation.single_direction or estimator.single_direction):
            raise RequestError(f"method.num_directions is {num_directions}; this method is defined for 1 only.")
        self.model, self.perturbation, self.basis, self.update = model, perturbation, perturbation.basis, update
        self.num_directions, self.per_example, self.seed = num_directions, directions != SHARED, seed
        self.targets = select_targets(model, targets)
        self.bind(self.targets)
        self.warn = partial(warnings.warn, category=PerturbationWarning, stacklevel=6)
        self._passes: Passes | None = None
        self._rows: RowsOf | None = None
        self._metrics: Mapping[str, Any] = {}
        self._refreshed: int | None = None
        self._stepping = self._has_warned = False
        perturbation.prepare(self.targets)
        self.parameters = TunedParameters(
            model, self.targets, perturbation, update, in_forward=in_forward, frozen_rank=frozen_rank
        )
        try:
            if self.per_example:
                self._check_per_example(directions, estimator)
                of_examples = estimator if issubclass(estimator, PerExample) else PerExample
                self.estimator: TwoPoint = of_examples(rho, self.parameters.blocks)
            else:
                self.estimator = estimator(rho)
            self._rules = {rule.estimator.rule: rule for rule in (StepRule(self.estimator, update), *more_rules)}
            for rule in self._rules.values():
                rule.estimator.prepare(model, self.parameters, seed)
        except BaseException:
            self.parameters.close()
            raise
        self.rules = tuple(self._rules)
        self.drop_moments()
        super().__init__([t.parameter for t in self.targets], {"lr": lr, "weight_decay": weight_decay})

    def _check_per_example(self, directions: str, estimator: type[TwoPoint]) -> None:
        if directions != PER_EXAMPLE:
            raise RequestError(f"method.directions is {directions!r}; it must be shared or per-example.")
        for name, parameter in self.parameters.items():
            of_examples = issubclass(self.perturbation.direction_type(parameter.target), FixedFactors | SignedDense)
            dense = parameter.target.is_matrix and not of_examples
            if dense or not parameter.in_blocks or not (estimator is TwoPoint or issubclass(estimator, PerExample)):
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
    def step(self, closure: None = ..., *, rule: str | None = ...) -> NoReturn: ...
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
        closure = check_closure(closure)
        name, factor = self.planned(self.num_steps) if rule is None else (rule, 1.0)
        estimator = self._rule(name).estimator
        rate = self._rate(name, factor)
        check_rate("lr", rate)
        check_decay(rate, float(self.param_groups[0]["weight_decay"]))
        if self._stepping:  # it would move the parameters that the outer step measures
            raise RequestError("step() was called by the closure of a step; call it after that step has returned.")
        self._stepping = True
        try:
            with uninterrupted():
                self.refresh(closure)
                draw = self.draw(name, factor)
                checked = self.parameters.reads_checked
                with nullcontext() if checked else self.parameters.refusing_direct_reads():
                    estimate = estimator.estimate(closure, draw)
                if estimator.compares:
                    self._compare(closure, estimate.probes)
                let_interrupt(last=True)
                passes = estimate.forward_passes
                record = StepRecord(self.num_steps, estimate.loss, draw.lr, estimate.probes, name, passes)
                self._apply(estimate, record, draw)
        except FloatingPointError as error:
            raise self.not_finite(*error.args) from None
        finally:
            self._stepping = False
        return estimate.loss

    @torch.inference_mode(False)
    @torch.no_grad()
    def replay(self, record: StepRecord) -> None:
        estimator = self._rule(record.rule).estimator
        for number in (record.lr, *record.projected_grads):
            if not abs(number) <= MOST_RATE:  # NaN is not
                raise RequestError(
                    f"record of step {record.step} has the number {number:g}, which no step has; put an intact copy of "
                    "its log in its place, or stop before it."
                )
        if record.step != self.num_steps or not estimator.accepts(len(record.probes), self.num_directions):
            raise RequestError(
                f"record is of step {record.step} with {len(record.probes)} directions; the next step is "
                f"{self.num_steps}, and num_directions is {self.num_directions}; give the records in their order, from "
                "a run with as many directions."
            )
        with uninterrupted():
            self.refresh()
            draw = self.draw(record.rule)
            estimate = estimator.recall(record, draw)
            let_interrupt(last=True)
            self._apply(estimate, record, draw)

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self, closure: Closure | None = None) -> None:
        """Brings the fixed factors, and the change trained with the ones before, up to the next step; before `draw`.

        Where the step begins an interval, a basis that sees data reads its factors from the factor store, or computes
        them by forward passes. The change trained with the factors before is then folded into the weights, or
        compressed and stored beside them. Elsewhere nothing is computed.

        Args:
            closure: of the step. A basis uses its rows unless others were set by `set_passes` or `set_rows`.

        Raises:
            RequestError: the optimizer was closed, its model has moved, or a basis lacks rows.
            FloatingPointError: the model has inputs or a loss that are not finite on the rows of a basis.
        """
        if self.parameters.closed:
            raise RequestError(CLOSED)
        self.check_bound()
        key = DrawKey(self.seed, self.num_steps)
        if self.basis.data_dependent:
            with evaluating(self.model):
                self.basis.refresh(self.perturbation.refresh_step(key.step), self._source(closure))
        for parameter in self.parameters.values():  # one at a time: old factors are dropped before the next are made
            parameter.refresh(key, self.perturbation.refresh(parameter.target, key))
        self._refreshed = key.step

    def draw(self, rule: str | None = None, factor: float = 1.0) -> StepDraw:
        """Returns the directions of the next step: a function of seed, step, fixed factors and moments.

        Nothing is changed, and no forward pass is run.

        Args:
            rule: rule of the step; None: the first of `rules`.
            factor: of the learning rate.

        Raises:
            RequestError: `refresh` has not been called for this step.
        """
        step, rule, perturbation = self.num_steps, rule or self.rules[0], self.perturbation
        if self._refreshed != step:
            raise RequestError(f"draw() needs the factors of step {step}; call refresh() before it.")
        moments = self.moments[self.rules[0]]
        keys = [DrawKey(self.seed, step, index) for index in range(perturbation.num_directions(self.num_directions))]
        directions = {
            name: tuple(perturbation.direction(parameter.target, key, moments.get(name, {})) for key in keys)
            for name, parameter in self.parameters.items()
        }
        predictions = perturbation.predictions(step)
        lr = self._rate(rule, factor)
        return StepDraw(step, self.counts[rule], lr, directions, predictions, self.num_idle_steps)

    def _apply(self, estimate: Estimate, record: StepRecord, draw: StepDraw) -> None:
        """Updates parameters and moments, and counts the step."""
        rule, moments = self._rules[record.rule], self.moments[record.rule]
        for name, other in self._rules.items():
            if name == record.rule:
                continue  # the update below carries over the moments of this rule
            if other.restarts:
                self.counts[name], self.moments[name] = 0, {}
            for parameter_name, state in self.moments[name].items():
                other.update.carry_over(draw.directions[parameter_name][0], state)
        weight_decay, stepped = float(self.param_groups[0]["weight_decay"]), list[Stepped]()
        for name, gradient in estimate.gradients.items():
            parameter = self.parameters[name]
            if name not in moments:
                moments[name] = rule.update.init(gradient, parameter)
            if weight_decay and parameter.target.is_matrix:
                decay = parameter.decay_weight_ if rule.update.writes_weight else parameter.decay_
                decay(1 - record.lr * weight_decay)
            stepped.append((parameter, gradient, moments[name]))
        step_all(rule.update, stepped, record.lr)
        self.counts[record.rule] += 1
        self.count(record)
        found = self.basis.metrics() if self.basis.data_dependent else {}
        self._metrics = {**estimate.metrics, **found}

    def _compare(self, closure: Closure, probes: Sequence[Probe]) -> None:
        """Warns, once, where the losses of a step are far above the unperturbed model's, on any rows and on these."""
        known = self.unperturbed_loss
        if self._has_warned or not probes or (known is None and not isinstance(closure, Losses)):
            return
        highest = max(statistics.fmean(getattr(p, sign) for p in probes) for sign in ("loss_plus", "loss_minus"))
        if known is not None and not is_far_above(highest, known):
            return
        with evaluating(self.model):
            loss = float(torch.as_tensor(precise(closure())).double().mean())
        self.unperturbed_loss = loss if known is None else max(loss, known)
        if is_far_above(highest, loss):
            self._has_warned = True
            self.warn(
                f"step {self.num_steps}: with method.rho {self.rho:g} the loss at a perturbed point is {highest:.4g}, "
                f"and the unperturbed loss on these rows is {loss:.4g}; such a step is not informative. Set a "
                "smaller method.rho, beside method.name; most methods measure one where it is auto."
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def measure(self, closure: Closure, rho: float | None = None) -> tuple[Probe, ...]:
        try:
            with uninterrupted():
                self.refresh(closure)
                return self.estimator.probes(closure, self.draw().directions, self.rho if rho is None else rho)
        except FloatingPointError as error:
            raise self.not_finite(*error.args) from None

    @torch.inference_mode(False)
    @torch.no_grad()
    def ahead(self, closure: Closure, rho: float, most: int | None = None) -> list[float]:
        with uninterrupted():
            self.refresh(closure)
            directions = {name: drawn[:most] for name, drawn in self.draw().directions.items()}
            return self.estimator.ahead(closure, directions, rho)

    def _rule(self, name: str) -> StepRule:
        if name not in self._rules:
            raise RequestError(
                f"this method takes steps of kind {', '.join(self.rules)}, not {name}; give one of these as rule, or "
                "replay a log by the method that wrote it."
            )
        return self._rules[name]

    def _rate(self, rule: str, factor: float) -> float:
        return float(self.param_groups[0]["lr"]) * factor * self._rules[rule].lr_scale

    def _source(self, closure: Closure | None) -> Source:
        passes, rows = self._passes, self._rows
        if passes is None and closure is not None:
            passes = lambda _: closure()  # noqa: E731
        if rows is None and isinstance(closure, RowOutputs):
            rows = lambda *_: closure  # noqa: E731
        answers = closure if isinstance(closure, RowAnswers) else None
        return Source(self.model, passes, rows, varied=self._rows is not None, answers=answers)

    def set_passes(self, passes: Passes) -> None:
        if not takes(passes, 0):
            raise RequestError("set_passes: give a function of a step that runs the model on some rows.")
        self._passes = passes

    def set_rows(self, rows: RowsOf) -> None:
        if not takes(rows, 0, 1):
            raise RequestError("set_rows: give a function of a step and of a number of rows that returns a closure.")
        self._rows = rows

    def set_factor_store(self, store: FactorStore) -> None:
        self.basis.set_factor_store(store)
        self.perturbation.forget()
        for rule in self._rules.values():
            rule.estimator.set_factor_store(store)

    def share_directions(self, processes: ProcessGroup) -> None:
        if self.num_directions % processes.size:
            raise RequestError(
                f"method.num_directions is {self.num_directions}, which {processes.size} ranks cannot share evenly; "
                "give a multiple, or set train.parallel=rows."
            )
        for rule in self._rules.values():
            rule.estimator.share_directions(processes)

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self._metrics

    def check_rule(self, rule: str, closure: Closure) -> None:
        self._rule(rule).estimator.check(closure)

    def passes_of(self, rule: str, *, first: bool) -> int:
        return self._rule(rule).estimator.passes(self.num_directions, first=first)


def check_decay(lr: float, weight_decay: float) -> None:
    """Raises a `RequestError` where a step would turn the sign of what was trained."""
    if lr * weight_decay > 1:
        raise RequestError(
            f"method.weight_decay is {weight_decay:g}, and times the learning rate, {lr:g}, it may be at most 1: a "
            "step takes this part of what was trained; lower one of them."
        )


def is_far_above(loss: float, unperturbed: float) -> bool:
    """Returns whether a loss is far above the unperturbed one, which is positive; so never for scores above zero."""
    return unperturbed > 0 and loss - unperturbed > max(FAR_ABOVE * unperturbed, FAR_AT_LEAST)


def _check_frozen_rank(frozen_rank: int | None, perturbation: Perturbation, *, in_forward: bool) -> None:
    if frozen_rank is not None and perturbation.interval is None:
        raise RequestError(
            f"method.frozen_rank is {frozen_rank}, and factors are never refreshed here; leave it out, or set "
            "method.lazy_update_interval where the method has it."
        )
    if frozen_rank is not None and not in_forward:
        raise RequestError(
            f"method.frozen_rank is {frozen_rank}, and in place nothing is kept beside the weights; leave out one "
            "of the two."
        )
