"""How texts are computed in llama.cpp: tokens that several texts begin with once, so many at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tezo.tasks.objectives.batch import TokenTree, common_prefix, packed_tree

TOKENS_AT_ONCE = 512
"""Tokens that are computed together. More make attention slower: each token is compared with all of them."""
PLACES_AT_ONCE = 128
"""Places whose logits over the vocabulary are kept at a time."""
MOST_TEXTS = 64
"""Texts of a context at a time."""
LEAST_PREFIX = 16
"""Tokens of a common beginning that is worth a separate batch."""

Numbers = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """Tokens of trees of texts, T of them, each in some of S sequences.

    Attributes:
        token_T: int32.
        position_T: int32, position in its texts.
        count_T: int32, number of texts that it is part of.
        seq_TS: int32, these texts, the first `count_T` of a row.
        read_T: bool, whether its output is read.
        output_T: bool, whether its output is computed, of all that are read and perhaps of others.
        texts: text of each sequence.
    """

    token_T: Numbers
    position_T: Numbers
    count_T: Numbers
    seq_TS: Numbers
    read_T: Numbers
    output_T: Numbers
    texts: Sequence[int]

    def pieces(self) -> Iterator["Part"]:
        """Yields parts of at most `TOKENS_AT_ONCE` tokens and `PLACES_AT_ONCE` outputs, in order."""
        start = 0
        while start < len(self.token_T):
            fits = self.output_T[start : start + TOKENS_AT_ONCE].cumsum() <= PLACES_AT_ONCE
            stop = start + int(fits.sum())
            arrays = {f.name: getattr(self, f.name)[start:stop] for f in fields(self) if f.name != "texts"}
            yield replace(self, **arrays)
            start = stop

    def with_outputs(self) -> "Part":
        """Returns the same tokens, each with its output computed."""
        return replace(self, output_T=np.ones_like(self.read_T))


@dataclass(frozen=True)
class Plan:
    """How texts are computed: what all have in common first, then parts, each after the one before is forgotten.

    Attributes:
        prefix: the common beginning; None: there is none that is worth it.
        start: its length.
        parts: the rest of the texts.
        places: numbers of the places, in the order in which they are read.
        size: largest number of tokens at a time.
    """

    prefix: Part | None
    start: int
    parts: Sequence[Part]
    places: list[int]
    size: int


def plan_of(
    texts: Sequence[Sequence[int]],
    text_P: Sequence[int],
    position_P: Sequence[int],
    group_T: Sequence[int] | None = None,
    *,
    alone: bool = False,
) -> Plan:
    """Returns the plan of reading places of texts.

    Args:
        texts: token ids of each.
        text_P: text of each place, ascending.
        position_P: position in it, ascending within a text.
        group_T: number of each text's group; texts of different groups share no tokens. None: all are of one.
        alone: whether each text is computed by itself, as models with a recurrent state need it.
    """
    read: list[list[tuple[int, int]]] = [[] for _ in texts]  # (position, place)
    for place, (text, position) in enumerate(zip(text_P, position_P, strict=True)):
        read[text].append((position, place))
    groups = list(range(len(texts))) if alone else [0] * len(texts) if group_T is None else list(group_T)
    order = sorted(range(len(texts)), key=lambda i: (groups[i], tuple(texts[i])))
    start = min(common_prefix(texts[order[0]], texts[order[-1]]), min(position_P))
    start = start if start >= LEAST_PREFIX and len(texts) > 1 and len(set(groups)) == 1 else 0
    prefix = None
    if start:
        every = np.broadcast_to(np.arange(MOST_TEXTS, dtype=np.int32), (start, MOST_TEXTS))
        counts, none = np.full(start, MOST_TEXTS), np.zeros(start, dtype=bool)
        first = [order[0]] * MOST_TEXTS
        prefix = Part(np.array(texts[order[0]][:start]), np.arange(start), counts, every, none, none, first)
    parts, places, size = [], [], 0
    for chunk in _chunks([texts[i][start:] for i in order], [groups[i] for i in order], 1 if alone else MOST_TEXTS):
        trees = []
        for group in sorted({groups[order[i]] for i in chunk}):
            members = [order[i] for i in chunk if groups[order[i]] == group]
            tree = packed_tree([texts[i][start:] for i in members], [[p - start for p, _ in read[i]] for i in members])
            place_of = {slot: place for i, slots in zip(members, tree.slots, strict=True)
                        for slot, (_, place) in zip(slots, read[i], strict=True)}  # fmt: skip
            places += [place_of[slot] for slot in range(len(tree.reads))]
            trees.append(part_of(tree, start, members))
        parts.append(_joined(trees))
        size = max(size, start + len(parts[-1].token_T))
    return Plan(prefix, start, parts, places, size)


def _chunks(texts: Sequence[Sequence[int]], groups: Sequence[int], most: int) -> Iterator[range]:
    """Yields neighbours among sorted texts whose trees have at most `TOKENS_AT_ONCE` tokens, or one text."""
    first, tokens = 0, 0
    for i, text in enumerate(texts):
        is_alike = i > first and groups[i] == groups[i - 1]
        added = len(text) - (common_prefix(texts[i - 1], text) if is_alike else 0)
        if i > first and (tokens + added > TOKENS_AT_ONCE or i - first == most):
            yield range(first, i)
            first, tokens, added = i, 0, len(text)
        tokens += added
    yield range(first, len(texts))


def part_of(tree: TokenTree, start: int, texts: Sequence[int]) -> Part:
    """Returns the tokens of the tree of these texts, the first of which are at position `start`."""
    count = len(tree.tokens)
    leaves = np.array([tree.reads[slots[-1]] for slots in tree.slots])
    order = leaves.argsort(kind="stable")
    first_T = np.searchsorted(leaves[order], np.arange(count))
    last_T = np.searchsorted(leaves[order], np.array(tree.ends))
    seq_TS, read_T = np.zeros((count, int((last_T - first_T).max())), np.int32), np.zeros(count, dtype=bool)
    for token, (first, last) in enumerate(zip(first_T, last_T, strict=True)):
        seq_TS[token, : last - first] = order[first:last]
    read_T[list(tree.reads)] = True
    positions = np.array(tree.positions) + start
    return Part(np.array(tree.tokens), positions, last_T - first_T, seq_TS, read_T, read_T, list(texts))


def _joined(parts: Sequence[Part]) -> Part:
    """Returns trees behind each other, whose sequences are numbered on."""
    if len(parts) == 1:
        return parts[0]
    width, before, rows = max(part.seq_TS.shape[1] for part in parts), 0, []
    for part in parts:
        rows.append(np.pad(part.seq_TS + before, ((0, 0), (0, width - part.seq_TS.shape[1]))))
        before += len(part.texts)
    arrays = {
        f.name: np.concatenate([getattr(part, f.name) for part in parts])
        for f in fields(Part)
        if f.name not in ("seq_TS", "texts")
    }
    return Part(**arrays, seq_TS=np.concatenate(rows), texts=[text for part in parts for text in part.texts])
