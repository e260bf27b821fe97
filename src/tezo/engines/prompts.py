"""Prompts: how log-probabilities at places of texts are asked of a program that only continues texts.

A text is a prompt. Log-probabilities of its next tokens come with the prompt; those of other tokens at a place are
asked for by a prompt that ends there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tezo.forward.engine import NOTHING, Asked, Told


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what it tells of which places.

    Attributes:
        tokens: token ids.
        places: place -> its position in the prompt. Without `wanted` the next token of the prompt is what is asked for.
        wanted: tokens that are asked for at the end of the prompt; empty: log-probabilities of the prompt itself.
    """

    tokens: Sequence[int]
    places: Mapping[int, int]
    wanted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What vLLM tells of one prompt: for each position of the next token, token -> (log-probability, rank from 1)."""

    next: Mapping[int, Mapping[int, tuple[float, int]]]


def prompts_of(asked: Asked, *, one_by_one: bool = False) -> list[Prompt]:
    """Returns prompts that tell what is asked for.

    Args:
        asked: the request.
        one_by_one: whether each of several tokens at a place has a prompt of its own, which ends with it.
    """
    found: list[Prompt] = []
    places: list[list[int]] = [[] for _ in asked.texts]
    for place, text in enumerate(asked.text_P.tolist()):
        places[text].append(place)
    positions, wanted = (
        asked.position_P.tolist(),
        [[token for token in tokens if token != NOTHING] for tokens in asked.tokens_PC.tolist()],
    )
    for text, group in zip(asked.texts, places, strict=True):
        whole = [*text, wanted[group[-1]][0]]
        follows = [p for p in group if wanted[p] == [whole[positions[p] + 1]]]
        if follows:
            end = positions[follows[-1]] + 2
            found.append(Prompt(whole[:end], {p: positions[p] for p in follows}))
        for place in group:
            begun = text[: positions[place] + 1]
            if place not in follows and one_by_one:
                found += [Prompt([*begun, token], {place: positions[place]}) for token in wanted[place]]
            elif place not in follows:
                found.append(Prompt(begun, {place: positions[place]}, tuple(wanted[place])))
    return found


def told_of(asked: Asked, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> Told:
    """Returns what the answers to these prompts tell."""
    count = len(asked.text_P)
    log_probs_PC = torch.zeros(asked.tokens_PC.shape)
    likely_PL = torch.zeros(count, asked.likely, dtype=torch.int64)
    values_PL = torch.zeros(count, asked.likely)
    for prompt, answer in zip(prompts, answers, strict=True):
        for place, position in prompt.places.items():
            table = answer.next[position + 1]
            for slot, token in enumerate(asked.tokens_PC[place].tolist()):
                if token in table:  # another prompt may tell of others
                    log_probs_PC[place, slot] = table[token][0]
            best = sorted(table, key=lambda token: table[token][1])[: asked.likely]
            likely_PL[place] = torch.tensor(best)
            values_PL[place] = torch.tensor([table[token][0] for token in best])
    return Told(log_probs_PC, likely_PL, values_PL)
