"""In-context learning: rows with their answers before the question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tezo.errors import RequestError
from tezo.numerics.random import permutation
from tezo.tasks.answer_metrics import Measure
from tezo.tasks.examples import Example, Row
from tezo.tasks.row_format import Format

JOINT = "\n\n"
"""Separator of demonstrations, as in MeZO and later papers."""


@dataclass(frozen=True)
class Demonstrated(Format):
    """A format whose prompts begin with `count` rows of `pool` and their answers, drawn separately for every row.

    A row is never a demonstration for itself.
    """

    shape = "task"
    inner: Format
    pool: Sequence[Row]
    count: int
    seed: int

    @property
    def labels(self) -> tuple[str, ...]:
        return self.inner.labels

    @property
    def options(self) -> tuple[str, ...]:
        return self.inner.options

    @property
    def measures(self) -> tuple[Measure, ...]:
        return self.inner.measures

    @property
    def max_new_tokens(self) -> int | None:
        return self.inner.max_new_tokens

    def example(self, row: Row, *, answered: bool = True) -> Example:
        question = self.inner.example(row, answered=answered)
        if question.chat:
            raise RequestError(f"shots is {self.count}, but conversations cannot be shown in a prompt; leave it out.")
        others = [i for i in permutation(len(self.pool), seed=self.seed, step=0, name=f"shots.{row.where}")
                  if self.pool[i].fields != row.fields][: self.count]  # fmt: skip
        if len(others) < self.count:
            raise RequestError(f"shots is {self.count}, but there are {len(others)} other rows to show; lower it.")
        examples = [self.inner.example(self.pool[i]) for i in others]
        demonstrations = [(example.prompt + example.answer).strip() for example in examples]
        return replace(question, prompt=JOINT.join([*demonstrations, question.prompt]))
