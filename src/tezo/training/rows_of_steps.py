"""Which rows each step, refresh, evaluation and measured setting has, and the schedule of rates and feedback steps."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tezo.directions.bases.basis import Passes
from tezo.directions.outputs import Outputs
from tezo.directions.products import float32_on_emulating_cpu
from tezo.directions.random import permutation
from tezo.methods import method
from tezo.models.loading import LoadedModel
from tezo.optim.closures import Closure, RowLosses
from tezo.optim.estimators.estimate import FEEDBACK
from tezo.optim.learning_rate import TRIAL_STEPS
from tezo.tasks.objectives.closure import BatchClosure
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.rewards import Reward, answered
from tezo.training.settings import Config, TrainConfig


class BatchSampler:
    """Rows of each step's batch, as a function of (seed, step): epoch after epoch, each in another random order.

    Args:
        rows: numbers of the training rows that steps have.
        batch_size: rows of a batch, which may go on into the next epoch.
        seed: of the orders.
        whole: whether an epoch ends where fewer rows than a batch are left, so that no batch has a row twice.
    """

    def __init__(self, rows: Sequence[int], batch_size: int, seed: int, *, whole: bool = False) -> None:
        self.num_rows = len(rows)
        self._epoch_rows = len(rows) // batch_size * batch_size if whole and batch_size <= len(rows) else len(rows)
        self._rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, list[int]] = {}

    def rows(self, step: int) -> list[int]:
        """Indices of the rows of that step's batch."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = {position // self._epoch_rows for position in positions}
        # drawing the order of a large data set at every step would take too long
        self._orders = {epoch: self._orders.get(epoch) or self._order(epoch) for epoch in epochs}
        return [self._orders[position // self._epoch_rows][position % self._epoch_rows] for position in positions]

    def _order(self, epoch: int) -> list[int]:
        order = permutation(self.num_rows, seed=self.seed, step=epoch, name="epoch")
        return [self._rows[place] for place in order]


LOOKED = 0.6
"""Part of the training rows that looks have where steps have the others. Our choice."""


def parts(num_rows: int, seed: int) -> tuple[list[int], list[int]]:
    """Returns (rows that looks have, rows that steps have), no row in both unless it is the only one.

    What a look finds holds for its rows better than for others, and a step has to choose what holds for others.
    """
    order = permutation(num_rows, seed=seed, step=0, name="parts")
    looked = round(LOOKED * num_rows)
    return order[:looked] or order, order[looked:] or order


def lr_factor(step: int, settings: TrainConfig) -> float:
    """Factor of the learning rate at a step, by the schedule."""
    if settings.schedule in (None, "constant"):
        return 1.0
    part = step / max(1, settings.num_steps)
    return 1.0 - part if settings.schedule == "linear" else (1 + math.cos(math.pi * part)) / 2


def interval(every: int | None, settings: TrainConfig) -> int:
    """Steps between evaluations, or checkpoints: ten a run unless `every` says; 0 is never."""
    return max(1, settings.num_steps // 10) if every is None else every


def evaluates(steps: int, settings: TrainConfig) -> bool:
    """Whether a run evaluates its dev rows after so many steps.

    Every `interval`, after the last step, and after the feedback steps at the start if they may be undone.
    """
    every = interval(settings.eval_every, settings)
    return every > 0 and (steps % every == 0 or steps in (settings.num_steps, judged_feedback(settings)))


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


def is_feedback(step: int, settings: TrainConfig) -> bool:
    """Whether a step is a feedback step; `settings` has numbers for both keys, `step` counts from 0."""
    first, last = settings.feedback_first or 0, settings.feedback_last or 0
    return step < first or settings.num_steps - last <= step < settings.num_steps


def planned(step: int, settings: TrainConfig, first: str) -> tuple[str, float]:
    """(the rule of a step, the factor of its learning rate), of an optimizer whose first rule is `first`."""
    if not is_feedback(step, settings):
        return first, 1.0
    return FEEDBACK, EARLY_RATE if step < (settings.feedback_first or 0) else 1.0


def judged_feedback(settings: TrainConfig) -> int:
    """Number of feedback steps at the start that a run with dev rows undoes if they raise the dev loss; 0: none."""
    return (settings.feedback_first or 0) if settings.guard and settings.minimises_loss else 0


BASIS_ROWS = 64
"""Training rows that a basis which sees the data looks at: as many as two steps of 16 rows pass."""

LOOKED_AT_ONCE = 32
"""Rows of a pass of a look where an engine runs the others, so that it takes little more memory than they do."""


@dataclass(frozen=True)
class HeldOutRows(BatchClosure):
    """Dev rows by which steps are shortened; what an evaluation measures there the step after it does not measure."""

    _measured: list[Outputs] = field(default_factory=list)

    def evaluated(self) -> Outputs:
        """Returns the outputs of the model as it is, and keeps them for the next step.

        They are measured before a step in any case, since its draw may round the parameters anew: so a run that goes
        on from here has them to the bit.
        """
        if not self._measured:
            with torch.no_grad(), float32_on_emulating_cpu(self.model):
                self._measured.extend(self.outputs_of(1))
        return self._measured[0]

    def outputs(self, like: Outputs | None = None) -> Outputs:
        return self._measured[0] if like is None and self._measured else self.outputs_of(1, like)[0]

    def forget(self) -> None:
        """Called whenever the parameters have changed."""
        self._measured.clear()


def basis_passes(loaded: LoadedModel, objective: Objective, train: Sequence[Encoded], seed: int) -> Passes:
    """Step -> forward passes over `BASIS_ROWS` training rows, or all where there are fewer; others at each step."""

    def passes(refresh_step: int) -> None:
        chosen = permutation(len(train), seed=seed, step=refresh_step, name="basis")[:BASIS_ROWS]
        rows = objective.in_torch()
        rows.closure(loaded.model, rows.batches([train[i] for i in chosen])).losses(1)

    return passes


def looked_and_stepped(config: Config, num_rows: int, *, judged: bool) -> tuple[Sequence[int], Sequence[int]]:
    """(Training rows that looks have, those that steps have): all, or two parts where outputs are kept.

    What a look finds holds for its rows better than for others. How much better, and how much better than others they
    have become by earlier steps, dev rows must tell (`judged`).
    """
    if judged or not method(config.method.name).takes_outputs:
        return range(num_rows), range(num_rows)
    return parts(num_rows, config.train.seed)


def sampler(config: Config, stepped: Sequence[int]) -> BatchSampler:
    """Which of these rows a step takes; none twice where outputs are kept, since a look leaves out each but once."""
    whole = method(config.method.name).takes_outputs
    return BatchSampler(stepped, config.train.rows_per_step, config.train.seed, whole=whole)


def rows_to_look_at(
    loaded: LoadedModel,
    objective: Objective,
    train: Sequence[Encoded],
    settings: TrainConfig,
    looked: Sequence[int],
    taken: BatchSampler,
    judges: Sequence[Encoded],
    step: int,
    count: int,
) -> BatchClosure:
    """The rows that a basis looks at before a step, at most `count`: those of the step first, others in turn.

    Of `judges`, which nothing is fitted to, it looks at as many.
    """
    first = [row for row in taken.rows(step) if row in looked][:count]
    apart = {*first}
    others = [row for row in looked if row not in apart]
    left = min(count - len(first), len(others))
    numbers = first + [others[i % len(others)] for i in range(step * left, (step + 1) * left)]
    looking = objective.shown()
    most = settings.most_rows if loaded.engine is None else LOOKED_AT_ONCE
    held_out = looking.closure(loaded.model, looking.batches(judges[:count], most)) if judges else None
    batches = looking.batches([train[i] for i in numbers], most)
    return looking.closure(loaded.model, batches, stepped=len(first), held_out=held_out)


class Rows(ABC):
    """The training rows of a request, as open settings are measured on them.

    Attributes:
        share_directions: whether the rows of a batch must share directions, such as where a pass has inputs for all of
            them together.
        engine: name of the engine that computes their losses; None: torch does.
        held_out: number of rows that learning rates are compared on; 0: there are none.
        labels: number of labels that the rows share; 0: they share none, or it is not known.
    """

    share_directions: bool
    engine: str | None = None
    held_out: int
    labels: int = 0

    @abstractmethod
    def step(self, step: int, *, per_example: bool) -> Closure:
        """Returns the closure of that step: the loss, or (rows,) if directions are per example."""

    @abstractmethod
    def losses(self, step: int, *, per_example: bool) -> Callable[[], Tensor]:
        """Returns what `measure_scale` evaluates on the rows of that step."""

    @abstractmethod
    def few(self) -> Closure:
        """Returns what a step with directions for each row evaluates on two rows."""

    @abstractmethod
    def held_out_losses(self) -> Sequence[float]:
        """Computes the losses of the held-out rows, which the first steps do not see."""

    def answers_of_model(self) -> Callable[[], float] | None:
        """Has the model write answers; returns their loss at the parameters of each call. None: it writes nothing."""
        return None


class ClosureRows(Rows):
    """The rows of a training loop in Python.

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


ANSWERS = 8
"""Most prompts whose answers by the untuned model rho is measured on, for a reward."""

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
        self.labels = len(objective.options or ())
        self.engine = objective.evaluator.engine
        self.share_directions = objective.evaluator.shared_tokens > 0 or self.engine is not None

    def answers_of_model(self) -> Callable[[], float] | None:
        if self._reward is None:
            return None
        rows = self._train[:ANSWERS]
        answers = answered(rows, self._reward.own_answers(self._model, self._objective, rows, len(rows)))
        if not answers:
            return None
        closure = self._closure(answers)
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
