"""Completions of prompts: greedy, or sampled with random numbers that are a function of a seed and a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from tezo.numerics.random import normal
from tezo.progress.meter import tracked
from tezo.tasks.objectives import Encoded, Objective

_GREEDY: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
}
"""Options of greedy decoding; they override the model's own generation_config (min_new_tokens its min_length)."""


@dataclass(frozen=True)
class Sampling:
    """Sampling of completions, the same for every model that is asked with the same random numbers.

    The next token is argmax(logits / temperature + G), where the entries of G are independent standard Gumbel numbers:
    a sample of softmax(logits / temperature). G is a function of seed, step, row and place in the completion alone.

    Attributes:
        temperature: above 0.
        seed: seed of the run.
        step: step of the run, or -1 for evaluations.
    """

    temperature: float
    seed: int
    step: int

    def noise(self, row: int, place: int, size: int) -> Tensor:
        """(size,): Gumbel numbers for the token at `place` of the completion of a row, float64."""
        name = f"completion of row {row}, token {place}"
        uniform = torch.special.ndtr(normal((size,), seed=self.seed, step=self.step, name=name, role="gumbel"))
        return -torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16)))


class _Noisy(LogitsProcessor):  # type: ignore[misc]
    """Adds the noise of `Sampling` to the logits of rows; the most likely token is then a sample."""

    def __init__(self, sampling: Sampling, rows: Sequence[int], prompt: int) -> None:
        self._sampling, self._rows, self._prompt = sampling, rows, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self._prompt
        noise = torch.stack([self._sampling.noise(row, place, scores.shape[1]) for row in self._rows])
        return scores.float() / self._sampling.temperature + noise.to(scores.device, torch.float32)


def completions(
    model: Any,
    objective: Objective,
    encoded: Sequence[Encoded],
    batch_size: int,
    max_new_tokens: int,
    sampling: Sampling | None = None,
) -> list[str]:
    """The completion of each prompt, in order, without surrounding spaces.

    Args:
        model: a causal model.
        objective: its objective.
        encoded: examples; their answers are not looked at.
        batch_size: examples per batch.
        max_new_tokens: maximum length of a completion in tokens.
        sampling: None: greedy.
    """
    found = [""] * len(encoded)
    for part in by_length(encoded, batch_size):
        for i, text in zip(part, _generate(model, objective, encoded, part, max_new_tokens, sampling), strict=True):
            found[i] = text
    return found


def _generate(
    model: Any,
    objective: Objective,
    encoded: Sequence[Encoded],
    part: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling | None,
) -> list[str]:
    tokenizer, rows = objective.tokenizer, [encoded[i] for i in part]
    prompts = [e.sequences[0][: len(e.sequences[0]) - e.answers[0]] for e in rows]
    length = max(map(len, prompts))
    padded = [(tokenizer.pad_token_id,) * (length - len(p)) + tuple(p) for p in prompts]
    mask = [[0] * (length - len(p)) + [1] * len(p) for p in prompts]
    one_line = not rows[0].example.ends
    more: dict[str, Any] = {"stop_strings": ["\n"], "tokenizer": tokenizer} if one_line else {}
    if sampling is not None:
        more["logits_processor"] = LogitsProcessorList([_Noisy(sampling, part, length)])
    output = model.generate(
        input_ids=torch.tensor(padded, device=objective.device),
        attention_mask=torch.tensor(mask, device=objective.device),
        max_new_tokens=max_new_tokens,
        **_GREEDY,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )
    texts = [str(text) for text in tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)]
    return [(text.partition("\n")[0] if one_line else text).strip() for text in texts]


def by_length(encoded: Sequence[Encoded], batch_size: int) -> Iterator[list[int]]:
    """Indices of the examples in batches of similar length, which keeps padding short."""
    order = sorted(range(len(encoded)), key=lambda i: encoded[i].length)
    parts = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    yield from tracked(parts, sizes=map(len, parts))
