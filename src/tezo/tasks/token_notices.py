"""What the tokenizer made of rows and options, for people."""

from collections.abc import Iterator

from tezo.tasks.objectives import Objective


def token_notices(objective: Objective) -> list[str]:
    """What the tokenizer made of the rows so far and of the options, in words: cut prompts, options that are alike."""
    return [*_of_cuts(objective), *_of_options(objective)]


def _of_cuts(objective: Objective) -> Iterator[str]:
    cuts = objective.cuts
    if cuts.rows:
        yield (
            f"{cuts.rows} prompt(s) are longer than {objective.max_length} tokens ({'; '.join(cuts.examples)}): "
            f"{cuts.tokens} tokens cut, {objective.side_cut}. data.max_length sets the bound."
        )


def _of_options(objective: Objective) -> Iterator[str]:
    by_tokens: dict[tuple[int, ...], list[str]] = {}
    for option in objective.options:
        by_tokens.setdefault(tuple(objective.tokenizer(option)["input_ids"]), []).append(repr(option.strip()))
    for alike in by_tokens.values():
        if len(alike) > 1:
            yield (
                f"{' and '.join(alike)} are the same tokens to this model, so that no training tells them apart; "
                "choose other data.label_words, or another model."
            )
