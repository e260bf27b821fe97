"""The objective of causal models: they answer by continuing the prompt."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from tezo.directions.outputs import of_tokens
from tezo.directions.targets import device_of
from tezo.forward.beside_weight import keeping_points
from tezo.forward.engine import Continuing, Writer
from tezo.models.loading import UNBOUNDED
from tezo.system.errors import RequestError
from tezo.tasks.examples import Example
from tezo.tasks.objectives.batch import Batch, Pass, TokenTree, common_prefix, packed_tree
from tezo.tasks.objectives.ends import ends_of
from tezo.tasks.objectives.evaluators import TextEvaluator, base_of, logits_and_hidden_at, logits_at
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.objectives.packing import longest_packed, takes_packed

MOST_PACKED = 512
"""Tokens of options in a packed row, or as many as its prompt has: each token is compared with the whole row."""

AT_ONCE = 1 << 16
"""Characters of prompts that the tokenizer gets at once, if it is more than one prompt."""


class CausalObjective(Objective):
    """The likelihood of the answer after the prompt.

    Free text: the loss is the mean negative log-likelihood of the answer's tokens. With options: each option's score is
    the mean log-probability of its tokens, and the loss the cross-entropy over scores. The options of an example are
    packed into one row if `adapt` found that the model supports it.
    """

    side_cut = "the beginning of the prompt"
    evaluator: TextEvaluator

    def __init__(
        self, tokenizer: Any, device: torch.device, max_length: int, options: Sequence[str], *, model: Any = None
    ) -> None:
        super().__init__(tokenizer, device, max_length, options, model=model)
        self.evaluator = CausalInTorch()
        self.ends = ends_of(tokenizer, model)
        self._first = _put_first(tokenizer)
        self._model: weakref.ref[Any] | None = None
        self._most: int | None = None

    def prompt_tokens(self, text: str, *, chat: bool) -> list[int]:
        """Returns the tokens of a prompt, which is not cut; `chat`: a chat template wrote it."""
        (ids,) = self._tokens([text], chat=chat)
        return ids

    def _encode(self, example: Example) -> Encoded:
        if example.whole:
            return self._whole(example)
        learns_end = example.ends and bool(example.answer) and not example.options
        text, end = example.answer, None
        if learns_end:
            text, end = self.ends.within(example.answer, example.prompt, chat=example.chat)
        texts = example.options or (text,)
        prompt = self.prompt_tokens(example.prompt, chat=example.chat)
        sequences, answers, split = [], [], False
        many = max(1, AT_ONCE // max(1, len(example.prompt)))
        parts = [texts[start : start + many] for start in range(0, len(texts), many)]
        wholes = (
            ids for part in parts for ids in self._tokens([example.prompt + text for text in part], chat=example.chat)
        )
        for text, whole in zip(texts, wholes, strict=True):
            hidden = len(whole) <= len(prompt) and text.strip()  # by a token for all words that are not known
            if hidden or whole[: len(prompt)] != prompt:  # a token spans the boundary: encode the answer separately
                whole, split = prompt + self._alone(text), not example.chat
            whole[: len(prompt)] = prompt  # the same objects, which thousands of options share
            if learns_end:
                whole = self._ended(whole, len(prompt), end, example)
            sequences.append(whole)
            answers.append(len(whole) - len(prompt))
        over = max(0, max(len(s) for s in sequences) - self.max_length)
        if over:
            sequences = [self._cut(s, over, len(prompt), example) for s in sequences]
            self.cuts.add(over, example.where)
        if len(prompt) == 0 or (example.answer and min(answers) == 0):
            raise RequestError(f"{example.where}: the prompt or the answer is empty; fill it in, or remove that row.")
        if split:
            self.split.add(1, example.where)
        if not example.options:
            self._note_unknown(sequences[0][len(sequences[0]) - answers[0] :], example)
        return Encoded(tuple(tuple(s) for s in sequences), tuple(answers), example)

    def _whole(self, example: Example) -> Encoded:
        """Encodes a text of which all tokens after the first are learnt; its end is cut where it is too long."""
        text, end = self.ends.within(example.answer, example.answer, chat=False)
        (ids,) = self._tokens([text], chat=example.chat)
        ids = self._ended(ids, 0, end, example)
        if len(ids) > self.max_length:
            self.cuts.add(len(ids) - self.max_length, example.where)
            self.side_cut = "the end of the text"
        ids = ids[: self.max_length]
        if not example.answer.strip() or len(ids) < 2:
            raise RequestError(f"{example.where}: the text is empty; fill it in, or remove that row.")
        self._note_unknown(ids, example)
        return Encoded((tuple(ids),), (len(ids) - 1,), example)

    def _tokens(self, texts: Sequence[str], *, chat: bool) -> list[list[int]]:
        found = list(self.tokenizer(list(texts), add_special_tokens=False)["input_ids"])
        first = [] if chat else self._first  # a rendered prompt has its special tokens
        return [ids if ids[: len(first)] == first else first + ids for ids in found]

    def _ended(self, ids: list[int], start: int, end: int | None, example: Example) -> list[int]:
        """Adds the token `end`, if the answer, which begins at `start`, does not have an end already."""
        if not (ids[start:] and ids[-1] in self.ends.marks):
            if end is None:
                self.endless.add(0, example.where)
                return ids
            ids = [*ids, end]
        if ids[-1] in self.ends.unnamed:
            mark = self.ends.marks[ids[-1]]
            note = (
                f"the answer ends with {mark!r}, which the model's generation_config does not name, so transformers "
                "and servers would write on behind it; add its number to eos_token_id there"
            )
            self.note(note, example.where)
        return ids

    def _alone(self, text: str) -> list[int]:
        """Encodes a text that follows others, without the space that some tokenizers put before a first word."""
        line, whole = (list(self.tokenizer(t, add_special_tokens=False)["input_ids"]) for t in ("\n", f"\n{text}"))
        if whole[: len(line)] == line:
            return whole[len(line) :]
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _note_unknown(self, answer: list[int], example: Example) -> None:
        """Counts tokens of the answer that stand for characters unknown to the tokenizer."""
        tokenizer = self.tokenizer
        count = answer.count(tokenizer.unk_token_id)
        if count and tokenizer.unk_token not in (tokenizer.bos_token, tokenizer.eos_token):  # as GPT-2's
            self.unknown.add(count, example.where)

    def _cut(self, sequence: list[int], over: int, prompt: int, example: Example) -> list[int]:
        first = 1 if sequence[0] == self.tokenizer.bos_token_id else 0
        if first + over >= prompt:
            raise RequestError(
                f"{example.where}: the answer alone has more tokens than data.max_length {self.max_length} allows; "
                "raise it, or remove that row."
            )
        return sequence[:first] + sequence[first + over :]

    def asked(self, sequence: Sequence[int], answer: int) -> tuple[list[int], list[int]]:
        start = len(sequence) - answer
        return list(range(start - 1, len(sequence) - 1)), list(sequence[start:])

    def adapt(self, model: Any, encoded: Sequence[Encoded]) -> None:
        several = [e for e in encoded if len(e.sequences) > 1]
        if several and (self._model is None or self._model() is not model):
            longest = max(several, key=lambda e: e.length)
            # an engine shares prefixes by itself
            self.packs = self.evaluator.engine is None and takes_packed(model, longest.sequences[0])
            self._most = longest_packed(model)
            self._model = weakref.ref(model)

    def trees(self, encoded: Sequence[Encoded]) -> list[list[TokenTree]]:
        # a batch has one mask for all rows, so no row is packed if a sequence of it is too long
        if not self.packs or (self._most is not None and max((e.length for e in encoded), default=0) > self._most):
            return super().trees(encoded)
        return [[self._packed(e, group) for group in self._groups(e)] for e in encoded]

    def _groups(self, encoded: Encoded) -> Iterator[slice]:
        """Yields the sequences that share a row: as many as its bound allows, at least one."""
        prompt = len(encoded.prompt)
        most = min(prompt + max(prompt, MOST_PACKED), self._most or UNBOUNDED)
        start, tokens = 0, 0
        before: Sequence[int] = ()
        for i, sequence in enumerate(encoded.sequences):
            added = len(sequence) - common_prefix(before, sequence)
            if tokens and tokens + added > most:
                yield slice(start, i)
                start, tokens, added = i, 0, len(sequence)
            tokens, before = tokens + added, sequence
        yield slice(start, len(encoded.sequences))

    def _packed(self, encoded: Encoded, group: slice) -> TokenTree:
        sequences, answers = encoded.sequences[group], encoded.answers[group]
        return packed_tree(sequences, [self.asked(s, a)[0] for s, a in zip(sequences, answers, strict=True)])


def _put_first(tokenizer: Any) -> list[int]:
    """Returns the tokens that a tokenizer puts before a text; tokens put after it would precede the answer."""
    whole, plain = (list(tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (True, False))
    starts = range(len(whole) - len(plain) + 1)
    return whole[: next((start for start in starts if whole[start : start + len(plain)] == plain), 0)]


class CausalInTorch(TextEvaluator):
    """Causal models: an option's score is the mean log-probability of its tokens."""

    def option_scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        means = []
        for rows in batch.passes:
            logits_XUV = logits_at(model, *rows.repeated(model.dtype, copies))
            means.append(_log_probs(logits_XUV, rows, copies).sum(2) / rows.valid_SK.sum(1))
        return batch.by_option(means)

    def token_log_probs(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        found = []
        for rows in batch.passes:
            logits_XUV = logits_at(model, *rows.repeated(model.dtype, copies))
            found.append(_log_probs(logits_XUV, rows, copies))
        return torch.cat(found, 1)

    def token_hits(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        found, hits = [], []
        for rows in batch.passes:
            logits_RUV = logits_at(model, *rows.repeated(model.dtype))
            likeliest_SK = logits_RUV.argmax(-1)[rows.row_S.unsqueeze(1), rows.slots_SK]
            found.append(_log_probs(logits_RUV, rows, 1)[0])
            hits.append((likeliest_SK == rows.tokens_SK) & rows.valid_SK)
        return torch.cat(found), torch.cat(hits)

    def likely_tokens(
        self, model: Any, batch: Batch, tokens_TC: Tensor | None, copies: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(copies)]
        start = 0
        for rows in batch.passes:
            right_T = rows.tokens_SK[rows.valid_SK]
            asked = None if tokens_TC is None else tokens_TC[start : start + len(right_T)]
            start += len(right_T)
            logits_XUV = logits_at(model, *rows.repeated(model.dtype, copies))
            for pairs, logits_RUV in zip(found, logits_XUV.chunk(copies), strict=True):
                logits_TV = logits_RUV[rows.row_S.unsqueeze(1), rows.slots_SK][rows.valid_SK]
                pairs.append(of_tokens(logits_TV.log_softmax(-1), right_T.to(logits_TV.device), asked))
        return [(torch.cat([s for s, _ in pairs]), torch.cat([t for _, t in pairs])) for pairs in found]

    def scores_and_features(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        means, hidden = [], []
        for rows in batch.passes:
            logits_RUV, hidden_RUD = logits_and_hidden_at(model, *rows.repeated(model.dtype))
            first_S = rows.option_S == 0
            means.append(_log_probs(logits_RUV, rows, 1).sum(2) / rows.valid_SK.sum(1))
            hidden.append(hidden_RUD[rows.row_S[first_S], rows.slots_SK[first_S, rows.shared_S[first_S]]])
        return batch.by_option(means)[0], torch.cat(hidden)

    def continuations(
        self, model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], wanted: Continuing, copies: int = 1
    ) -> list[list[list[int]]]:
        length, device, noisy = max(map(len, prompts)), device_of(model), wanted.noisy
        padding = [(tokenizer.pad_token_id,) * (length - len(prompt)) for prompt in prompts]
        padded_BL = torch.tensor([pads + tuple(p) for pads, p in zip(padding, prompts, strict=True)], device=device)
        mask_BL = torch.tensor([[0] * len(pads) + [1] * (length - len(pads)) for pads in padding], device=device)
        more: dict[str, Any] = {"stop_strings": ["\n"], "tokenizer": tokenizer} if wanted.one_line else {}
        if noisy is not None:
            rows = range(len(prompts))

            def sample(ids: Tensor, scores: Tensor) -> Tensor:
                return torch.cat([noisy(part, rows, ids.shape[1] - length) for part in scores.chunk(copies)])

            more["logits_processor"] = LogitsProcessorList([sample])
        if wanted.ended is not None:
            ended = wanted.ended

            def are_ended(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
                del scores
                written = (row[length:].tolist() for row in ids)
                return torch.tensor([ended(i % len(prompts), row) for i, row in enumerate(written)], device=device)

            more["stopping_criteria"] = StoppingCriteriaList([are_ended])
        if wanted.heard is not None:
            more["streamer"] = _Heard(wanted.heard)
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
        return [part.tolist() for part in output[:, length:].chunk(copies)]

    def writers(self, model: Any, tokenizer: Any, copies: int) -> list[Writer]:
        assert copies == 1

        def write(prompts: Sequence[Sequence[int]], wanted: Continuing) -> list[list[int]]:
            return self.continuations(model, tokenizer, prompts, wanted)[0]

        return [write]


class _Heard:
    """A streamer that is called with the new tokens of one prompt, and not with those of the prompt."""

    def __init__(self, heard: Callable[[int], None]) -> None:
        self._heard, self._begun = heard, False

    def put(self, value: Tensor) -> None:
        if self._begun:
            self._heard(int(value))
        self._begun = True

    def end(self) -> None:
        pass


def _log_probs(logits_XUV: Tensor, rows: Pass, copies: int) -> Tensor:
    """Returns the log-probabilities of the answer tokens of each copy, (copies, S, K); 0 where not valid."""
    log_probs_CRUV = logits_XUV.reshape(copies, len(rows.reads_RU), *logits_XUV.shape[1:]).log_softmax(-1)
    return log_probs_CRUV[:, rows.row_S.unsqueeze(1), rows.slots_SK, rows.tokens_SK] * rows.valid_SK
