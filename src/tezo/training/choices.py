"""Choices for the settings that a request leaves open, made once, before the first step."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tezo.directions.random import permutation
from tezo.directions.targets import is_packed
from tezo.methods import AUTO, ES, GAUSS_NEWTON, HEAD_FEEDBACK, Method, method
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.closures import Closure, RowLosses
from tezo.optim.estimators.estimate import FEEDBACK
from tezo.optim.learning_rate import TRIAL_STEPS, choose_lr
from tezo.optim.measured_scale import RISE, MeasuredScale, in_words, measure_reach, measure_scale
from tezo.optim.optimizer import PER_EXAMPLE, SHARED
from tezo.optim.settings import DEFAULT, GIVEN, RESOLVED, Setting, Settings
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo.system.progress import DIRECTIONS, RATE, RHO, current
from tezo.system.progress import FEEDBACK as LOOKING
from tezo.tasks.objectives.closure import BatchClosure
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.rewards import Reward, answered
from tezo.tasks.row_files import DataConfig
from tezo.tasks.scoring import REWARD
from tezo.training.rows_of_steps import KEYS, BatchSampler, default_counts, is_feedback, planned
from tezo.training.settings import Config, TrainConfig

RESOLVED_AT_START: dict[str, Any] = {
    "model.dtype": "auto",
    "method.name": AUTO,
    "data.shape": "auto",
    "data.text": DataConfig.text,
    "data.template": None,
    "data.label_words": None,
    "method.directions": AUTO,
    "method.lr": AUTO,
    "method.rho": AUTO,
    "train.batch_size": None,
    "train.steps": None,
    "train.schedule": None,
    "train.feedback_first": None,
    "train.feedback_last": None,
    "train.guard": None,
}
"""Settings that are filled in -> the value that leaves them open."""

EPOCHS, LEAST_STEPS, MOST_STEPS = 20, 200, 1000
"""Default number of steps: so many epochs, within these bounds."""
SEARCH_SHARE = 0.2
"""Forward passes of the search for a learning rate, with those of the measurement of rho, as a part of the steps'."""
DEFAULT_RHO = 1e-3
"""The paper's: the first scale that is tried where the model computes in float32."""
ROUNDED_RHO = 3e-3
"""The first where it rounds its losses: packed, or in half precision."""
ROUNDED_BITS = 64
"""Bound of the rounding error of a loss on a CPU, in units of the last place of its dtype."""
REWARD_RHO = 1e-2
"""For a reward, where nothing is measured."""


class Rows(ABC):
    """The training rows of a request, as open settings are measured on them.

    Attributes:
        share_directions: whether the rows of a batch must share directions, such as where a pass has inputs for all of
            them together.
        engine: name of the engine that computes their losses; None: torch does.
        held_out: number of rows that learning rates are compared on; 0: there are none.
    """

    share_directions: bool
    engine: str | None = None
    held_out: int

    @abstractmethod
    def step(self, step: int, *, per_example: bool) -> Closure:
        """Returns what that step evaluates: the loss, or (rows,) if each row has directions of its own."""

    @abstractmethod
    def losses(self, step: int, *, per_example: bool) -> Callable[[], Tensor]:
        """Returns what `measure_scale` evaluates on the rows of that step."""

    @abstractmethod
    def few(self) -> Closure:
        """Returns what a step with directions for each row evaluates on two rows."""

    @abstractmethod
    def held_out_losses(self) -> Sequence[float]:
        """Computes the losses of the held-out rows, which the first steps do not see."""

    def own_answers(self) -> Callable[[], float] | None:
        """Has the model write answers; returns their loss at the parameters of each call. None: it writes nothing."""
        return None


class ClosureRows(Rows):
    """The rows of a loop of one's own.

    Args:
        closures: step -> what that step evaluates.
        held_out: rows that rates are compared on; None: there are none.
    """

    def __init__(self, closures: Callable[[int], Closure], held_out: RowLosses | None) -> None:
        self._closures, self._others = closures, held_out
        self.share_directions = not isinstance(closures(0), RowLosses)
        self.held_out = 0 if held_out is None else held_out.examples

    def step(self, step: int, *, per_example: bool) -> Closure:
        del per_example  # a closure of rows has both
        return self._closures(step)

    def losses(self, step: int, *, per_example: bool) -> Callable[[], Tensor]:
        closure: Any = self._closures(step)
        apart = isinstance(closure, RowLosses) and not per_example
        return (lambda: closure.example_losses(1)[0]) if apart else closure

    def few(self) -> Closure:
        return self._closures(0)

    def held_out_losses(self) -> list[float]:
        return [] if self._others is None else self._others.example_losses(1)[0].tolist()


O = TypeVar("O", bound=BaseOptimizer)  # noqa: E741


OWN_ANSWERS = 8
"""Prompts whose answers by the untuned model tell the scale of a reward, at most."""

HELD_OUT_ROWS = 64
"""Rows that trials of learning rates are compared on, at most."""


class RunRows(Rows):
    """The rows of a run. Rates are compared on its dev rows, or else on training rows that the trials do not see."""

    def __init__(
        self,
        settings: TrainConfig,
        model: Any,
        objective: Objective,
        train: Sequence[Encoded],
        dev: Sequence[Encoded],
        reward: Reward | None = None,
    ) -> None:
        self._reward = reward
        self._model, self._train, self._objective = model, train, objective
        self._sampler = BatchSampler(range(len(train)), settings.rows_per_step, settings.seed)
        self._size = settings.rows_per_step  # no pass takes more memory than a step's
        seen = {row for step in range(TRIAL_STEPS) for row in self._sampler.rows(step)}
        others = dev or [row for i, row in enumerate(train) if i not in seen]
        order = permutation(len(others), seed=settings.seed, step=0, name="learning rate")[:HELD_OUT_ROWS]
        self._others = [others[i] for i in order]
        self.held_out = len(self._others)
        self.engine = objective.evaluator.engine
        self.share_directions = objective.evaluator.shared_tokens > 0 or self.engine is not None

    def own_answers(self) -> Callable[[], float] | None:
        if self._reward is None:
            return None
        rows = self._train[:OWN_ANSWERS]
        own = answered(rows, self._reward.own_answers(self._model, self._objective, rows, len(rows)))
        if not own:
            return None
        closure = self._closure(own)
        return lambda: float(closure())

    def _closure(self, rows: Sequence[Encoded]) -> BatchClosure:
        return self._objective.closure(self._model, self._objective.batches(rows))

    def step(self, step: int, *, per_example: bool) -> BatchClosure:
        del per_example  # it tells either
        return self._closure([self._train[i] for i in self._sampler.rows(step)])

    def losses(self, step: int, *, per_example: bool) -> Callable[[], Tensor]:
        closure = self.step(step, per_example=per_example)
        return closure if per_example else closure.row_losses

    def few(self) -> BatchClosure:
        return self._closure(self._train[:2])

    def held_out_losses(self) -> list[float]:
        parts = (self._others[start : start + self._size] for start in range(0, self.held_out, self._size))
        return [value for part in parts for value in self._closure(part).row_losses().tolist()]


@dataclass(frozen=True)
class Resolved(Generic[O]):
    """A configuration with no open setting, the optimizer that has it, and what the user should know of the choices."""

    config: Config
    optimizer: O
    notices: tuple[str, ...]


def resolve(config: Config, rows: Rows | None, build: Callable[[Config], O], *, measuring: bool = True) -> Resolved[O]:
    """Fills in the open settings of a configuration, and builds its optimizer.

    Args:
        config: with a number of steps.
        rows: what settings are measured on; None: there are none at hand, and defaults take the place of measurements.
        build: makes the optimizer of a configuration.
        measuring: whether forward passes may be made; without them what would be measured stays "auto".

    Raises:
        RequestError: what the request asks for cannot be had.
    """
    request = config
    config, notices = with_directions(config, rows, build, measuring=measuring)
    optimizer = build(config)
    try:
        train, more = resolve_feedback(config.train, config.method.name, optimizer, rows, measuring=measuring)
        guard = train.guard if train.guard is not None else method(config.method.name).guarded
        config = replace(config, train=replace(train, guard=guard))
        notices += more
        measured = None
        measures = measuring or not is_rho_open(config) or not train.chooses_by_dev_rows
        if measures:
            config, more, measured = resolve_rho(config, optimizer, rows)
            notices += more
        lr, more = _resolved_lr(config, rows, optimizer, measured, measuring=measuring)
        config = config.with_options(lr=lr)
    except BaseException:
        optimizer.close()  # a model that the caller has is free again
        raise
    if FEEDBACK in optimizer.rules and (config.train.feedback_first or config.train.feedback_last):
        optimizer.plan = partial(planned, settings=config.train, first=optimizer.rules[0])
    optimizer.settings = _settings(request, config, optimizer)
    return Resolved(config, optimizer, tuple(notices + more))


def _settings(request: Config, resolved: Config, optimizer: BaseOptimizer) -> Settings:
    """Returns every option of an optimizer, with its source in the request."""
    asked, defaults = request.method.options, method(request.method.name).defaults()
    found = Settings()
    for name, setting in optimizer.settings.items():
        left_open = asked.get(name, defaults.get(name)) == AUTO
        source = RESOLVED if left_open else GIVEN if name in asked else DEFAULT
        found[name] = Setting(resolved.method.options.get(name, setting.value), source)
    for key in KEYS if FEEDBACK in optimizer.rules else ():
        found[key] = Setting(getattr(resolved.train, key), RESOLVED if getattr(request.train, key) is None else GIVEN)
    return found


def with_directions(
    config: Config, rows: Rows | None, build: Callable[[Config], BaseOptimizer], *, measuring: bool
) -> tuple[Config, list[str]]:
    """Replaces "auto" in method.directions; returns (configuration, notices for the user).

    Directions are per-example where the objective is the loss, processes share rows, and a step on a copy of the
    settings (rank 1, learning rate 0, four passes) finds that each row is measured on its own; otherwise shared.
    Without measuring each row is assumed to be.
    """
    chosen = method(config.method.name)
    asked = config.method.options.get("directions", chosen.defaults().get("directions"))
    if asked != AUTO:
        return config.with_options(directions=asked) if asked == PER_EXAMPLE else config, []
    apart = config.train.minimises_loss and config.train.parallel != "directions"
    if not apart or rows is None or rows.share_directions:
        return config.with_options(directions=SHARED), []
    found, trial = config.with_options(directions=PER_EXAMPLE), None
    cheap = {"rank": 1, "basis": "gaussian", "lr": 0.0}
    try:
        trial = build(found.with_options(**{key: value for key, value in cheap.items() if key in chosen.options()}))
        trial.unperturbed_loss = math.inf  # the steps of the run say what this one would
        if measuring:
            with current().phase(DIRECTIONS):
                trial.step(rows.few())
    except NonFiniteLossError:
        pass  # the first step of the run says so
    except RequestError as error:
        return config.with_options(directions=SHARED), [f"directions are shared by the rows of a batch: {error}"]
    finally:
        if trial is not None:
            trial.close()
    return found, []


def resolve_feedback(
    train: TrainConfig, method: str, optimizer: BaseOptimizer, rows: Rows | None, *, measuring: bool
) -> tuple[TrainConfig, list[str]]:
    """Replaces None in train.feedback_first and train.feedback_last; returns (settings, notices for the user).

    They become `default_counts` if the method takes feedback steps, the objective is the loss and a pass shows that the
    model supports them, which is assumed without measuring; otherwise 0.

    Raises:
        RequestError: feedback steps are set, but the method, the objective or the model does not support them.
    """
    asked = [f"train.{key} is {count}" for key in KEYS if (count := getattr(train, key))]
    available = FEEDBACK in optimizer.rules
    if asked and not available:
        raise RequestError(f"{asked[0]}, and {method} takes no feedback steps; set it to 0, or use {HEAD_FEEDBACK}.")
    if asked and not train.minimises_loss:
        raise RequestError(f"{asked[0]}, and train.objective {train.objective} has no gradient; leave one of them out.")
    engine = None if rows is None else rows.engine
    if asked and engine is not None:
        raise RequestError(f"{asked[0]}, and {engine} computes no gradient; set it to 0, or leave model.engine out.")
    possible = available and train.minimises_loss and rows is not None
    defaults = default_counts(train.num_steps) if possible else (0, 0)
    notices: list[str] = []
    wanted = any(default for key, default in zip(KEYS, defaults, strict=True) if getattr(train, key) is None)
    if wanted and engine is not None:
        defaults, notices = (0, 0), [f"there are no feedback steps: {engine} computes no gradient."]
    elif measuring and rows is not None and (asked or wanted):
        try:
            with current().phase(LOOKING):
                optimizer.check_rule(FEEDBACK, rows.step(0, per_example=False))
        except RequestError as reason:
            if asked:
                raise
            defaults, notices = (0, 0), [f"there are no feedback steps: {reason}"]
    first, last = (n if (n := getattr(train, key)) is not None else m for key, m in zip(KEYS, defaults, strict=True))
    if first + last > train.num_steps:
        raise RequestError(
            f"{' and '.join(asked)}, more than the {train.num_steps} steps; lower them, or raise the steps."
        )
    return replace(train, feedback_first=first, feedback_last=last), notices


def is_rho_open(config: Config) -> bool:
    """Whether the configuration leaves rho open, and the method has one.

    Raises:
        RequestError: rho is auto by request, and the objective is a metric that is no reward.
    """
    wanted = config.method.options.get("rho")
    if wanted == AUTO and not config.train.chooses_by_dev_rows:
        raise RequestError(
            f"method.rho is auto, which needs train.objective loss, not {config.train.objective}; set a number."
        )
    return (wanted or method(config.method.name).defaults().get("rho")) == AUTO


def first_scale(model: Any) -> float:
    """The scale that is tried first on a model."""
    rounds = any(is_packed(p) or p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return ROUNDED_RHO if rounds else DEFAULT_RHO


def known_rounding(model: Any) -> float | None:
    """Bound of the rounding error of a loss, as a part of it; None where it has to be measured."""
    kinds = {p.dtype for p in model.parameters()}
    exact = {torch.float32, torch.float64}
    if not kinds <= exact or any(is_packed(p) or p.device.type != "cpu" for p in model.parameters()):
        return None
    return ROUNDED_BITS * max(torch.finfo(kind).eps for kind in kinds)


def _reach(optimizer: BaseOptimizer, rows: Rows | None) -> tuple[float, list[str]]:
    """Returns (rho for a reward, notices for the user); `REWARD_RHO` where nothing can be measured."""
    if rows is None:
        return REWARD_RHO, []
    with current().phase(RHO):
        loss = rows.own_answers()
        if loss is None:
            return REWARD_RHO, []
        rho, rise = measure_reach(optimizer, loss)
    return rho, [
        f"method.rho is {rho:.1e}: the scale at which the model's own answers become less likely by about {RISE:g} "
        f"nats a token ({rise:.2g} were measured there)."
    ]


def resolve_rho(
    config: Config, optimizer: BaseOptimizer, rows: Rows | None
) -> tuple[Config, list[str], MeasuredScale | None]:
    """Replaces "auto" in method.rho; returns (configuration, notices for the user, what was measured).

    It is measured along the directions that the run draws, of a loss and of a reward; see `tezo.optim.measured_scale`.
    For another metric, and where there are no rows, it is a number. The optimizer has the rho of the result.
    """
    if not is_rho_open(config):
        return config, [], None
    if not config.train.minimises_loss or rows is None:
        rho, notices = first_scale(optimizer.model), list[str]()
        if config.train.objective == REWARD:
            rho, notices = _reach(optimizer, rows)
        optimizer.set_rho(rho)
        return config.with_options(rho=rho), notices, None
    losses, rounding = rows.losses(0, per_example=optimizer.per_example), known_rounding(optimizer.model)
    with current().phase(RHO):
        found = measure_scale(optimizer, losses, first_scale(optimizer.model), current().report, rounding=rounding)
    optimizer.set_rho(found.chosen.rho)
    dtype = next(p.dtype for p in optimizer.model.parameters() if p.is_floating_point())
    notice = in_words(found, str(dtype).removeprefix("torch."))
    return config.with_options(rho=found.chosen.rho), [notice], found


def _resolved_lr(
    config: Config, rows: Rows | None, optimizer: BaseOptimizer, measured: MeasuredScale | None, *, measuring: bool
) -> tuple[float | str, list[str]]:
    """(learning rate, notices for the user); the optimizer has the rate. "auto" where it is not to be searched."""
    wanted = config.method.options.get("lr", method(config.method.name).defaults()["lr"])
    default = float(optimizer.param_groups[0]["lr"])
    if wanted != AUTO:
        return default, []
    reason = None
    if not config.train.minimises_loss:
        reason = f"a rate for train.objective {config.train.objective} cannot be told from a few steps"
    elif rows is None or rows.held_out == 0:
        reason = "there are no rows to compare rates on"
    if reason is not None or rows is None:
        if "lr" in config.method.options:
            raise RequestError(f"method.lr is auto, and {reason}; set a number.")
        return default, [f"method.lr is {default:.1e}, the method's default: {reason}."]
    if not measuring:
        return AUTO, []
    passes = math.ceil(rows.held_out / config.train.rows_per_step)
    spent = 0 if measured is None else measured.num_forward_passes
    budget = search_budget(config.train, optimizer) - spent
    batch = partial(rows.step, per_example=optimizer.per_example)
    with current().phase(RATE):
        found = choose_lr(
            optimizer, batch, rows.held_out_losses, passes, config.train.num_steps, budget, measured, current().report
        )
    return found.lr, [found.notice]


def search_budget(train: TrainConfig, optimizer: BaseOptimizer) -> int:
    """Forward passes that the search for a learning rate may take, together with the measurement of rho."""
    feedback = sum(is_feedback(step, train) for step in range(train.num_steps))
    own = optimizer.passes_of(optimizer.rules[0], first=False) * (train.num_steps - feedback)
    return int(SEARCH_SHARE * (own + (optimizer.passes_of(FEEDBACK, first=False) * feedback if feedback else 0)))


DEFAULTS = {
    GAUSS_NEWTON: f"these rows have {GAUSS_NEWTON}, whose steps are rounds over more rows",
    ES: f"a reward has {ES}, whose steps are of a population",
}
OWN_SETTINGS = ("steps", "epochs", "batch_size", *KEYS)
"""Settings of section train whose numbers mean something else with another method."""


def with_method(config: Config, kind: str, *, learns_outputs: bool) -> tuple[Config, list[str]]:
    """Replaces "auto" in method.name; returns (configuration, notices for the user).

    With a causal model it is gauss-newton for rows that share their labels and for free text, where the request sets
    nothing that depends on the method: no option of it, and none of `OWN_SETTINGS`; and es for a reward, where it sets
    nothing that es does not have, or counts otherwise: a rate, or feedback steps. Otherwise it is head-feedback.
    (docs/experiments.md has the last two on a model of 135M parameters and on small ones, docs/rewards.md the first.)

    Args:
        config: of the request.
        kind: of the model.
        learns_outputs: whether the rows share their labels, or are free text that the last layer can be fitted to.
    """
    if config.method.name != AUTO:
        return config, []
    train = config.train
    suited = ES if train.objective == REWARD else GAUSS_NEWTON if learns_outputs and train.minimises_loss else None
    if kind != "causal" or config.model.peft != "none":
        suited = None
    shares_rows = train.parallel == "rows" and int(os.environ.get("WORLD_SIZE", "1")) > 1
    shared = method(ES).options().keys() - {"lr"} if suited == ES else set[str]()
    set_ = [f"method.{name}" for name in config.method.options if name not in shared]
    set_ += [f"train.{key}" for key in (KEYS if suited == ES else OWN_SETTINGS) if getattr(train, key) is not None]
    if suited is not None and not shares_rows and not set_:
        return replace(config, method=replace(config.method, name=suited)), []
    notices = []
    if suited is not None and not shares_rows:
        notices.append(f"method.name is {HEAD_FEEDBACK}, because {set_[0]} is set; by default {DEFAULTS[suited]}.")
    elif suited is not None:
        notices.append(
            f"method.name is {HEAD_FEEDBACK}, because several processes share the rows of a step; in one process "
            f"{DEFAULTS[suited]}."
        )
    return replace(config, method=replace(config.method, name=HEAD_FEEDBACK)), notices


def with_steps(train: TrainConfig, num_rows: int, chosen: Method[Any]) -> TrainConfig:
    """The settings with a batch size, a schedule and a number of steps: those given, or the method's.

    The steps of a method without a number are `EPOCHS` within bounds. A batch has no row twice.
    """
    size = min(train.batch_size or chosen.batch_size, num_rows)
    train = replace(train, batch_size=size, schedule=train.schedule or chosen.schedule)
    if train.epochs is None:
        if chosen.steps is not None:
            return replace(train, steps=train.steps or chosen.steps)
        steps = math.ceil(EPOCHS * num_rows / size)
        return replace(train, steps=train.steps or min(MOST_STEPS, max(LEAST_STEPS, steps)))
    steps = math.ceil(train.epochs * num_rows / size)
    if steps >= 2**31:
        raise RequestError(f"train.epochs is {train.epochs:g}, which are {steps:.1e} steps; lower it.")
    if train.steps not in (None, steps):
        raise RequestError(
            f"train.steps is {train.steps}, and train.epochs {train.epochs:g} are {steps} steps; leave one out."
        )
    return replace(train, steps=steps)
