"""Forward passes of causal models in an engine, which is sent the change of the weights."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tezo.directions.outputs import LIKELY, named_and_rest
from tezo.forward.answers import has_twins
from tezo.forward.engine import NOTHING, Asked, Change, Continuing, Engine, Told, changes_of
from tezo.models.lora import attached_to
from tezo.system.progress import current
from tezo.tasks.objectives.batch import Batch, padded
from tezo.tasks.objectives.causal import CausalInTorch
from tezo.tasks.objectives.ends import text_after
from tezo.tasks.objectives.evaluators import TextEvaluator

logger = logging.getLogger(__name__)


class CausalInEngine(TextEvaluator):
    """Causal models in an engine, which is sent the change of their weights; scores as those of `CausalInTorch`.

    Args:
        engine: holds the weights of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.engine, self.most_copies = engine, engine.name, engine.at_once
        self._has_warned = False

    def in_torch(self) -> TextEvaluator:
        return CausalInTorch()

    def option_scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        log_probs_CSK, _ = self._answers(model, batch, copies)
        means_CS = log_probs_CSK.sum(2) / torch.cat([rows.valid_SK for rows in batch.passes]).sum(1)
        return batch.by_option(torch.split(means_CS, [len(rows.row_S) for rows in batch.passes], 1))

    def token_log_probs(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        return self._answers(model, batch, copies)[0]

    def token_hits(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        log_probs_CSK, hits_CSK = self._answers(model, batch, 1)
        return log_probs_CSK[0], hits_CSK[0]

    def _answers(self, model: Any, batch: Batch, copies: int) -> tuple[Tensor, Tensor]:
        """Returns (log-probabilities of the answer tokens, whether each is the most likely), (copies, S, K) each."""
        valid_SK, right_T = torch.cat([rows.valid_SK for rows in batch.passes]), _answer_tokens(batch)
        asked, place_T, slot_T1 = ask(batch, right_T.unsqueeze(1), likely=1)
        found, hits = (torch.zeros(copies, *valid_SK.shape, dtype=kind) for kind in (torch.float32, torch.bool))
        for log_probs, hit, told in zip(found, hits, self._told(model, batch, asked, copies), strict=True):
            log_probs[valid_SK] = told.log_probs_PC[place_T, slot_T1[:, 0]]
            hit[valid_SK] = told.likely_PL[place_T, 0] == right_T
        return found, hits

    def likely_tokens(
        self, model: Any, batch: Batch, tokens_TC: Tensor | None, copies: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        right_T = _answer_tokens(batch)
        named_TC = right_T.unsqueeze(1) if tokens_TC is None else tokens_TC[:, :-1]
        asked, place_T, slot_TC = ask(batch, named_TC, likely=LIKELY + 1 if tokens_TC is None else 0)
        found = []
        for told in self._told(model, batch, asked, copies):
            log_probs_TC = told.log_probs_PC[place_T.unsqueeze(1), slot_TC]
            columns_TC = tokens_TC
            if columns_TC is None:
                likely_TL, values_TL = told.likely_PL[place_T], told.likely_log_probs_PL[place_T]
                # the right token, which is there already, goes to the end, where it is cut off
                order_TL = (likely_TL == right_T.unsqueeze(1)).int().argsort(stable=True, dim=1)[:, :LIKELY]
                log_probs_TC = torch.cat([log_probs_TC, values_TL.gather(1, order_TL)], 1)
                rest_T1 = torch.full_like(right_T, NOTHING).unsqueeze(1)
                columns_TC = torch.cat([named_TC, likely_TL.gather(1, order_TL), rest_T1], 1)
            found.append((named_and_rest(log_probs_TC), columns_TC))
        return found

    def scores_and_features(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        texts: list[Sequence[int]] = []
        for rows in batch.passes:
            row_P, position_P = rows.first_reads()
            ids = rows.inputs["input_ids"][row_P].tolist()
            texts += [tokens[: last + 1] for tokens, last in zip(ids, position_P.tolist(), strict=True)]
        scores_BO = self.option_scores(model, batch)[0]
        current().count(len(texts))
        return scores_BO, self._engine.hidden(self._changes(model, 1)[0], texts).to(scores_BO.device)

    def continuations(
        self, model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], wanted: Continuing, copies: int = 1
    ) -> list[list[list[int]]]:
        def line_ended(row: int, tokens: Sequence[int]) -> bool:  # a line break may be a part of a token
            return "\n" in text_after(tokenizer, prompts[row], tokens, special=True)

        wanted = replace(wanted, line_ended=line_ended if wanted.one_line else None)
        found = self._engine.generate(self._changes(model, copies), prompts, wanted)
        if copies > 1 and all(texts == found[0] for texts in found):  # by chance, or it ignores changes
            self._engine.check_changes()
        current().count(sum(len(row) for texts in found for row in texts))
        return found

    def _told(self, model: Any, batch: Batch, asked: Asked, copies: int) -> list[Told]:
        current().count(copies * sum(len(rows.example_R) for rows in batch.passes))
        told = self._engine.log_probs(self._changes(model, copies), asked)
        if has_twins(told):  # it ignores changes, or rounds them away
            self._engine.check_changes()
            self._warn_of_twins(copies)
        return told

    def _warn_of_twins(self, copies: int) -> None:
        if not self._has_warned:
            logger.warning(
                "Some log-probabilities that %s computed under %d different changes are equal to the bit. It does not "
                "ignore changes, so that method.rho is too small for its data type, or the rows have no loss left.",
                self._engine.name,
                copies,
            )
        self._has_warned = True

    def _changes(self, model: Any, copies: int) -> list[Change]:
        attached = attached_to(model)
        found: list[Change] = []
        for change in changes_of(model, copies):
            for name, (a_RI, b_OR) in attached.items():
                pairs = [change[name], (a_RI, b_OR)] if name in change else [(a_RI, b_OR)]
                change[name] = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1)
            found.append(change)
        return found


def _answer_tokens(batch: Batch) -> Tensor:
    return torch.cat([rows.tokens_SK[rows.valid_SK] for rows in batch.passes])


def ask(batch: Batch, tokens_TC: Tensor, likely: int) -> tuple[Asked, Tensor, Tensor]:
    """Returns (the request to an engine for a batch without packed rows, place_T, slot_TC) for its answer tokens.

    Places with equal texts up to them are one place, and texts that are the beginning of others are not asked apart.

    Args:
        batch: the batch.
        tokens_TC: int64, tokens of interest at each valid answer token.
        likely: number of most likely tokens wanted at each place.
    """
    seen: list[tuple[int, ...]] = []
    for rows in batch.passes:
        ids, (row_T, position_T) = rows.inputs["input_ids"].tolist(), rows.answer_reads()
        seen += [tuple(ids[r][: p + 1]) for r, p in zip(row_T.tolist(), position_T.tolist(), strict=True)]
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
        slot_of = wanted[place_of[context]]
        slots.append([slot_of.setdefault(token, len(slot_of)) for token in tokens])
    asked = Asked(
        texts,
        torch.tensor(text_of),
        torch.tensor([len(context) - 1 for context in contexts]),
        padded([list(slot_of) for slot_of in wanted], NOTHING),
        likely,
    )
    return asked, torch.tensor([place_of[context] for context in seen]), torch.tensor(slots)
