"""Completions of prompts, greedy or sampled."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from tezo.directions.random import normal, seed_of
from tezo.forward.engine import Continuing
from tezo.system.progress import tracked
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.ends import text_after
from tezo.tasks.objectives.evaluators import base_of
from tezo.tasks.objectives.objective import Encoded, Objective

LEARNT = 1.0
"""Temperature of answers that are learnt from: they are drawn by the probabilities whose gradient is taken."""

Turn = tuple[Sequence[int], Sequence[int]]
"""(the tokens of a prompt, those that a model wrote to it)."""


@dataclass(frozen=True)
class Sampling:
    """Sampling of completions, the same for every model that is asked with the same random numbers.

    The next token is argmax(logits / temperature + G), where the entries of G are independent standard Gumbel numbers:
    a sample of softmax(logits / temperature). G is a function of seed, step, row and place in the completion alone.

    Attributes:
        temperature: above 0.
        seed: seed of the run.
        step: step of the run, or -1 for evaluations.
        first: number of the first row.
    """

    temperature: float
    seed: int
    step: int
    first: int = 0

    def noise(self, row: int, place: int, size: int) -> Tensor:
        """Returns Gumbel numbers for the token at `place` of the completion of a row, (size,) in float64."""
        name = f"completion of row {self.first + row}, token {place}"
        uniform = torch.special.ndtr(normal((size,), seed=self.seed, step=self.step, name=name, role="gumbel"))
        return -torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16)))

    def seed_of(self, row: int) -> int:
        """Returns a seed for the completion of a row, for an engine that draws its random numbers itself."""
        return seed_of(self.seed, self.step, f"completion of row {self.first + row}")

    def of(self, wanted: Continuing, rows: Sequence[int]) -> Continuing:
        """Returns how the prompts of these rows are continued, sampled."""
        return replace(
            wanted,
            noisy=lambda logits, at, place: self.noisy(logits, [rows[i] for i in at], place),
            temperature=self.temperature,
            seeds=[self.seed_of(i) for i in rows],
        )

    def noisy(self, scores: Tensor, rows: Sequence[int], place: int) -> Tensor:
        """Returns the logits of rows over the temperature, with noise: the most likely token is then a sample."""
        noise = torch.stack([self.noise(row, place, scores.shape[1]) for row in rows])
        return scores.float() / self.temperature + noise.to(scores.device, torch.float32)


def completions(
    model: Any,
    objective: Objective,
    encoded: Sequence[Encoded],
    batch_size: int,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    heard: Callable[[str], None] | None = None,
) -> list[str]:
    """Returns the completion of each prompt, in order, up to its end; see `continuations` and `texts_of`.

    `heard` is called with each new piece of the completion of a single prompt.
    """
    listening = None if heard is None else _Pieces(objective, encoded[0], heard).add
    (tokens,) = continuations(model, objective, encoded, batch_size, max_new_tokens, sampling, 1, listening)
    return texts_of(objective, encoded, tokens)


class _Pieces:
    """The text of tokens that come one after another, in pieces that are whole characters."""

    def __init__(self, objective: Objective, encoded: Encoded, heard: Callable[[str], None]) -> None:
        assert isinstance(objective, CausalObjective)
        self._ends, self._tokenizer = objective.ends.marks, objective.tokenizer
        self._encoded, self._heard = encoded, heard
        self._tokens: list[int] = []
        self._text = ""

    def add(self, token: int) -> None:
        """Takes in the next token."""
        if token in self._ends:
            return
        self._tokens.append(token)
        text = text_after(self._tokenizer, self._encoded.prompt, self._tokens, special=False)
        if not self._encoded.example.ends:
            text = text.partition("\n")[0]
        if text.startswith(self._text) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._heard(text[len(self._text) :])
            self._text = text


def continuations(
    model: Any,
    objective: Objective,
    encoded: Sequence[Encoded],
    batch_size: int,
    max_new_tokens: int,
    sampling: Sampling | None,
    copies: int,
    heard: Callable[[int], None] | None = None,
) -> list[list[list[int]]]:
    """Returns the tokens that each of `copies` models, which hooks may perturb differently, writes after each prompt.

    The last of them ends a completion, unless it was cut at `max_new_tokens`. Without `sampling` they are
    greedy; with it, all models have the same random numbers. `heard` is called with each token of a single prompt.
    """
    assert isinstance(objective, CausalObjective)
    found: list[list[list[int]]] = [[[]] * len(encoded) for _ in range(copies)]
    ends = objective.ends.marks
    for part in by_length(encoded, batch_size):
        for places in written_together(model, [encoded[i].prompt for i in part]):
            alike = [part[place] for place in places]
            wanted = Continuing(max_new_tokens, sorted(ends), not encoded[alike[0]].example.ends, heard=heard)
            if sampling is not None:
                wanted = sampling.of(wanted, alike)
            prompts = [encoded[i].prompt for i in alike]
            every = objective.evaluator.continuations(model, objective.tokenizer, prompts, wanted, copies)
            for texts, rows in zip(found, every, strict=True):
                for i, tokens in zip(alike, rows, strict=True):
                    ended = to_the_end(tokens, ends)
                    texts[i] = to_the_line(objective, encoded[i], ended) if wanted.one_line else ended
    return found


def written_together(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the indices of prompts in groups, each of which a model can continue in one batch.

    Prompts of several lengths are padded, but where the model reads padding into its state, or counts it as positions.
    """
    base = base_of(model)
    pads = not getattr(base, "_is_stateful", False) and "position_ids" in signature(base.forward).parameters
    groups: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(0 if pads else len(prompt), []).append(i)
    return [*groups.values()]


def to_the_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """Returns the tokens up to the first that ends a completion, which is the last then."""
    end = next((place for place, token in enumerate(tokens, 1) if token in ends), None)
    return list(tokens[:end])


def to_the_line(objective: CausalObjective, encoded: Encoded, tokens: Sequence[int]) -> list[int]:
    """Returns the tokens up to the first with which their text has a line break: a batch writes on until all end."""

    def has_break(count: int) -> bool:
        return "\n" in text_after(objective.tokenizer, encoded.prompt, tokens[:count], special=False)

    return list(tokens[: 1 + bisect_left(range(1, len(tokens)), True, key=has_break)])


def texts_of(objective: Objective, encoded: Sequence[Encoded], continued: Sequence[Sequence[int]]) -> list[str]:
    """Returns the texts of the tokens of `continuations`, without their ends.

    A completion of text is the exact text after the prompt, including spaces. Messages, and answers of one line, are
    without surrounding spaces, which templates and tasks put there. The objective counts those that were cut.
    """
    assert isinstance(objective, CausalObjective)
    texts = []
    for row, tokens in zip(encoded, continued, strict=True):
        ended, one_line = bool(tokens) and tokens[-1] in objective.ends.marks, not row.example.ends
        text = text_after(objective.tokenizer, row.prompt, tokens[: len(tokens) - ended], special=False)
        if not ended and not (one_line and "\n" in text):
            objective.unfinished.add(len(tokens), row.example.where)
        text = text.partition("\n")[0] if one_line else text
        texts.append(text.strip() if one_line or row.example.chat else text)
    objective.written += len(texts)
    return texts


def by_length(encoded: Sequence[Encoded], batch_size: int) -> Iterator[list[int]]:
    """Yields indices of the examples in batches of similar length, which keeps padding short."""
    order = sorted(range(len(encoded)), key=lambda i: encoded[i].length)
    parts = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    yield from tracked(parts, sizes=map(len, parts))
