"""Notices on the tokens of rows and options."""

from collections.abc import Iterator

from tezo.tasks.objectives import Objective


def token_notices(objective: Objective) -> list[str]:
    """Notices for the user on prompts cut so far, and on options that have the same tokens."""
    return [*_cut_prompts(objective), *_equal_options(objective)]


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
