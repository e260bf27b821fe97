"""Which rows each step, refresh and evaluation has, and the schedule of rates and feedback steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tezo.directions.bases.basis import Passes
from tezo.directions.outputs import Outputs
from tezo.directions.products import float32_on_emulating_cpu
from tezo.directions.random import permutation
from tezo.methods import method
from tezo.models.loading import LoadedModel
from tezo.optim.estimators.estimate import FEEDBACK
from tezo.tasks.objectives.closure import BatchClosure
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.rows import Format
from tezo.training.settings import Config, TrainConfig


class BatchSampler:
    """Rows of each step's batch, as a function of (seed, step): epoch after epoch, each in a random order of its own.

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


def looked_and_stepped(
    config: Config, form: Format, num_rows: int, *, judged: bool
) -> tuple[Sequence[int], Sequence[int]]:
    """(Training rows that looks have, those that steps have): all, or two parts where outputs are kept.

    What a look finds holds for its rows better than for others. Of rows with shared labels it is known how much; but
    not how much better than others they have become by earlier steps, which dev rows must tell (`judged`).
    """
    if (form.options and judged) or not method(config.method.name).takes_outputs:
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
    step: int,
    count: int,
) -> BatchClosure:
    """The rows that a basis looks at before a step, at most `count`: the step's own first, others in turn."""
    own = [row for row in taken.rows(step) if row in looked][:count]
    apart = {*own}
    others = [row for row in looked if row not in apart]
    left = min(count - len(own), len(others))
    numbers = own + [others[i % len(others)] for i in range(step * left, (step + 1) * left)]
    looking = objective.shown()
    most = settings.most_rows if loaded.engine is None else LOOKED_AT_ONCE
    return looking.closure(loaded.model, looking.batches([train[i] for i in numbers], most), stepped=len(own))
