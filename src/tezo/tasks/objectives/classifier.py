"""The objective of classifiers: they answer by the logits of a trained head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tezo.system.errors import RequestError
from tezo.tasks.objectives.batch import Batch
from tezo.tasks.objectives.encoder import WholeTextObjective, mean_over_tokens
from tezo.tasks.objectives.evaluators import Evaluator, no_cache


class ClassifierObjective(WholeTextObjective):
    """An option is a class of the head and its score the logit of that class; the loss is their cross-entropy.

    `classes`: those of the head, in the order of its logits. The other arguments are those of `Objective`.
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
        columns = [list(classes).index(option) for option in options]
        self.evaluator = ClassifierInTorch(torch.tensor(columns, device=device))

    def option_tokens(self, option: str) -> tuple[int, ...]:
        return (self.options.index(option),)


class ClassifierInTorch(Evaluator):
    """Classifiers: see `ClassifierObjective`.

    Args:
        columns_O: int64, the class of each option.
    """

    def __init__(self, columns_O: Tensor) -> None:
        self.columns_O = columns_O

    def option_scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        (rows,) = batch.passes
        inputs, _ = rows.repeated(model.dtype, copies)
        logits_XV = model(**inputs, **no_cache(model)).logits
        return self._scores(logits_XV).view(copies, -1, len(self.columns_O))

    def scores_and_features(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        (rows,) = batch.passes
        inputs, _ = rows.repeated(model.dtype)
        found = model(**inputs, **no_cache(model), output_hidden_states=True)
        return self._scores(found.logits), mean_over_tokens(found.hidden_states[-1], inputs["attention_mask"])

    def _scores(self, logits: Tensor) -> Tensor:
        wide: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide[:, self.columns_O]
