"""The objective of masked models: they answer by filling in a mask."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tezo.system.errors import RequestError
from tezo.tasks.examples import Example
from tezo.tasks.objectives.batch import Batch
from tezo.tasks.objectives.evaluators import Evaluator, logits_and_hidden_at, logits_at
from tezo.tasks.objectives.objective import Encoded, Objective


class MaskedObjective(Objective):
    """An option's score is the logit of its word, a single token, at the mask; the loss is their cross-entropy."""

    side_cut = "the longer side of the mask, at its far end"

    def __init__(
        self, tokenizer: Any, device: torch.device, max_length: int, options: Sequence[str], *, model: Any = None
    ) -> None:
        super().__init__(tokenizer, device, max_length, options, model=model)
        if tokenizer.mask_token is None:
            raise RequestError("model.kind is masked, but the tokenizer has no mask token; choose another model.")
        words = [self._word(option) for option in options]
        self._check_known(words, "data.label_words")
        self.evaluator = MaskedInTorch(torch.tensor(words, device=device))

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


class MaskedInTorch(Evaluator):
    """Masked models: an option's score is the logit of its word at the mask, the one position that is read.

    Args:
        words_O: int64, the token of each option.
    """

    def __init__(self, words_O: Tensor) -> None:
        self.words_O = words_O

    def option_scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        (rows,) = batch.passes
        logits_XUV = logits_at(model, *rows.repeated(model.dtype, copies))
        return logits_XUV[:, 0, self.words_O].view(copies, -1, len(self.words_O))

    def scores_and_features(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        (rows,) = batch.passes
        logits_BUV, hidden_BUD = logits_and_hidden_at(model, *rows.repeated(model.dtype))
        return logits_BUV[:, 0, self.words_O], hidden_BUD[:, 0]
