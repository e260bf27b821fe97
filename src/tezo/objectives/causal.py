"""Answering by continuing a text."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from tezo.errors import RequestError
from tezo.objectives.base import Batch, Encoded, Objective
from tezo.objectives.logits import logits_at
from tezo.tasks import Example


class CausalObjective(Objective):
    """The likelihood of the answer after the prompt.

    Free text: the loss is the mean negative log-likelihood of the answer's tokens. With options: each
    option's score is the mean log-probability of its tokens, and the loss the cross-entropy over scores.
    """

    side_cut = "the beginning of the prompt"

    def encode(self, example: Example) -> Encoded:
        texts = example.options or (example.answer,)
        prompt = self._tokens(example.prompt, example)
        sequences, answers = [], []
        for text in texts:
            whole = self._tokens(example.prompt + text, example)
            if whole[: len(prompt)] != prompt:  # the tokenizer joins them: take the answer by itself
                whole = prompt + list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            if not example.options and self.tokenizer.eos_token_id is not None:
                whole = [*whole, int(self.tokenizer.eos_token_id)]
            sequences.append(whole)
            answers.append(len(whole) - len(prompt))
        over = max(0, max(len(s) for s in sequences) - self.max_length)
        if over:
            sequences = [self._cut(s, over, len(prompt), example) for s in sequences]
            self.cuts.add(over, example.where)
        if len(prompt) == 0 or (example.answer and min(answers) == 0):
            raise RequestError(f"{example.where}: the prompt or the answer is empty; fill in or leave out that row.")
        return Encoded(tuple(tuple(s) for s in sequences), tuple(answers), example)

    def _tokens(self, text: str, example: Example) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=not example.chat)["input_ids"])

    def _cut(self, sequence: list[int], over: int, prompt: int, example: Example) -> list[int]:
        first = 1 if sequence[0] == self.tokenizer.bos_token_id else 0
        if first + over >= prompt:
            raise RequestError(
                f"{example.where}: the answer alone has more tokens than data.max_length {self.max_length} allows; "
                "raise it or leave out that row."
            )
        return sequence[:first] + sequence[first + over :]

    def asked(self, sequence: Sequence[int], answer: int) -> tuple[list[int], list[int]]:
        start = len(sequence) - answer
        return list(range(start - 1, len(sequence) - 1)), list(sequence[start:])

    def log_probs(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """(log-probabilities of the answer tokens, argmax hits), both (S, K), zero where not valid."""
        inputs = {"input_ids": batch.input_ids_SL, "attention_mask": batch.attention_mask_SL}
        logits = logits_at(model, inputs, batch.positions_SK)
        chosen = -functional.cross_entropy(logits.transpose(1, 2), batch.tokens_SK, reduction="none")
        hits = logits.argmax(-1) == batch.tokens_SK
        return chosen * batch.valid_SK, hits & batch.valid_SK

    def scores(self, model: Any, batch: Batch) -> Tensor:
        chosen, _ = self.log_probs(model, batch)
        rows, options = int(batch.row_S[-1]) + 1, int(batch.option_S.max()) + 1
        table = chosen.new_full((rows, options), float("-inf"))
        table[batch.row_S, batch.option_S] = chosen.sum(1) / batch.valid_SK.sum(1)
        return table

    def total(self, model: Any, batch: Batch) -> tuple[Tensor, int]:
        if batch.labels_B is not None:
            scores = self.scores(model, batch)
            return functional.cross_entropy(scores, batch.labels_B, reduction="sum"), len(batch.labels_B)
        chosen, _ = self.log_probs(model, batch)
        return -chosen.sum(), int(batch.valid_SK.sum())
