"""Which steps of a run are feedback steps: a number at the start and a number at the end."""

from dataclasses import replace

from tezo.errors import RequestError
from tezo.estimators.estimate import FEEDBACK, Closure
from tezo.optim.tuner import Tuner
from tezo.training.configuration.recipe import TrainConfig

FIRST, LAST = 15, 60
"""Default numbers of feedback steps at the start and at the end, from the study in docs/experiments.md. They are at
most 5 % and 20 % of the steps."""
LEAST_STEPS = 100
"""Shorter runs have no feedback steps by default: a few steps are not worth the extra passes before them."""
KEYS = ("feedback_first", "feedback_last")


def resolve_feedback(
    train: TrainConfig, method: str, optimizer: Tuner, loss: Closure, *, labelled: bool
) -> tuple[TrainConfig, list[str]]:
    """Replaces None in train.feedback_first and train.feedback_last; returns (settings, notices for the user).

    The defaults are `FIRST` and `LAST` if the method takes feedback steps, the rows have labels (as in the study) and
    the run has at least `LEAST_STEPS` steps; otherwise 0. Free text gets none by default, because the graph of the
    output head takes too much memory there.

    Args:
        train: settings with numbers or None for the two keys.
        method: name of the method.
        optimizer: optimizer on the model.
        loss: the loss on some training rows.
        labelled: whether all rows have options to choose from.

    Raises:
        RequestError: feedback steps are set, but the method, the objective or the model does not support them.
    """
    asked = [f"train.{key} is {count}" for key in KEYS if (count := getattr(train, key))]
    available = FEEDBACK in optimizer.kinds
    if asked and not available:
        raise RequestError(f"{asked[0]}, and {method} takes no feedback steps; set it to 0, or use lozo-adam.")
    if asked and not train.minimises_loss:
        raise RequestError(f"{asked[0]}, and train.objective {train.objective} has no gradient; leave one of them out.")
    fits = available and labelled and train.minimises_loss and train.num_steps >= LEAST_STEPS
    defaults = (min(FIRST, train.num_steps // 20), min(LAST, train.num_steps // 5)) if fits else (0, 0)
    notices: list[str] = []
    if asked or any(default for key, default in zip(KEYS, defaults, strict=True) if getattr(train, key) is None):
        try:
            optimizer.check_kind(FEEDBACK, loss)
        except RequestError as reason:
            if asked:
                raise
            defaults, notices = (0, 0), [f"there are no feedback steps: {reason}"]
    first, last = (n if (n := getattr(train, key)) is not None else m for key, m in zip(KEYS, defaults, strict=True))
    if first + last > train.num_steps:
        raise RequestError(f"{asked[0]}, and the run has {train.num_steps} steps; lower it, or raise train.steps.")
    return replace(train, feedback_first=first, feedback_last=last), notices


def is_feedback(step: int, settings: TrainConfig) -> bool:
    """Whether a step is a feedback step; `settings` has numbers for both keys, `step` counts from 0."""
    first, last = settings.feedback_first or 0, settings.feedback_last or 0
    return step < first or step >= settings.num_steps - last
