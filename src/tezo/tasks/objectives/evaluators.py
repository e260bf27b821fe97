"""Evaluators: what a causal model says at places of texts, by a forward pass in torch or in an engine.

An objective asks its evaluator, and knows of no other way to run the model.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from tezo.directions.outputs import LIKELY, named_and_rest, of_tokens
from tezo.directions.targets import device_of
from tezo.forward.answers import has_twins
from tezo.forward.engine import NOTHING, Asked, Change, Continuing, Engine, Told, changes_of
from tezo.forward.low_rank import keeping_points
from tezo.models.lora import attached_to
from tezo.system.progress import current
from tezo.tasks.objectives.batch import Batch, longest_packed, padded, takes_packed
from tezo.tasks.objectives.ends import text_after
from tezo.tasks.objectives.readers import base_of, logits_and_hidden_at, logits_at

logger = logging.getLogger(__name__)


class Evaluator(ABC):
    """Runs forward passes of a causal model with the parameters that it has at the time of the call."""

    engine: str | None = None
    """Name of the engine that runs the passes, of which rows share their directions and nothing has a gradient; None:
    torch runs them."""
    most_copies: int | None = None
    """Number of models that it computes side by side; None: by the number of tokens."""

    @abstractmethod
    def log_probs(self, model: Any, batch: Batch, copies: int) -> tuple[Tensor, Tensor]:
        """Returns (log-probabilities of the answer tokens, whether each is the most likely token).

        float32 or wider and bool, both (copies S, K), 0 and False where not valid. Hooks may perturb each copy
        differently.
        """

    @abstractmethod
    def likely(self, model: Any, batch: Batch, tokens_TC: Tensor | None, copies: int) -> list[tuple[Tensor, Tensor]]:
        """Returns (scores_TC, tokens_TC) of each copy at the T valid answer tokens; see `of_tokens` of `Outputs`."""

    @abstractmethod
    def log_probs_and_hidden(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns (log-probabilities of the answer tokens (S, K), inputs of the output head before an answer (B, D)).

        Raises:
            RequestError: the inputs of the head cannot be read.
        """

    @abstractmethod
    def continuations(
        self, model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], wanted: Continuing, copies: int = 1
    ) -> list[list[list[int]]]:
        """Returns, for each copy, the tokens that continue each prompt; those behind its end are to be ignored.

        Hooks may perturb each copy differently. All sample with the same random numbers.
        """

    @abstractmethod
    def packed_length(self, model: Any, sequence: Sequence[int]) -> tuple[bool, int | None]:
        """Returns whether the options of an example may share a row, and its maximum length in tokens, if any."""


class InTorch(Evaluator):
    """Forward passes of the model itself."""

    def log_probs(self, model: Any, batch: Batch, copies: int) -> tuple[Tensor, Tensor]:
        parts = [self._log_probs(model, part.repeated(copies)) for part in batch.passes()]
        chosen, hits = (torch.cat([x.unflatten(0, (copies, -1)) for x in own], 1) for own in zip(*parts, strict=True))
        return chosen.flatten(0, 1), hits.flatten(0, 1)

    def _log_probs(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        logits_RUV = logits_at(model, batch.inputs(model.dtype), batch.reads_RU)
        hits = logits_RUV.argmax(-1)[batch.row_S.unsqueeze(1), batch.slots_SK] == batch.tokens_SK
        return _chosen(logits_RUV, batch), hits & batch.valid_SK

    def log_probs_and_hidden(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        chosen, hidden = [], []
        for part in batch.passes():
            logits_RUV, hidden_RUD = logits_and_hidden_at(model, part.inputs(model.dtype), part.reads_RU)
            first_S = part.option_S == 0
            chosen.append(_chosen(logits_RUV, part))
            hidden.append(hidden_RUD[part.row_S[first_S], part.slots_SK[first_S, 0]])
        return torch.cat(chosen), torch.cat(hidden)

    def likely(self, model: Any, batch: Batch, tokens_TC: Tensor | None, copies: int) -> list[tuple[Tensor, Tensor]]:
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(copies)]
        start = 0
        for part in batch.passes():
            right_T = part.tokens_SK[part.valid_SK]
            asked = None if tokens_TC is None else tokens_TC[start : start + len(right_T)]
            start += len(right_T)
            every = part.repeated(copies)
            logits_RUV = logits_at(model, every.inputs(model.dtype), every.reads_RU)
            logits_XV = logits_RUV[every.row_S.unsqueeze(1), every.slots_SK][every.valid_SK]
            for own, logits_TV in zip(found, logits_XV.chunk(copies), strict=True):
                own.append(of_tokens(logits_TV.log_softmax(-1), right_T.to(logits_TV.device), asked))
        return [(torch.cat([s for s, _ in own]), torch.cat([t for _, t in own])) for own in found]

    def continuations(
        self, model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], wanted: Continuing, copies: int = 1
    ) -> list[list[list[int]]]:
        length, device, noisy = max(map(len, prompts)), device_of(model), wanted.noisy
        padding = [(tokenizer.pad_token_id,) * (length - len(prompt)) for prompt in prompts]
        padded_BL = torch.tensor([own + tuple(p) for own, p in zip(padding, prompts, strict=True)], device=device)
        mask_BL = torch.tensor([[0] * len(own) + [1] * (length - len(own)) for own in padding], device=device)
        more: dict[str, Any] = {"stop_strings": ["\n"], "tokenizer": tokenizer} if wanted.one_line else {}
        if noisy is not None:
            rows = range(len(prompts))

            def sample(ids: Tensor, scores: Tensor) -> Tensor:
                return torch.cat([noisy(own, rows, ids.shape[1] - length) for own in scores.chunk(copies)])

            more["logits_processor"] = LogitsProcessorList([sample])
        base = base_of(model)
        kept = base.generation_config  # `generate` would add its penalties, limits, and tokens forced or suppressed
        base.generation_config = GenerationConfig(
            bos_token_id=kept.bos_token_id, eos_token_id=list(wanted.ends) or None
        )
        try:
            with keeping_points():
                output = model.generate(
                    input_ids=padded_BL.repeat(copies, 1),
                    attention_mask=mask_BL.repeat(copies, 1),
                    max_new_tokens=wanted.most,
                    pad_token_id=tokenizer.pad_token_id,
                    **more,
                )
        finally:
            base.generation_config = kept
        return [own.tolist() for own in output[:, length:].chunk(copies)]

    def packed_length(self, model: Any, sequence: Sequence[int]) -> tuple[bool, int | None]:
        return takes_packed(model, sequence), longest_packed(model)


def _chosen(logits_RUV: Tensor, batch: Batch) -> Tensor:
    """Returns the log-probabilities of the answer tokens, (S, K)."""
    row_S1 = batch.row_S.unsqueeze(1)
    return logits_RUV.log_softmax(-1)[row_S1, batch.slots_SK, batch.tokens_SK] * batch.valid_SK


IN_TORCH = InTorch()


class InEngine(Evaluator):
    """Forward passes of an engine, which is sent the change of the model's weights.

    Args:
        engine: holds the weights of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.engine, self.most_copies = engine, engine.name, engine.at_once
        self._has_said = False

    def log_probs(self, model: Any, batch: Batch, copies: int) -> tuple[Tensor, Tensor]:
        asked, place_T, slot_T1 = ask(batch, batch.tokens_SK[batch.valid_SK].unsqueeze(1), likely=1)
        current().count(copies * len(batch.input_ids_RL))
        found, hits = (torch.zeros(copies, *batch.valid_SK.shape, dtype=kind) for kind in (torch.float32, torch.bool))
        for own, hit, told in zip(found, hits, self._told(model, asked, copies), strict=True):
            own[batch.valid_SK] = told.log_probs_PC[place_T, slot_T1[:, 0]]
            hit[batch.valid_SK] = told.likely_PL[place_T, 0] == batch.tokens_SK[batch.valid_SK]
        return found.flatten(0, 1), hits.flatten(0, 1)

    def likely(self, model: Any, batch: Batch, tokens_TC: Tensor | None, copies: int) -> list[tuple[Tensor, Tensor]]:
        right_T = batch.tokens_SK[batch.valid_SK]
        named_TC = right_T.unsqueeze(1) if tokens_TC is None else tokens_TC[:, :-1]
        asked, place_T, slot_TC = ask(batch, named_TC, likely=LIKELY + 1 if tokens_TC is None else 0)
        current().count(copies * len(batch.input_ids_RL))
        found = []
        for told in self._told(model, asked, copies):
            log_probs_TC = told.log_probs_PC[place_T.unsqueeze(1), slot_TC]
            own_TC = tokens_TC
            if own_TC is None:
                likely_TL, values_TL = told.likely_PL[place_T], told.likely_log_probs_PL[place_T]
                # the right token, which is there already, goes to the end, where it is cut off
                order_TL = (likely_TL == right_T.unsqueeze(1)).int().argsort(stable=True, dim=1)[:, :LIKELY]
                log_probs_TC = torch.cat([log_probs_TC, values_TL.gather(1, order_TL)], 1)
                rest_T1 = torch.full_like(right_T, NOTHING).unsqueeze(1)
                own_TC = torch.cat([named_TC, likely_TL.gather(1, order_TL), rest_T1], 1)
            found.append((named_and_rest(log_probs_TC), own_TC))
        return found

    def log_probs_and_hidden(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        first_S = batch.option_S == 0
        row_B = batch.row_S[first_S]
        last_B = batch.reads_RU[row_B, batch.slots_SK[first_S, 0]]
        texts = [ids[: last + 1] for ids, last in zip(batch.input_ids_RL[row_B].tolist(), last_B.tolist(), strict=True)]
        chosen, _ = self.log_probs(model, batch, 1)
        current().count(len(texts))
        return chosen, self._engine.hidden(self._changes(model, 1)[0], texts).to(chosen.device)

    def continuations(
        self, model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], wanted: Continuing, copies: int = 1
    ) -> list[list[list[int]]]:
        def line_ended(row: int, tokens: Sequence[int]) -> bool:  # a line break may be a part of a token
            return "\n" in text_after(tokenizer, prompts[row], tokens, special=True)

        wanted = replace(wanted, line_ended=line_ended if wanted.one_line else None)
        found = self._engine.generate(self._changes(model, copies), prompts, wanted)
        if copies > 1 and all(own == found[0] for own in found):  # by chance, or the engine ignores changes
            self._engine.check_changes()
        current().count(sum(len(row) for own in found for row in own))
        return found

    def packed_length(self, model: Any, sequence: Sequence[int]) -> tuple[bool, int | None]:
        del model, sequence
        return False, None  # an engine shares prefixes by itself

    def _told(self, model: Any, asked: Asked, copies: int) -> list[Told]:
        told = self._engine.log_probs(self._changes(model, copies), asked)
        if has_twins(told):  # the engine ignores changes, or rounds them away
            self._engine.check_changes()
            self._say_equal(copies)
        return told

    def _say_equal(self, copies: int) -> None:
        if not self._has_said:
            logger.warning(
                "Some log-probabilities that %s computed under %d different changes are equal to the bit. It does not "
                "ignore changes, so that method.rho is too small for its data type, or the rows have no loss left.",
                self._engine.name,
                copies,
            )
        self._has_said = True

    def _changes(self, model: Any, copies: int) -> list[Change]:
        attached = attached_to(model)
        found: list[Change] = []
        for own in changes_of(model, copies):
            for name, (a_RI, b_OR) in attached.items():
                pairs = [own[name], (a_RI, b_OR)] if name in own else [(a_RI, b_OR)]
                own[name] = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1)
            found.append(own)
        return found


def ask(batch: Batch, tokens_TC: Tensor, likely: int) -> tuple[Asked, Tensor, Tensor]:
    """Returns what to ask of an engine on a batch without packed rows, and (place_T, slot_TC) of its answer tokens.

    Places with equal texts up to them are one place, and texts that are the beginning of others are not asked apart.

    Args:
        batch: the batch.
        tokens_TC: int64, tokens of interest at each valid answer token.
        likely: number of most likely tokens wanted at each place.
    """
    lengths = (batch.ends_RL > 0).sum(1).tolist()
    rows = [ids[:length] for ids, length in zip(batch.input_ids_RL.tolist(), lengths, strict=True)]
    row_T = batch.row_S.unsqueeze(1).expand_as(batch.slots_SK)[batch.valid_SK]
    position_T = batch.reads_RU[row_T, batch.slots_SK[batch.valid_SK]]
    seen = [tuple(rows[r][: p + 1]) for r, p in zip(row_T.tolist(), position_T.tolist(), strict=True)]
    contexts = sorted(set(seen))
    texts: list[tuple[int, ...]] = []
    text_of = []
    for i, context in enumerate(contexts):
        text_of.append(len(texts))
        following = contexts[i + 1] if i + 1 < len(contexts) else ()
        if following[: len(context)] != context:
            texts.append(context)
    place_of = {context: i for i, context in enumerate(contexts)}
    wanted: list[dict[int, int]] = [{} for _ in contexts]  # token -> its slot
    slots = []
    for context, tokens in zip(seen, tokens_TC.tolist(), strict=True):
        own = wanted[place_of[context]]
        slots.append([own.setdefault(token, len(own)) for token in tokens])
    asked = Asked(
        texts,
        torch.tensor(text_of),
        torch.tensor([len(context) - 1 for context in contexts]),
        padded([list(own) for own in wanted], NOTHING),
        likely,
    )
    return asked, torch.tensor([place_of[context] for context in seen]), torch.tensor(slots)
