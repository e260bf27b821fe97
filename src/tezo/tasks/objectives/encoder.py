"""Objectives of encoders: by comparing embeddings, or by the logits of a trained classification head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tezo.system.errors import RequestError
from tezo.tasks.objectives.batch import Batch
from tezo.tasks.objectives.masked import WholeTextObjective
from tezo.tasks.objectives.readers import no_cache, of_text

SCALE = 20.0
"""Factor of the cosine before the softmax, the default of sentence-transformers' ranking loss."""


class EncoderObjective(WholeTextObjective):
    """Scaled cosine between the mean-pooled text and the mean-pooled description of each label.

        score_o = SCALE cos(mean_t h_t(text), mean_t h_t(description_o)),

    and the loss is the cross-entropy over scores. The model gets no new parameters, so the accuracy before
    training is zero-shot accuracy. The tuned model also encodes the descriptions.
    """

    def _prepare(self, model: Any) -> None:
        del model
        described = self.tokenizer(list(self.options), padding=True, return_tensors="pt")
        for option, length in zip(self.options, described["attention_mask"].sum(1).tolist(), strict=True):
            if length > self.max_length:
                raise RequestError(
                    f"data.label_words: {option[:40]!r}... has {length} tokens, above the limit of {self.max_length}; "
                    "shorten it, or raise data.max_length if the model takes more."
                )
        self._check_known(described["input_ids"].flatten().tolist(), "data.label_words")
        self._labels_COD: Tensor | None = None
        self.descriptions = {name: described[name].to(self.device) for name in ("input_ids", "attention_mask")}
        self.shared_tokens = self.descriptions["input_ids"].numel()
        self.shared_rows = len(self.descriptions["input_ids"])

    @contextmanager
    def sharing(self, model: Any, copies: int = 1) -> Iterator[None]:
        self._labels_COD = self._described(model, copies)
        try:
            yield
        finally:
            self._labels_COD = None

    def scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        texts_TD = mean_pooled(model, **batch.repeated(copies).inputs(model.dtype))
        return self._scores(model, texts_TD, batch.shape_BO[0], copies)

    def _scores(self, model: Any, texts_TD: Tensor, examples: int, copies: int) -> Tensor:
        texts_TD = functional.normalize(texts_TD, dim=-1)
        if self._labels_COD is None:  # each text is compared with descriptions under its own perturbation
            labels_TOD = functional.normalize(self._described(model, copies * examples), dim=-1)
            return SCALE * (labels_TOD @ texts_TD.unsqueeze(-1)).squeeze(-1)
        texts_CBD = texts_TD.reshape(copies, examples, -1)
        scores_CBO: Tensor = SCALE * texts_CBD @ functional.normalize(self._labels_COD, dim=-1).mT
        return scores_CBO.flatten(0, 1)

    def example_passes(self, batch: Batch) -> list[list[int]]:
        described = [example for example in range(batch.shape_BO[0]) for _ in self.options]
        return [*super().example_passes(batch), described]

    def scores_and_features(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        texts_BD = mean_pooled(model, **batch.inputs(model.dtype))
        return self._scores(model, texts_BD, len(texts_BD), 1), texts_BD

    def _described(self, model: Any, copies: int) -> Tensor:
        """Returns the descriptions as encoded by each copy, (copies, O, D)."""
        repeated = {name: value.repeat(copies, 1) for name, value in self.descriptions.items()}
        return mean_pooled(model, **repeated).reshape(copies, len(self.options), -1)


def mean_pooled(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Returns the mean of the last hidden states over the tokens of each row, (B, D), float32 or wider."""
    hidden_BLD = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return mean_over_tokens(of_text(hidden_BLD, input_ids), attention_mask)


def mean_over_tokens(hidden_BLD: Tensor, attention_mask: Tensor) -> Tensor:
    """Returns the mean of hidden states over the tokens of each row, (B, D), float32 or wider."""
    wide = torch.promote_types(hidden_BLD.dtype, torch.float32)
    weights_BL1 = attention_mask.unsqueeze(-1).to(wide)
    pooled_BD: Tensor = (hidden_BLD.to(wide) * weights_BL1).sum(1) / weights_BL1.sum(1)
    return pooled_BD


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
        self.columns_O = torch.tensor([list(classes).index(option) for option in options], device=device)

    def option_tokens(self, option: str) -> tuple[int, ...]:
        return (self.options.index(option),)

    def scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        return self._scores(model(**batch.repeated(copies).inputs(model.dtype), **no_cache(model)).logits)

    def _scores(self, logits: Tensor) -> Tensor:
        wide: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide[:, self.columns_O]

    def scores_and_features(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs = batch.inputs(model.dtype)
        found = model(**inputs, **no_cache(model), output_hidden_states=True)
        return self._scores(found.logits), mean_over_tokens(found.hidden_states[-1], inputs["attention_mask"])
