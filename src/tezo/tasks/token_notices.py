"""Notices on the tokens of rows and options, for an objective that has been adapted to its model."""

from collections.abc import Callable, Hashable, Iterator, Sequence

from tezo.tasks.examples import Row, visible
from tezo.tasks.objectives import CausalObjective, Encoded, Objective
from tezo.tasks.row_format import Format

MANY_OPTIONS = 50
"""Number of options from which a notice says what it costs that they cannot share a row."""

MOST_NAMED = 10
"""Labels that are named of many."""
MOST_BEFORE, MOST_AFTER = 180, 120
"""Characters of a row that are shown: the last before what is learnt, the first of what is."""


def token_notices(objective: Objective) -> list[str]:
    """Notices for the user on texts cut or not known so far, options of the same tokens, and options that take long."""
    return [
        *_cut_prompts(objective),
        *_unknown_tokens(objective),
        *_equal_options(objective),
        *_repeated_prompts(objective),
    ]


def rows_as_read(form: Format, row: Row, objective: Objective, encoded: Encoded) -> tuple[str, str]:
    """What was made of the rows, in words: their shape with the fields that are read, and one row in tokens.

    Args:
        form: of the rows.
        row: one of them.
        objective: of the model.
        encoded: the row for the model.
    """
    named = {name: row.column(name) for name in form.columns}
    read = [name if own in (name, None) else f"{name} (here {own!r})" for name, own in named.items()]
    others = [own for own in row.fields if own not in named.values()]
    example, labels = encoded.example, ", ".join(form.labels[:MOST_NAMED]) + ", ..." * (len(form.labels) > MOST_NAMED)
    shape = (
        f"{form.shape} rows"
        + (f" of {', '.join(read)}" if read else "")
        + (f"; not read: {', '.join(others)}" if read and others else "")
        + (f"; labels: {labels}" if labels else "")
    )
    own = (example.label or 0) if len(encoded.sequences) > 1 else 0
    ids, count = encoded.sequences[own], encoded.answers[own] if isinstance(objective, CausalObjective) else 0
    prompt, whole = _decoded(objective, ids[: len(ids) - count]), _decoded(objective, ids)
    learnt = whole.removeprefix(prompt) if whole.startswith(prompt) else _decoded(objective, ids[len(ids) - count :])
    if count == 0:  # the answer is no text of the sequence
        learnt = "" if example.label is None else example.options[example.label]
    before = "..." * (len(prompt) > MOST_BEFORE) + prompt[-MOST_BEFORE:]
    after = learnt[:MOST_AFTER] + "..." * (len(learnt) > MOST_AFTER)
    tokens = f"{len(ids)} tokens" + f", the last {count} learnt" * (count > 0)
    return shape, f"{example.where}, as the model reads it ({tokens}): {before!r} -> {after!r}"


def _decoded(objective: Objective, ids: Sequence[int]) -> str:
    decoded = objective.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(decoded)


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
