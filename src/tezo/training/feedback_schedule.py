"""Which steps of a run are feedback steps: the first ones and the last ones."""

from dataclasses import replace

from tezo.errors import RequestError
from tezo.estimators.estimate import Closure
from tezo.estimators.feedback import FeedbackOptimizer
from tezo.optim.methods import Tuner
from tezo.training.recipe import Config, TrainConfig

FIRST, LAST = 15, 60
"""Of a run, as in the study of docs/experiments.md; no more than a twentieth and a fifth of its steps."""
LEAST_STEPS = 100
"""Of a run that has any by default: a stretch of a few would not be worth the passes that it begins with."""
KEYS = ("feedback_first", "feedback_last")


def settle_feedback(
    config: Config, optimizer: Tuner, closure: Closure, *, labelled: bool, objective_is_loss: bool
) -> tuple[Config, list[str]]:
    """(the configuration with as many feedback steps as there are to be, what the user should know).

    What is left open is `FIRST` and `LAST` where the method takes such steps, the rows have labels, as the study's
    have, and there are `LEAST_STEPS`; elsewhere none. Answers in free text are left out for the memory that a graph of
    the head takes there.

    Args:
        config: with numbers, or None for what is left open.
        optimizer: on the model.
        closure: the loss on some training rows.
        labelled: whether all rows have options to choose among.
        objective_is_loss: rather than a metric, which has no gradient.

    Raises:
        RequestError: such steps are asked for, and the method, the objective or the model has none.
    """
    train = config.train
    asked = [f"train.{key} is {count}" for key in KEYS if (count := getattr(train, key))]
    takes = isinstance(optimizer, FeedbackOptimizer)
    if asked and not takes:
        raise RequestError(f"{asked[0]}, and {config.method.name} takes no such steps; set it to 0, or use lozo-adam.")
    if asked and not objective_is_loss:
        raise RequestError(f"{asked[0]}, and train.objective {train.objective} has no gradient; leave one of them out.")
    fits = takes and labelled and objective_is_loss and train.steps >= LEAST_STEPS
    usual = (min(FIRST, train.steps // 20), min(LAST, train.steps // 5)) if fits else (0, 0)
    notices: list[str] = []
    if isinstance(optimizer, FeedbackOptimizer) and (asked or any(usual)):
        try:
            optimizer.find_writers(closure)
        except RequestError as reason:
            if asked:
                raise
            usual, notices = (0, 0), [f"there are no feedback steps: {reason}"]
    first, last = (n if (n := getattr(train, key)) is not None else m for key, m in zip(KEYS, usual, strict=True))
    if first + last > train.steps:
        raise RequestError(f"{asked[0]}, and there are {train.steps} steps in all; lower it, or raise train.steps.")
    return replace(config, train=replace(train, feedback_first=first, feedback_last=last)), notices


def is_feedback(step: int, settings: TrainConfig) -> bool:
    """Whether a step is one along the error at the last hidden states."""
    first, last = settings.feedback_first or 0, settings.feedback_last or 0
    return step < first or step >= settings.steps - last
