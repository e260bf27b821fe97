"""Where a configuration's open settings are filled in, once, before a run exists.

Open is what a recipe may leave to the library because it depends on rows, model or method: the shape and labels of the
rows, whose the directions are, the number of feedback steps, a learning rate of "auto".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tezo.estimators.estimate import Closure
from tezo.optim.learning_rate import choose_lr
from tezo.optim.methods import AUTO
from tezo.optim.tuner import Tuner
from tezo.tasks import Format, LabelFormat
from tezo.tasks.data_config import DataConfig
from tezo.training.feedback_schedule import resolve_feedback
from tezo.training.recipe import Config

RESOLVED_AT_START: dict[str, Any] = {
    "data.shape": "auto",
    "data.template": None,
    "data.label_words": None,
    "method.directions": AUTO,
    "method.lr": AUTO,
    "train.feedback_first": None,
    "train.feedback_last": None,
}
"""Settings that are filled in -> the value that leaves them open. `resolve` fills them in, but for the directions,
which the optimizer is built with (`tezo.training.example_directions`)."""


@dataclass(frozen=True)
class Resources:
    """What open settings depend on.

    Attributes:
        format: of the rows.
        optimizer: on the model.
        loss: on some training rows.
        labelled: whether all rows have options to choose among.
        objective_is_loss: rather than a metric, which has no gradient.
        parts: makes the losses on disjoint parts of the rows, and says how many rows a part has.
    """

    format: Format
    optimizer: Tuner
    loss: Closure
    labelled: bool
    objective_is_loss: bool
    parts: Callable[[], tuple[Sequence[Closure], int]]


def resolve(config: Config, resources: Resources) -> tuple[Config, list[str]]:
    """(the configuration with no open setting, what the user should know of the choices).

    The optimizer has the learning rate of the result.

    Raises:
        RequestError: feedback steps or a measured rate are asked for, and cannot be had.
    """
    train, notices = resolve_feedback(
        config.train,
        config.method.name,
        resources.optimizer,
        resources.loss,
        labelled=resources.labelled,
        objective_is_loss=resources.objective_is_loss,
    )
    config = replace(config, data=_resolved_data(config.data, resources.format), train=train)
    if config.method.options.get("lr") != AUTO:
        return config, notices
    parts, rows = resources.parts()
    found = choose_lr(resources.optimizer, parts, rows, train.batch_size)
    for group in resources.optimizer.param_groups:
        group["lr"] = found.lr
    method = replace(config.method, options={**config.method.options, "lr": found.lr})
    return replace(config, method=method), [*notices, found.notice]


def _resolved_data(data: DataConfig, form: Format) -> DataConfig:
    """With the shape and labels filled in, so that the settings mean the same on other rows.

    A template that was not given stays open: it follows data.text, which other rows may have under another name.
    """
    if isinstance(form, LabelFormat):
        return replace(data, shape="label", label_words=dict(form.words))
    return data if form.shape == "task" else replace(data, shape=form.shape)
