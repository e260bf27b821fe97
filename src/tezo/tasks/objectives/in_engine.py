"""Forward passes of causal models in an engine, which is sent the change of the weights."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tezo.directions.outputs import LIKELY, Places, named_and_rest
from tezo.forward.answers import has_twins
from tezo.forward.engine import (
    HEAD,
    NOTHING,
    Asked,
    Change,
    Continuing,
    Engine,
    LayerInputs,
    Served,
    Told,
    Watch,
    Writer,
    changes_of,
)
from tezo.forward.layers import LayerFunction, differentiable
from tezo.forward.watching import PassPlaces, Watcher, are_averaged
from tezo.models.lora import attached_to
from tezo.system.progress import current
from tezo.tasks.objectives.batch import Batch, Pass, padded
from tezo.tasks.objectives.causal import CausalInTorch
from tezo.tasks.objectives.ends import text_after
from tezo.tasks.objectives.evaluators import TextEvaluator

T = TypeVar("T")

logger = logging.getLogger(__name__)


MOST_NAMED = 64
"""Changes of an engine that is not a server that have names at once; it computes under one of them at a time."""


class CausalInEngine(TextEvaluator):
    """Causal models in an engine, which is sent the change of their weights; scores as those of `CausalInTorch`.

    Args:
        engine: holds the weights of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.engine, self.most_copies = engine, engine.name, engine.at_once
        self.serves, self.most_named = engine.serves, engine.at_once if engine.serves else MOST_NAMED
        self._has_warned = False
        self._watching: _Watching | None = None

    def shown(self, *, labelled: bool) -> TextEvaluator:
        is_shown = self._engine.watches_some if labelled else self._engine.watches(HEAD)
        return self if is_shown else CausalInTorch()

    @contextmanager
    def watching(self, model: Any, watcher: Watcher, places: Sequence[Places | None]) -> Iterator[None]:
        del model
        self._watching = _Watching(watcher, PassPlaces(places, watcher.most))
        try:
            yield
        finally:
            self._watching = None

    def head_rows(self, model: Any, rows_X: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        del model, like  # engines tune layers of blocks, and not the head
        return self._engine.head_rows(rows_X)

    def layer_function(self, model: Any, name: str, inputs: int, like: Tensor) -> LayerFunction:
        del inputs, like
        module = model.get_submodule(name)

        def outputs(x_PI: Tensor) -> Tensor:
            change, found = changes_of(module, 1)[0].get(name), self._engine.product(name, x_PI, False)
            return found if change is None else found + (x_PI @ change[0].T) @ change[1].T

        def transposed(g_PO: Tensor) -> Tensor:
            change, found = changes_of(module, 1)[0].get(name), self._engine.product(name, g_PO, True)
            return found if change is None else found + (g_PO @ change[1]) @ change[0]

        return differentiable(outputs, transposed)

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
        question = ask(batch, right_T.unsqueeze(1), likely=1, apart=self._asks_apart)
        place_T, slot_T1 = question.place_T, question.slot_TC
        found, hits = (torch.zeros(copies, *valid_SK.shape, dtype=kind) for kind in (torch.float32, torch.bool))
        for log_probs, hit, told in zip(found, hits, self._told(model, batch, question, copies), strict=True):
            log_probs[valid_SK] = told.log_probs_PC[place_T, slot_T1[:, 0]]
            hit[valid_SK] = told.likely_PL[place_T, 0] == right_T
        return found, hits

    def likely_tokens(
        self, model: Any, batch: Batch, tokens_TC: Tensor | None, copies: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        right_T = _answer_tokens(batch)
        named_TC = right_T.unsqueeze(1) if tokens_TC is None else tokens_TC[:, :-1]
        question = ask(batch, named_TC, likely=LIKELY + 1 if tokens_TC is None else 0, apart=self._asks_apart)
        place_T, slot_TC = question.place_T, question.slot_TC
        found = []
        for told in self._told(model, batch, question, copies):
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
            row_P, position_P = rows.deciding_reads()
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

        wanted = replace(wanted, ended=line_ended if wanted.one_line else None)
        found = self._engine.generate(self._changes(model, copies), prompts, wanted)
        if wanted.heard is not None and not self._engine.streams:
            for token in found[0][0]:
                wanted.heard(token)
        if copies > 1 and all(texts == found[0] for texts in found):  # by chance, or it ignores changes
            self._engine.check_changes()
        current().count(sum(len(row) for texts in found for row in texts))
        return found

    def writers(self, model: Any, tokenizer: Any, copies: int) -> list[Writer]:
        del tokenizer

        def write(change: Change, prompts: Sequence[Sequence[int]], wanted: Continuing) -> list[list[int]]:
            (found,) = self._engine.generate([change], prompts, wanted)
            current().count(sum(map(len, found)))
            return found

        return [partial(write, change) for change in self._changes(model, copies)]

    def serve(self, model: Any, copies: int, ask: Callable[[Served], T]) -> list[T]:
        found = self._engine.serve(self._changes(model, copies), ask)
        if copies > 1 and all(one == found[0] for one in found):  # by chance, or it ignores changes
            self._engine.check_changes()
        return found

    @property
    def _asks_apart(self) -> bool:
        """Whether equal texts of different examples are computed apart, since vectors are added to each."""
        return self._watching is not None and bool(self._watching.watcher.adds)

    def _told(self, model: Any, batch: Batch, question: "Question", copies: int) -> list[Told]:
        current().count(copies * sum(len(rows.example_R) for rows in batch.passes))
        changes = self._changes(model, copies)
        if self._watching is not None:
            return [self._watching.told(self._engine, change, batch, question) for change in changes]
        told = self._engine.log_probs(changes, question.asked)
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


@dataclass(frozen=True)
class Question:
    """What to ask of an engine on a batch, and where the answers are.

    Attributes:
        asked: the request.
        place_T: int64, place of each answer token in the request.
        slot_TC: int64, where its tokens of interest are among those of the place.
        numbers: (example, tokens up to it) -> place in the request; the example is 0 where they are not asked apart.
        apart: whether examples are asked apart.
    """

    asked: Asked
    place_T: Tensor
    slot_TC: Tensor
    numbers: Mapping[tuple[int, tuple[int, ...]], int]
    apart: bool


def ask(batch: Batch, tokens_TC: Tensor, likely: int, *, apart: bool = False) -> Question:
    """Returns what to ask of an engine on a batch without packed rows.

    Places with equal texts up to them are one place, and texts that are the beginning of others are not asked apart.

    Args:
        batch: the batch.
        tokens_TC: int64, tokens of interest at each valid answer token.
        likely: number of most likely tokens wanted at each place.
        apart: whether only places and texts of the same example may be one.
    """
    seen: list[tuple[int, tuple[int, ...]]] = []
    for rows in batch.passes:
        seen += _contexts(rows, *rows.answer_reads(), apart=apart)
    contexts = sorted(set(seen))
    texts: list[tuple[int, ...]] = []
    groups, text_of = [], []
    for i, (example, context) in enumerate(contexts):
        text_of.append(len(texts))
        other, following = contexts[i + 1] if i + 1 < len(contexts) else (example, ())
        if other != example or following[: len(context)] != context:
            texts.append(context)
            groups.append(example)
    numbers = {both: i for i, both in enumerate(contexts)}
    place_of_seen = [numbers[both] for both in seen]
    wanted: list[dict[int, int]] = [{} for _ in contexts]  # token -> its slot
    slots = []
    for place, tokens in zip(place_of_seen, tokens_TC.tolist(), strict=True):
        slot_of = wanted[place]
        slots.append([slot_of.setdefault(token, len(slot_of)) for token in tokens])
    asked = Asked(
        texts,
        torch.tensor(text_of),
        torch.tensor([len(context) - 1 for _, context in contexts]),
        padded([list(slot_of) for slot_of in wanted], NOTHING),
        likely,
        torch.tensor(groups) if apart else None,
    )
    return Question(asked, torch.tensor(place_of_seen), torch.tensor(slots), numbers, apart)


def _contexts(rows: Pass, row_P: Tensor, position_P: Tensor, *, apart: bool) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (example, tokens up to it) of places in the rows of a pass; see `Question.numbers`."""
    ids = rows.inputs["input_ids"].tolist()
    return [
        (rows.example_R[row] if apart else 0, tuple(ids[row][: position + 1]))
        for row, position in zip(row_P.tolist(), position_P.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class _Watching:
    """A watcher of the passes of an engine, and the places of these."""

    watcher: Watcher
    passes: PassPlaces

    def told(self, engine: Engine, change: Change, batch: Batch, question: Question) -> Told:
        """Asks an engine, and shows the watcher what it looks at."""
        watcher, looked, added = self.watcher, [], dict[str, list[Tensor]]()
        vectors: dict[str, dict[int, Tensor]] = {layer: {} for layer in watcher.adds}
        for rows in batch.passes:
            self.passes.enter()
            now = self.passes.now
            if now is None:
                continue
            watcher.begin()
            for layer, of_text in vectors.items():
                self._add(layer, of_text, rows, now, question)
            contexts = _contexts(rows, now.row_P, now.position_P, apart=question.apart)
            looked.append((now, [question.numbers[context] for context in contexts]))
        places = sorted({place for _, read in looked for place in read})
        for layer, of_text in vectors.items():
            size = next((len(vectors[0]) for vectors in of_text.values()), 0)
            none = torch.zeros(1, size)
            if of_text:
                added[layer] = [of_text.get(text, none) for text in range(len(question.asked.texts))]
        means = watcher.means and all(are_averaged(now) for now, _ in looked)
        watch = Watch(watcher.inputs if places else (), means, torch.tensor(places, dtype=torch.int64), added)
        watched = engine.watch(change, question.asked, watch)
        watcher.passes += watched.times * len(batch.passes)
        number = {place: i for i, place in enumerate(places)}
        for now, read in looked:
            at_P = torch.tensor([number[place] for place in read])
            for layer, inputs in watched.inputs.items():
                at, mean = (None if each is None else each[at_P] for each in (inputs.at_PI, inputs.mean_PI))
                watcher.take(layer, now, LayerInputs(at, mean, inputs.output_square))
        return watched.told

    def _add(self, layer: str, of_text: dict[int, Tensor], rows: Pass, now: Places, question: Question) -> None:
        """Puts down the vectors of the texts of a pass: those of the row of which a text is the beginning."""
        added_RLM = self.watcher.added(layer, now, rows.inputs["input_ids"].shape[1]).float()
        row_T, position_T = rows.answer_reads()
        for row, context in zip(row_T.tolist(), _contexts(rows, row_T, position_T, apart=question.apart), strict=True):
            text, vectors = int(question.asked.text_P[question.numbers[context]]), added_RLM[row]
            if question.asked.texts[text] == context[1]:
                of_text[text] = vectors if len(vectors) == 1 else vectors[: len(context[1])]
