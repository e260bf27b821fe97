"""Objective of masked models, which answer by filling in a mask, and the base of objectives that read one text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tezo.system.errors import RequestError
from tezo.tasks.examples import Example
from tezo.tasks.objectives.batch import Batch
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.objectives.readers import logits_and_hidden_at, logits_at


class MaskedObjective(Objective):
    """An option's score is the logit of its word, a single token, at the mask; the loss is their cross-entropy."""

    side_cut = "the longer side of the mask, at its far end"

    def _prepare(self, model: Any) -> None:
        del model
        if self.tokenizer.mask_token is None:
            raise RequestError("model.kind is masked, but the tokenizer has no mask token; choose another model.")
        words = [self._word(option) for option in self.options]
        self._check_known(words, "data.label_words")
        self.words_O = torch.tensor(words, device=self.device)

    def _word(self, option: str) -> int:
        ids = self.tokenizer(option, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or ids[0] == self.tokenizer.unk_token_id:
            raise RequestError(
                f"data.label_words: {option.strip()!r} is not a single token of this model, and masked models need "
                "single tokens; choose another word."
            )
        return int(ids[0])

    def _encode(self, example: Example) -> Encoded:
        mask = self.tokenizer.mask_token_id
        before, after = example.prompt[: example.slot], example.prompt[example.slot :]
        ids = list(self.tokenizer(before + self.tokenizer.mask_token + after)["input_ids"])
        if ids.count(mask) != 1:
            raise RequestError(
                f"{example.where}: the text has the model's mask token {self.tokenizer.mask_token!r} in it; remove it."
            )
        over = len(ids) - self.max_length
        if over > 0:
            where = ids.index(mask)
            first, last = 1, len(ids) - 1  # between the first and the last special token
            cut = slice(first, first + over) if where - first > last - where else slice(last - over, last)
            if cut.start < first or cut.start <= where < cut.stop:
                raise RequestError(
                    f"{example.where}: the prompt cannot be cut to data.max_length {self.max_length}; raise it, or "
                    "remove that row."
                )
            del ids[cut]
            self.cuts.add(over, example.where)
        return Encoded((tuple(ids),), (1,), example)

    def asked(self, sequence: Sequence[int], answer: int) -> tuple[list[int], list[int]]:
        del answer
        mask = self.tokenizer.mask_token_id
        return [list(sequence).index(mask)], [mask]

    def scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        batch = batch.repeated(copies)
        return logits_at(model, batch.inputs(model.dtype), batch.reads_RU)[:, 0, self.words_O]

    def _position(self, part: Batch, first_S: Tensor, row_P: Tensor) -> Tensor:
        del first_S
        return part.reads_RU[row_P, 0]

    def scores_and_features(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, hidden = logits_and_hidden_at(model, batch.inputs(model.dtype), batch.reads_RU)
        return logits[:, 0, self.words_O], hidden[:, 0]


class WholeTextObjective(Objective):
    """An objective whose options are not part of the example's tokens."""

    side_cut = "the end of the text"

    def _encode(self, example: Example) -> Encoded:
        ids = list(self.tokenizer(example.prompt)["input_ids"])
        if not ids:
            raise RequestError(
                f"{example.where}: its text has no token, and the tokenizer adds none; leave the row out."
            )
        over = len(ids) - self.max_length
        if over > 0:
            end = len(ids) - (ids[-1] in self.tokenizer.all_special_ids)  # a special token at the end stays
            del ids[end - over : end]
            self.cuts.add(over, example.where)
        return Encoded((tuple(ids),), (0,), example)
