"""Whether the examples of a batch get directions of their own, where the settings leave it open.

The perturbation scale rho of a run, where the settings leave it open.

Where a configuration's open settings are filled in, once, before a run exists.

Open is what a recipe may leave to the library because it depends on rows, model or method: the shape and labels of the
rows, whose the directions are, the number of feedback steps, a learning rate of "auto".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tezo.directions.targets import is_packed
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.estimators.estimate import FEEDBACK, Closure
from tezo.optim.learning_rate import choose_lr
from tezo.optim.measured_scale import MeasuredScale, in_words, measure_scale
from tezo.optim.methods import AUTO, method
from tezo.optim.optimizer import PER_EXAMPLE, SHARED, ZerothOrderOptimizer
from tezo.runs.words import REWARD
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo.system.progress import DIRECTIONS, RATE, RHO, current
from tezo.tasks.formats import LabelFormat, default_template
from tezo.tasks.objectives.objective import BatchClosure
from tezo.tasks.row_files import DataConfig
from tezo.tasks.rows import Format
from tezo.training.recipe import Config, TrainConfig
from tezo.training.schedule import is_feedback, resolve_feedback


def resolve_directions(
    config: Config, build: Callable[[Config], BaseOptimizer], loss: Closure | None, *, rows_share_inputs: bool
) -> tuple[Config, list[str]]:
    """Replaces "auto" in method.directions; returns (configuration, notices for the user).

    Directions are per-example where the objective is the loss, processes share rows, no row needs inputs of its own for
    it, and a step on a copy of the settings (rank 1, learning rate 0, four passes) finds that each row is measured on
    its own; otherwise shared.

    Args:
        config: with method.directions, or without it where it is at its default.
        build: makes the optimizer of a configuration.
        loss: on a few training rows, two where there are as many; None: no pass is made, and each row is assumed to be
            measured on its own.
        rows_share_inputs: whether a pass has inputs for all rows together, such as an encoder's descriptions of the
            labels; with directions of its own each row would need them again.
    """
    chosen = method(config.method.name)
    if config.method.options.get("directions", chosen.defaults().get("directions")) != AUTO:
        return config, []
    if not config.train.minimises_loss or rows_share_inputs or config.train.parallel == "directions":
        return config.with_options(directions=SHARED), []
    found, reason = config.with_options(directions=PER_EXAMPLE), None
    trial = None
    try:
        cheap = {"rank": 1, "basis": "gaussian", "lr": 0.0}
        trial = build(found.with_options(**{key: value for key, value in cheap.items() if key in chosen.options()}))
        if isinstance(trial, ZerothOrderOptimizer):
            trial.own_loss = math.inf  # the steps of the run say what this one would
        if loss is not None:
            with current().phase(DIRECTIONS):
                trial.step(loss)
    except NonFiniteLossError:
        pass  # the first step of the run says so
    except RequestError as error:
        reason = str(error)
    finally:
        if trial is not None:
            trial.close()
    if reason is None:
        return found, []
    return config.with_options(directions=SHARED), [f"directions are shared by the rows of a batch: {reason}"]


DEFAULT_RHO = 1e-3
"""The paper's: the first scale that is tried where the model computes in float32."""
ROUNDED_RHO = 3e-3
"""The first where it rounds its losses: packed, or in half precision."""
ROUNDED_BITS = 64
"""Bound of the rounding error of a loss on a CPU, in units of the last place of its dtype."""
REWARD_RHO = 1e-2
"""For a reward: completions do not change at all within a shorter distance of the parameters."""


def is_rho_open(config: Config) -> bool:
    """Whether the settings leave rho open, and the method has one.

    Raises:
        RequestError: rho is auto by request, and the objective is a metric.
    """
    wanted = config.method.options.get("rho")
    if method(config.method.name).defaults().get("rho") is None or wanted not in (None, AUTO):
        return False
    if wanted == AUTO and not config.train.minimises_loss:
        raise RequestError(
            f"method.rho is auto, which needs train.objective loss, not {config.train.objective}; set a number."
        )
    return True


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


def losses_of(batch: BatchClosure, optimizer: ZerothOrderOptimizer) -> Callable[[], Tensor]:
    """What `measure_scale` takes of the rows of a step."""
    return batch if optimizer.per_example else batch.row_losses


def resolve_rho(
    config: Config, optimizer: ZerothOrderOptimizer, losses: Callable[[], Tensor] | None
) -> tuple[Config, list[str], MeasuredScale | None]:
    """Replaces "auto" in method.rho; returns (configuration, notices for the user, what was measured).

    It is measured along the directions that the run draws; see `tezo.optim.measured_scale`. For a reward or a
    metric, and where there are no rows to measure on, it is a number. The optimizer has the rho of the result.

    Args:
        config: with method.rho, or without it where it is at its default.
        optimizer: of the run, with its directions and its basis.
        losses: of the rows of a step, as `measure_scale` takes them; None: nothing may be measured.

    Raises:
        RequestError: rho is auto by request, and the objective is a metric.
    """
    if not is_rho_open(config):
        return config, [], None
    if not config.train.minimises_loss or losses is None:
        rho = REWARD_RHO if config.train.objective == REWARD else first_scale(optimizer.model)
        optimizer.set_rho(rho)
        return config.with_options(rho=rho), [], None
    with current().phase(RHO):
        found = measure_scale(
            optimizer, losses, first_scale(optimizer.model), current().report, rounding=known_rounding(optimizer.model)
        )
    optimizer.set_rho(found.chosen.rho)
    dtype = next(p.dtype for p in optimizer.model.parameters() if p.is_floating_point())
    notice = in_words(found, str(dtype).removeprefix("torch."))
    return config.with_options(rho=found.chosen.rho), [notice], found


RESOLVED_AT_START: dict[str, Any] = {
    "data.shape": "auto",
    "data.template": None,
    "data.label_words": None,
    "method.directions": AUTO,
    "method.lr": AUTO,
    "method.rho": AUTO,
    "train.steps": None,
    "train.feedback_first": None,
    "train.feedback_last": None,
}
"""Settings that are filled in -> the value that leaves them open."""

SEARCH_SHARE = 0.2
"""Forward passes of the search for a learning rate, with those of the measurement of rho, as a part of the steps'."""

EPOCHS, LEAST_STEPS, MOST_STEPS = 20, 200, 1000
"""Default number of steps: so many epochs, within these bounds."""


@dataclass(frozen=True)
class RowFacts:
    """What open settings depend on of the rows.

    Attributes:
        count: number of training rows.
        shared_tokens: tokens of inputs that a pass has for all its rows together; see `Objective`.
        held_out: number of rows that learning rates are compared on.
    """

    count: int
    shared_tokens: int
    held_out: int


@dataclass(frozen=True)
class Resources:
    """What open settings depend on.

    Attributes:
        format: of the rows.
        model: the model.
        rows: facts about the rows.
        loss: number of rows -> the objective on the first training rows.
        batch: step -> the objective on the rows of that step.
        held_out: the losses of rows that the first steps do not see.
        measuring: whether passes may be made; without them settings that are measured stay open.
    """

    format: Format
    model: Any
    rows: RowFacts
    loss: Callable[[int], Closure]
    batch: Callable[[int], BatchClosure]
    held_out: Callable[[], Sequence[float]]
    measuring: bool = True


def resolve_before_building(
    config: Config, resources: Resources, build: Callable[[Config], BaseOptimizer]
) -> tuple[Config, list[str]]:
    """Fills in what the optimizer is built with; (configuration, what the user should know of the choices)."""
    few = resources.loss(2) if resources.measuring else None
    return resolve_directions(config, build, few, rows_share_inputs=resources.rows.shared_tokens > 0)


def resolve(config: Config, resources: Resources, optimizer: BaseOptimizer) -> tuple[Config, list[str]]:
    """(the configuration with no open setting, what the user should know of the choices).

    The optimizer has the rho and the learning rate of the result. What would be measured stays open if nothing may be.

    Raises:
        RequestError: feedback steps or a chosen rate are asked for, and cannot be had.
    """
    train = with_steps(config.train, resources.rows.count)
    loss = resources.loss(train.batch_size) if resources.measuring else None
    train, notices = resolve_feedback(train, config.method.name, optimizer, loss)
    config = replace(config, data=_resolved_data(config.data, resources.format), train=train)
    measured = None
    measures = resources.measuring or not is_rho_open(config) or not train.minimises_loss
    if measures and isinstance(optimizer, ZerothOrderOptimizer):
        config, more, measured = resolve_rho(config, optimizer, losses_of(resources.batch(0), optimizer))
        notices = [*notices, *more]
    lr, more = _resolved_lr(config, resources, optimizer, measured)
    return config.with_options(lr=lr), [*notices, *more]


def _resolved_lr(
    config: Config, resources: Resources, optimizer: BaseOptimizer, measured: MeasuredScale | None
) -> tuple[float | str, list[str]]:
    """(learning rate, notices for the user); the optimizer has the rate. "auto" where it is not to be searched."""
    wanted, default = config.method.options.get("lr", AUTO), float(optimizer.param_groups[0]["lr"])
    if wanted != AUTO or not isinstance(optimizer, ZerothOrderOptimizer):
        return default, []
    reason = None
    if not config.train.minimises_loss:
        reason = f"a rate for train.objective {config.train.objective} cannot be told from a few steps"
    elif resources.rows.held_out == 0:
        reason = "there are no rows to compare rates on"
    if reason is not None:
        if "lr" in config.method.options:
            raise RequestError(f"method.lr is auto, and {reason}; set a number.")
        return default, [f"method.lr is {default:.1e}, the method's default: {reason}."]
    if not resources.measuring:
        return AUTO, []
    passes = math.ceil(resources.rows.held_out / config.train.batch_size)
    spent = 0 if measured is None else measured.num_forward_passes
    budget = search_budget(config.train, optimizer) - spent
    with current().phase(RATE):
        found = choose_lr(
            optimizer, resources.batch, resources.held_out, passes, config.train.num_steps, budget, measured,
            current().report,
        )  # fmt: skip
    return found.lr, [found.notice]


def search_budget(train: TrainConfig, optimizer: BaseOptimizer) -> int:
    """Forward passes that the search for a learning rate may take, together with the measurement of rho."""
    feedback = sum(is_feedback(step, train) for step in range(train.num_steps))
    own = optimizer.passes_of(optimizer.rules[0], first=False) * (train.num_steps - feedback)
    return int(SEARCH_SHARE * (own + (optimizer.passes_of(FEEDBACK, first=False) * feedback if feedback else 0)))


def with_steps(train: TrainConfig, num_rows: int) -> TrainConfig:
    """The settings with a number of steps: that given, that of the given epochs, or `EPOCHS` within bounds."""
    if train.epochs is None:
        steps = math.ceil(EPOCHS * num_rows / train.batch_size)
        return replace(train, steps=train.steps or min(MOST_STEPS, max(LEAST_STEPS, steps)))
    steps = math.ceil(train.epochs * num_rows / train.batch_size)
    if train.steps not in (None, steps):
        raise RequestError(
            f"train.steps is {train.steps}, and train.epochs {train.epochs:g} are {steps} steps; leave one out."
        )
    return replace(train, steps=steps)


def _resolved_data(data: DataConfig, form: Format) -> DataConfig:
    """With the shape and labels filled in, so that the settings mean the same on other rows.

    The default template stays open: it follows data.text, which other rows may have under another name.
    """
    if isinstance(form, LabelFormat):
        template = data.template if form.template == default_template(form.kind, data.text) else form.template
        return replace(data, shape="label", label_words=dict(form.words), template=template)
    return data if form.shape == "task" else replace(data, shape=form.shape)
