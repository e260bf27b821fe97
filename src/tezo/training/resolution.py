"""Where a configuration's open settings are filled in, once, before a run exists.

Open is what a recipe may leave to the library because it depends on rows, model or method: the shape and labels of the
rows, whose the directions are, the number of feedback steps, a learning rate of "auto".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tezo.errors import RequestError
from tezo.estimators.estimate import Closure
from tezo.optim.learning_rate import choose_lr
from tezo.optim.methods import AUTO
from tezo.optim.tuner import Tuner
from tezo.tasks import Format, LabelFormat
from tezo.tasks.data_config import DataConfig
from tezo.training.feedback_schedule import resolve_feedback
from tezo.training.recipe import Config, TrainConfig

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
"""Settings that are filled in -> the value that leaves them open. `resolve` fills them in, but for two that the
optimizer is built with (`tezo.training.example_directions`, `tezo.training.perturbation_scale`)."""


EPOCHS, LEAST_STEPS, MOST_STEPS = 20, 200, 1000
"""Default number of steps: so many epochs, within these bounds."""


@dataclass(frozen=True)
class Resources:
    """What open settings depend on.

    Attributes:
        format: of the rows.
        optimizer: on the model.
        loss: on some training rows.
        num_rows: number of training rows.
        labelled: whether all rows have options to choose among.
        objective_is_loss: rather than a metric, which has no gradient.
        trials: what a learning rate is chosen by.
    """

    format: Format
    optimizer: Tuner
    loss: Closure
    num_rows: int
    labelled: bool
    objective_is_loss: bool
    trials: "RateTrials"


@dataclass(frozen=True)
class RateTrials:
    """What a learning rate is chosen by; see `choose_lr`.

    Attributes:
        batch: step -> the objective on the rows of that step.
        held_out: the losses of other rows; None: there are none.
        num_held_out: number of these rows.
    """

    batch: Callable[[int], Closure]
    held_out: Callable[[], Sequence[float]] | None
    num_held_out: int


def resolve(config: Config, resources: Resources) -> tuple[Config, list[str]]:
    """(the configuration with no open setting, what the user should know of the choices).

    The optimizer has the learning rate of the result.

    Raises:
        RequestError: feedback steps or a measured rate are asked for, and cannot be had.
    """
    train, notices = resolve_feedback(
        _with_steps(config.train, resources.num_rows),
        config.method.name,
        resources.optimizer,
        resources.loss,
        labelled=resources.labelled,
        objective_is_loss=resources.objective_is_loss,
    )
    config = replace(config, data=_resolved_data(config.data, resources.format), train=train)
    lr, more = _resolved_lr(config, resources)
    return config.with_options(lr=lr), [*notices, *more]


def _resolved_lr(config: Config, resources: Resources) -> tuple[float, list[str]]:
    """(learning rate, notices for the user); the optimizer has the rate."""
    optimizer, trials, wanted = resources.optimizer, resources.trials, config.method.options.get("lr")
    default = float(optimizer.param_groups[0]["lr"])
    if wanted not in (None, AUTO) or optimizer.num_directions == 0:
        return default, []
    reason = None
    if not resources.objective_is_loss:
        reason = f"a rate for train.objective {config.train.objective} cannot be told from a few steps"
    elif trials.held_out is None:
        reason = "there are no rows to compare rates on"
    if reason is not None:
        if wanted == AUTO:
            raise RequestError(f"method.lr is auto, and {reason}; set a number.")
        return default, [f"method.lr is {default:.1e}, the method's default: {reason}."]
    assert trials.held_out is not None
    passes = math.ceil(trials.num_held_out / config.train.batch_size)
    found = choose_lr(optimizer, trials.batch, trials.held_out, passes, config.train.num_steps)
    return found.lr, [found.notice]


def _with_steps(train: TrainConfig, num_rows: int) -> TrainConfig:
    epochs = math.ceil(EPOCHS * num_rows / train.batch_size)
    return replace(train, steps=train.steps or min(MOST_STEPS, max(LEAST_STEPS, epochs)))


def _resolved_data(data: DataConfig, form: Format) -> DataConfig:
    """With the shape and labels filled in, so that the settings mean the same on other rows.

    A template that was not given stays open: it follows data.text, which other rows may have under another name.
    """
    if isinstance(form, LabelFormat):
        return replace(data, shape="label", label_words=dict(form.words))
    return data if form.shape == "task" else replace(data, shape=form.shape)
