"""What happens when, as functions of the step alone: batches, learning rates, evaluations.

Which steps of a run are feedback steps, a number at the start and a number at the end, and at what learning rate.
"""

import math
from dataclasses import replace
from typing import Any

from tezo.directions.random import permutation
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.estimators.estimate import FEEDBACK, Closure
from tezo.system.errors import RequestError
from tezo.system.progress import FEEDBACK as LOOKING
from tezo.system.progress import current
from tezo.training.recipe import TrainConfig


class BatchSampler:
    """Rows of each step's batch, as a function of (seed, step): epoch after epoch, each in a random order of its own.

    Args:
        num_rows: of the training data.
        batch_size: rows of a batch, which may go on into the next epoch.
        seed: of the orders.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, list[int]] = {}

    def rows(self, step: int) -> list[int]:
        """Indices of the rows of that step's batch."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = {position // self.num_rows for position in positions}
        # drawing the order of a large data set at every step would take too long
        self._orders = {epoch: self._orders.get(epoch) or self._order(epoch) for epoch in epochs}
        return [self._orders[position // self.num_rows][position % self.num_rows] for position in positions]

    def _order(self, epoch: int) -> list[int]:
        return permutation(self.num_rows, seed=self.seed, step=epoch, name="epoch")


def lr_factor(settings: TrainConfig) -> Any:
    """Step -> factor of the learning rate: that of the schedule, times that of feedback steps."""

    def factor(step: int) -> float:
        return of_schedule(step) * rate_factor(step, settings)

    def of_schedule(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        left = (step - settings.warmup_steps) / max(1, settings.num_steps - settings.warmup_steps)
        if settings.schedule == "linear":
            return 1.0 - left
        return (1 + math.cos(math.pi * left)) / 2 if settings.schedule == "cosine" else 1.0

    return factor


def interval(every: int | None, settings: TrainConfig) -> int:
    """Steps between evaluations, or checkpoints: ten a run unless `every` says; 0 is never."""
    return max(1, settings.num_steps // 10) if every is None else every


def evaluation_steps(settings: TrainConfig) -> frozenset[int]:
    """After how many steps a run evaluates its dev rows.

    Every `interval`, after the last step, and after the feedback steps at the start if they may be undone.
    """
    every, steps = interval(settings.eval_every, settings), settings.num_steps
    return frozenset((*range(0, steps, every), steps, judged_feedback(settings))) if every else frozenset()


FIRST, LAST = 15, 60
"""Default numbers of feedback steps at the start and at the end, from the study in docs/experiments.md. They are at
most 5 % and 20 % of the steps."""
EARLY_RATE = 3.0
"""Factor of the learning rate of feedback steps at the start, over that of those at the end. Far from an optimum their
bias matters less than how far they get. Chosen by trials on dev rows of TREC (encoder) and completions (decoder), which
are not committed; docs/experiments.md has the decoder's study with it."""
LEAST_STEPS = 100
"""Shorter runs have no feedback steps by default: a few steps are not worth the extra passes before them."""
KEYS = ("feedback_first", "feedback_last")


def default_counts(steps: int) -> tuple[int, int]:
    """The default numbers of feedback steps at the start and at the end of a run of so many steps."""
    return (min(FIRST, steps // 20), min(LAST, steps // 5)) if steps >= LEAST_STEPS else (0, 0)


def resolve_feedback(
    train: TrainConfig, method: str, optimizer: BaseOptimizer, loss: Closure | None
) -> tuple[TrainConfig, list[str]]:
    """Replaces None in train.feedback_first and train.feedback_last; returns (settings, notices for the user).

    They become `default_counts` if the method takes feedback steps and the objective is the loss; otherwise 0.

    Args:
        train: settings with numbers or None for the two keys.
        method: name of the method.
        optimizer: optimizer on the model.
        loss: the loss on some training rows; None: no pass is made, and the model is assumed to support them.

    Raises:
        RequestError: feedback steps are set, but the method, the objective or the model does not support them.
    """
    asked = [f"train.{key} is {count}" for key in KEYS if (count := getattr(train, key))]
    available = FEEDBACK in optimizer.rules
    if asked and not available:
        raise RequestError(f"{asked[0]}, and {method} takes no feedback steps; set it to 0, or use lozo-adam.")
    if asked and not train.minimises_loss:
        raise RequestError(f"{asked[0]}, and train.objective {train.objective} has no gradient; leave one of them out.")
    defaults = default_counts(train.num_steps) if available and train.minimises_loss else (0, 0)
    notices: list[str] = []
    if loss is not None and (
        asked or any(default for key, default in zip(KEYS, defaults, strict=True) if getattr(train, key) is None)
    ):
        try:
            with current().phase(LOOKING):
                optimizer.check_rule(FEEDBACK, loss)
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


def rate_factor(step: int, settings: TrainConfig) -> float:
    """Factor of the learning rate of a step beside the schedule's; `settings` and `step` as in `is_feedback`."""
    return EARLY_RATE if step < (settings.feedback_first or 0) else 1.0


def judged_feedback(settings: TrainConfig) -> int:
    """Number of feedback steps at the start that a run with dev rows undoes if they raise the dev loss; 0: none."""
    return (settings.feedback_first or 0) if settings.guard and settings.minimises_loss else 0
