"""Notices on the tokens of rows and options, for an objective that has been adapted to its model."""

from collections.abc import Callable, Hashable, Iterator, Sequence

from tezo.tasks.examples import visible
from tezo.tasks.objectives import Objective

MANY_OPTIONS = 50
"""Number of options from which a notice says what it costs that they cannot share a row."""


def token_notices(objective: Objective) -> list[str]:
    """Notices for the user on texts cut, split or not known so far, and on options that are alike or take long."""
    return [
        *_cut_prompts(objective),
        *_unknown_tokens(objective),
        *_split_tokens(objective),
        *_equal_options(objective),
        *_repeated_prompts(objective),
    ]


def _cut_prompts(objective: Objective) -> Iterator[str]:
    cuts = objective.cuts
    if cuts.rows:
        yield (
            f"{cuts.rows} text(s) are longer than {objective.max_length} tokens ({'; '.join(cuts.examples)}): "
            f"{cuts.tokens} tokens cut, {objective.side_cut}. data.max_length sets the limit."
        )


def _unknown_tokens(objective: Objective) -> Iterator[str]:
    unknown = objective.unknown
    if unknown.rows:
        yield (
            f"{unknown.rows} answer(s) have text that the tokenizer does not know ({'; '.join(unknown.examples)}): the "
            f"model learns to write {objective.tokenizer.unk_token} for it; reword it, or take another model."
        )


def _split_tokens(objective: Objective) -> Iterator[str]:
    split = objective.split
    if split.rows:
        yield (
            f"{split.rows} prompt(s) end inside what would be one token with the answer ({'; '.join(split.examples)}), "
            "so the model reads unusual pieces; where a prompt ends with a space, begin the answer with it instead."
        )


def _equal_options(objective: Objective) -> Iterator[str]:
    by_tokens = _groups(objective.options, objective.option_tokens)
    for equal in by_tokens:
        yield (
            f"{_named(equal)} are the same tokens for this model, so it cannot tell them apart; "
            "choose other data.label_words, or another model."
        )
    for alike in _groups(objective.options, lambda option: visible(option).casefold()):
        if alike not in by_tokens:
            yield (
                f"{_named(alike)} differ only in case, or in what is not seen, and are different labels; "
                "where they are one, write them the same way."
            )


def _groups(options: Sequence[str], key: Callable[[str], Hashable]) -> list[list[str]]:
    """Options of equal key, where there are several."""
    found: dict[Hashable, list[str]] = {}
    for option in options:
        found.setdefault(key(option), []).append(option)
    return [equal for equal in found.values() if len(equal) > 1]


def _named(options: Sequence[str]) -> str:
    return " and ".join(repr(option.strip()) for option in options)


def _repeated_prompts(objective: Objective) -> Iterator[str]:
    count = len(objective.options)
    if objective.packs is False and count >= MANY_OPTIONS:
        yield (
            f"this model does not take options that share a row, so it reads each prompt {count} times, once for each "
            "option, in every step and evaluation; a model of another architecture, or fewer labels, take less."
        )
