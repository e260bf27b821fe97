"""Random rows with two labels, for methods that compare the scores of labels."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from tezo.optim.closures import RowOutputs
from tezo.tasks.examples import Example
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.objective import Encoded
from tezo_studies.bench.workload import NoWords, Work

LABELS = ("no", "yes")
"""The tokens 1 and 2 answer with them."""


def labelled_rows(work: Work, model: Any, count: int) -> Callable[[int], RowOutputs]:
    """Returns a function that makes the closure of the first rows of `count`, for `model`, a twin of the work's.

    The rows have the lengths of the batch, in turn.
    """
    encoded = _encoded(work.settings.lengths(), int(model.config.vocab_size), count)
    objective = CausalObjective(NoWords(), work.device, max(row.length for row in encoded), LABELS, model=model)
    objective.adapt(model, encoded)

    def closure(most: int) -> RowOutputs:
        made = objective.closure(model, objective.batches(encoded[:most]))
        assert isinstance(made, RowOutputs)
        return made

    return closure


def _encoded(lengths: Sequence[int], vocabulary: int, count: int) -> list[Encoded]:
    draw, rows = random.Random(0), []
    for number in range(count):
        prompt = tuple(draw.randrange(len(LABELS) + 1, vocabulary) for _ in range(lengths[number % len(lengths)]))
        answer = draw.randrange(len(LABELS))
        example = Example("", LABELS[answer], LABELS, answer, "the benchmark")
        sequences = tuple((*prompt, 1 + label) for label in range(len(LABELS)))
        rows.append(Encoded(sequences, (1,) * len(LABELS), example))
    return rows
