"""Which rows a run takes steps on, looks at, and measures open settings by."""

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
from tezo.optim.learning_rate import TRIAL_STEPS
from tezo.tasks.objectives.closure import BatchClosure
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.rewards import Reward, answered
from tezo.tasks.rows import Format
from tezo.training.recipe import Config, TrainConfig
from tezo.training.resolution import Rows
from tezo.training.schedule import BatchSampler, parts

BASIS_ROWS = 64
"""Training rows that a basis which sees the data looks at: as many as two steps of 16 rows pass."""

LOOKED_AT_ONCE = 32
"""Rows of a pass in torch where an engine runs the others, so that a look takes little more memory than they do."""

OWN_ANSWERS = 8
"""Prompts whose answers by the untuned model tell the scale of a reward, at most."""

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
        self.engine = objective.evaluator.engine
        self.share_directions = objective.evaluator.shared_tokens > 0 or self.engine is not None

    def own_answers(self) -> Callable[[], float] | None:
        if self._reward is None:
            return None
        rows = self._train[:OWN_ANSWERS]
        own = answered(rows, self._reward.own_answers(self._model, self._objective, rows, len(rows)))
        if not own:
            return None
        closure = self._closure(own)
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
    looking = objective.in_torch()
    most = settings.most_rows if loaded.engine is None else LOOKED_AT_ONCE
    return looking.closure(loaded.model, looking.batches([train[i] for i in numbers], most), stepped=len(own))
