"""The objective of models with a trained classification head: they answer with the head's logits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tezo.errors import RequestError
from tezo.tasks.objectives.batch import Batch
from tezo.tasks.objectives.encoder import mean_over_tokens
from tezo.tasks.objectives.logits import no_cache
from tezo.tasks.objectives.objective import Encoded
from tezo.tasks.objectives.whole_text import WholeTextObjective


class ClassifierObjective(WholeTextObjective):
    """An option is a class of the head and its score the logit of that class; the loss is their cross-entropy.

    Args:
        classes: classes of the head in the order of its logits.
        others: as for `Objective`; `options` are classes.
    """

    def __init__(
        self,
        tokenizer: Any,
        device: torch.device,
        max_length: int,
        options: Sequence[str],
        classes: Sequence[str],
        *,
        model: Any = None,
    ) -> None:
        super().__init__(tokenizer, device, max_length, options, model=model)
        unknown = [option for option in options if option not in classes]
        if unknown:
            raise RequestError(
                f"data.label_words: {unknown[0]!r} is not a class of this model's head, whose classes are "
                f"{', '.join(classes)}; give each label one of them."
            )
        self.columns_O = torch.tensor([list(classes).index(option) for option in options], device=device)

    def option_tokens(self, option: str) -> tuple[int, ...]:
        return (self.options.index(option),)

    def scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        logits = model(**batch.repeated(copies).inputs(model.dtype), **no_cache(model)).logits
        wide: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide[:, self.columns_O]

    def features(self, model: Any, encoded: Sequence[Encoded]) -> Tensor:
        inputs = self.collate(encoded).inputs(model.dtype)
        hidden_BLD = model(**inputs, **no_cache(model), output_hidden_states=True).hidden_states[-1]
        return mean_over_tokens(hidden_BLD, inputs["attention_mask"])
