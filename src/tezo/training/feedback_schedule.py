"""Which steps of a run are feedback steps: the first ones and the last ones."""

from dataclasses import replace

from tezo.errors import RequestError
from tezo.estimators.estimate import FEEDBACK, Closure
from tezo.optim.tuner import Tuner
from tezo.training.recipe import TrainConfig

FIRST, LAST = 15, 60
"""Default numbers, as in the study of docs/experiments.md; at most a twentieth and a fifth of the steps."""
LEAST_STEPS = 100
"""Shorter runs have none by default: a phase of a few steps is not worth the passes that it begins with."""
KEYS = ("feedback_first", "feedback_last")


def resolve_feedback(
    train: TrainConfig, method: str, optimizer: Tuner, loss: Closure, *, labelled: bool, objective_is_loss: bool
) -> tuple[TrainConfig, list[str]]:
    """(the settings with the numbers of feedback steps filled in, what the user should know).

    Open numbers become `FIRST` and `LAST` where the method takes such steps, the rows have labels, as the study's
    have, and there are `LEAST_STEPS`; 0 elsewhere. Free text is left out because of the memory that a graph of the head
    takes there.

    Args:
        train: with a number, or None for an open one.
        method: its name.
        optimizer: on the model.
        loss: on some training rows.
        labelled: whether all rows have options to choose among.
        objective_is_loss: rather than a metric, which has no gradient.

    Raises:
        RequestError: such steps are asked for, and the method, the objective or the model has none.
    """
    asked = [f"train.{key} is {count}" for key in KEYS if (count := getattr(train, key))]
    available = FEEDBACK in optimizer.kinds
    if asked and not available:
        raise RequestError(f"{asked[0]}, and {method} takes no such steps; set it to 0, or use lozo-adam.")
    if asked and not objective_is_loss:
        raise RequestError(f"{asked[0]}, and train.objective {train.objective} has no gradient; leave one of them out.")
    fits = available and labelled and objective_is_loss and train.steps >= LEAST_STEPS
    defaults = (min(FIRST, train.steps // 20), min(LAST, train.steps // 5)) if fits else (0, 0)
    notices: list[str] = []
    if asked or any(defaults):
        try:
            optimizer.check_kind(FEEDBACK, loss)
        except RequestError as reason:
            if asked:
                raise
            defaults, notices = (0, 0), [f"there are no feedback steps: {reason}"]
    first, last = (n if (n := getattr(train, key)) is not None else m for key, m in zip(KEYS, defaults, strict=True))
    if first + last > train.steps:
        raise RequestError(f"{asked[0]}, and there are {train.steps} steps in all; lower it, or raise train.steps.")
    return replace(train, feedback_first=first, feedback_last=last), notices


def is_feedback(step: int, settings: TrainConfig) -> bool:
    """Whether a step is one along the error at the last hidden states."""
    first, last = settings.feedback_first or 0, settings.feedback_last or 0
    return step < first or step >= settings.steps - last
