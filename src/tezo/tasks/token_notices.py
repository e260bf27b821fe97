"""Notices on the tokens of rows and options, for an objective that has been adapted to its model."""

from collections.abc import Iterator

from tezo.tasks.objectives import Objective

MANY_OPTIONS = 50
"""Number of options from which a notice says what it costs that they cannot share a row."""


def token_notices(objective: Objective) -> list[str]:
    """Notices for the user on prompts cut so far, options that have the same tokens, and options that take long."""
    return [*_cut_prompts(objective), *_equal_options(objective), *_repeated_prompts(objective)]


def _cut_prompts(objective: Objective) -> Iterator[str]:
    cuts = objective.cuts
    if cuts.rows:
        yield (
            f"{cuts.rows} prompt(s) are longer than {objective.max_length} tokens ({'; '.join(cuts.examples)}): "
            f"{cuts.tokens} tokens cut, {objective.side_cut}. data.max_length sets the limit."
        )


def _equal_options(objective: Objective) -> Iterator[str]:
    by_tokens: dict[tuple[int, ...], list[str]] = {}
    for option in objective.options:
        by_tokens.setdefault(tuple(objective.tokenizer(option)["input_ids"]), []).append(repr(option.strip()))
    for equal in by_tokens.values():
        if len(equal) > 1:
            yield (
                f"{' and '.join(equal)} are the same tokens for this model, so it cannot tell them apart; "
                "choose other data.label_words, or another model."
            )


def _repeated_prompts(objective: Objective) -> Iterator[str]:
    count = len(objective.options)
    if objective.packs is False and count >= MANY_OPTIONS:
        yield (
            f"this model does not take options that share a row, so it reads each prompt {count} times, once for each "
            "option, in every step and evaluation; a model of another architecture, or fewer labels, take less."
        )
