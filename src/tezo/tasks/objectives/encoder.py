"""The objective of encoders: they answer by comparing the text with descriptions of the labels."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tezo.system.errors import RequestError
from tezo.tasks.examples import Example
from tezo.tasks.objectives.batch import Batch
from tezo.tasks.objectives.evaluators import Evaluator, of_text
from tezo.tasks.objectives.objective import Encoded, Objective

SCALE = 20.0
"""Factor of the cosine before the softmax, the default of sentence-transformers' ranking loss."""


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


class EncoderObjective(WholeTextObjective):
    """Scaled cosine between the mean-pooled text and the mean-pooled description of each label.

        score_o = SCALE cos(mean_t h_t(text), mean_t h_t(description_o)),

    and the loss is the cross-entropy over scores. The model gets no new parameters, so the accuracy before
    training is zero-shot accuracy. The tuned model also encodes the descriptions.
    """

    def __init__(
        self, tokenizer: Any, device: torch.device, max_length: int, options: Sequence[str], *, model: Any = None
    ) -> None:
        super().__init__(tokenizer, device, max_length, options, model=model)
        described = tokenizer(list(options), padding=True, return_tensors="pt")
        for option, length in zip(options, described["attention_mask"].sum(1).tolist(), strict=True):
            if length > max_length:
                raise RequestError(
                    f"data.label_words: {option[:40]!r}... has {length} tokens, above the limit of {max_length}; "
                    "shorten it, or raise data.max_length if the model takes more."
                )
        self._check_known(described["input_ids"].flatten().tolist(), "data.label_words")
        names = ("input_ids", "attention_mask")
        self.evaluator = EncoderInTorch({name: described[name].to(device) for name in names})


class EncoderInTorch(Evaluator):
    """Encoders: see `EncoderObjective`.

    Outside of `sharing` each text is compared with descriptions under its perturbation, and inside it all texts of a
    copy with the same ones.

    Args:
        descriptions: keyword arguments of the model for the descriptions of the O labels, (O, tokens) each.
    """

    def __init__(self, descriptions: Mapping[str, Tensor]) -> None:
        self.descriptions = descriptions
        self.shared_rows, self.shared_tokens = len(descriptions["input_ids"]), descriptions["input_ids"].numel()
        self._labels_COD: Tensor | None = None

    @contextmanager
    def sharing(self, model: Any, copies: int = 1) -> Iterator[None]:
        self._labels_COD = mean_pooled(model, **self._repeated(copies)).view(copies, self.shared_rows, -1)
        try:
            yield
        finally:
            self._labels_COD = None

    def option_scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        (rows,) = batch.passes
        inputs, _ = rows.repeated(model.dtype, copies)
        texts_XD = mean_pooled(model, **inputs)
        if self._labels_COD is not None:
            return _cosines(texts_XD.view(copies, -1, texts_XD.shape[1]), self._labels_COD)
        labels_XD = mean_pooled(model, **self._repeated(len(texts_XD)))
        labels_XOD = functional.normalize(labels_XD.view(len(texts_XD), self.shared_rows, -1), dim=-1)
        scores_XO1 = SCALE * (labels_XOD @ functional.normalize(texts_XD, dim=-1).unsqueeze(-1))
        return scores_XO1.view(copies, -1, self.shared_rows)

    def scores_and_features(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        (rows,) = batch.passes
        inputs, _ = rows.repeated(model.dtype)
        with self.sharing(model) if self._labels_COD is None else nullcontext():
            assert self._labels_COD is not None
            texts_BD = mean_pooled(model, **inputs)
            return _cosines(texts_BD.unsqueeze(0), self._labels_COD)[0], texts_BD

    def _repeated(self, copies: int) -> dict[str, Tensor]:
        return {name: value.repeat(copies, 1) for name, value in self.descriptions.items()}


def _cosines(texts_CBD: Tensor, labels_COD: Tensor) -> Tensor:
    """Returns the scaled cosine of each text of a copy and each label, (copies, B, O)."""
    texts_CBD, labels_COD = (functional.normalize(values, dim=-1) for values in (texts_CBD, labels_COD))
    return SCALE * texts_CBD @ labels_COD.mT


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
