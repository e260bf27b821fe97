"""Where a configuration's open settings are filled in, once, before a run exists.

Open is what a recipe may leave to the library because it depends on rows, model or method: the shape and labels of the
rows, whose the directions are, the number of feedback steps, a learning rate of "auto".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tezo.errors import RequestError
from tezo.estimators.estimate import FEEDBACK, Closure
from tezo.optim.learning_rate import choose_lr
from tezo.optim.methods import AUTO
from tezo.optim.perturbation_scale import MeasuredScale
from tezo.optim.tuner import Tuner
from tezo.progress.meter import RATE, current
from tezo.tasks import Format, LabelFormat
from tezo.tasks.data_config import DataConfig
from tezo.tasks.formats import default_template
from tezo.tasks.objectives import BatchClosure
from tezo.training.configuration.recipe import Config, TrainConfig
from tezo.training.preparation.example_directions import resolve_directions
from tezo.training.preparation.feedback_schedule import is_feedback, resolve_feedback
from tezo.training.preparation.perturbation_scale import is_rho_open, losses_of, resolve_rho

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
    config: Config, resources: Resources, build: Callable[[Config], Tuner]
) -> tuple[Config, list[str]]:
    """Fills in what the optimizer is built with; (configuration, what the user should know of the choices)."""
    few = resources.loss(2) if resources.measuring else None
    return resolve_directions(config, build, few, rows_share_inputs=resources.rows.shared_tokens > 0)


def resolve(config: Config, resources: Resources, optimizer: Tuner) -> tuple[Config, list[str]]:
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
    if resources.measuring or not is_rho_open(config) or not train.minimises_loss:
        config, more, measured = resolve_rho(config, optimizer, losses_of(resources.batch(0), optimizer))
        notices = [*notices, *more]
    lr, more = _resolved_lr(config, resources, optimizer, measured)
    return config.with_options(lr=lr), [*notices, *more]


def _resolved_lr(
    config: Config, resources: Resources, optimizer: Tuner, measured: MeasuredScale | None
) -> tuple[float | str, list[str]]:
    """(learning rate, notices for the user); the optimizer has the rate. "auto" where it is not to be searched."""
    wanted, default = config.method.options.get("lr", AUTO), float(optimizer.param_groups[0]["lr"])
    if wanted != AUTO or optimizer.num_directions == 0:
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


def search_budget(train: TrainConfig, optimizer: Tuner) -> int:
    """Forward passes that the search for a learning rate may take, together with the measurement of rho."""
    feedback = sum(is_feedback(step, train) for step in range(train.num_steps))
    own = optimizer.passes_of(optimizer.kinds[0], first=False) * (train.num_steps - feedback)
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
