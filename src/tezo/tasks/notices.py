"""Notices on the labels of rows, and on their tokens for an objective that has been adapted to its model."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from tezo.tasks.examples import Example, Row, folded
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.ends import text_after
from tezo.tasks.objectives.objective import Cuts, Encoded, Objective
from tezo.tasks.rows import Format

MANY_OPTIONS = 50
"""Number of options from which a notice reports the cost of options that cannot share a row."""

MOST_NAMED = 10
"""Labels that are named of many."""
MOST_BEFORE, MOST_AFTER = 180, 120
"""Characters of a row that are shown: the last before the learnt part, the first in it."""


def token_notices(objective: Objective, max_new_tokens: int = 0) -> list[str]:
    """Returns notices on texts and answers cut, split or not known so far, and on options alike or slow.

    Args:
        objective: has encoded all texts, and written answers.
        max_new_tokens: the most tokens of these answers, which a notice names; 0: those that were cut are no news.
    """
    found: list[str] = []

    def note_rows(counted: Cuts, what: str, rest: str) -> None:
        if counted.rows:
            found.append(f"{counted.rows} {what} ({'; '.join(counted.examples)}){rest}")

    if max_new_tokens:
        note_rows(
            objective.unfinished,
            f"of {objective.written} answers were cut at {max_new_tokens} new tokens",
            "; --max-new-tokens (in Python, max_new_tokens=...) raises the limit.",
        )
    note_rows(
        objective.endless,
        "answer(s) have no end that is learnt",
        ": neither the tokenizer nor the model's generation_config names a token that ends a text (eos), so the model "
        "will write on up to the limit; set eos_token in the tokenizer.",
    )
    for note, counted in objective.notes.items():
        note_rows(counted, "row(s)", f": {note}")
    note_rows(
        objective.cuts,
        f"text(s) are longer than {objective.max_length} tokens",
        f": {objective.cuts.tokens} tokens cut, {objective.side_cut}. data.max_length sets the limit.",
    )
    note_rows(
        objective.unknown,
        "answer(s) have text that the tokenizer does not know",
        f": the model learns to write {objective.tokenizer.unk_token} for it; reword it, or take another model.",
    )
    note_rows(
        objective.split,
        "prompt(s) end inside a token that would span prompt and answer",
        ", so the model reads unusual pieces; where a prompt ends with a space, begin the answer with it instead.",
    )
    return found + _of_options(objective)


def _of_options(objective: Objective) -> list[str]:
    by_tokens = _groups(objective.options, objective.option_tokens)
    by_look = _groups(objective.options, folded)
    found = [
        f"{_named(equal)} are the same tokens for this model, so it cannot distinguish them; choose other "
        "data.label_words, or another model."
        for equal in by_tokens
    ]
    found += [
        f"{_named(alike)} differ only in case, blanks or invisible characters, and are different labels; where they "
        "are one, write them the same way."
        for alike in by_look
        if alike not in by_tokens
    ]
    count = len(objective.options)
    if objective.packs is False and count >= MANY_OPTIONS:
        found.append(
            f"this model does not take options that share a row, so it reads each prompt {count} times, once for each "
            "option, in every step and evaluation; a model of another architecture, or fewer labels, take less."
        )
    return found


def leak_notices(train: Sequence[Example], dev: Sequence[Example], test: Sequence[Example]) -> list[str]:
    """Returns notices on test rows among the dev rows, and on dev and test rows among the training rows.

    Rows are the same where their prompts and answers are, white space and case aside; other fields are not compared.
    """

    def count(rows: Sequence[Example], among: Sequence[Example]) -> int:
        known = {example.content for example in among}
        return sum(example.content in known for example in rows)

    found = []
    if chose := count(test, dev):
        found.append(
            f"{chose} of the {len(test)} test rows are dev rows too, by their prompts and answers; dev rows choose the "
            "step to keep, so that the scores of these rows are flattered."
        )
    held = [*dev, *test]
    if trained := count(held, train):
        found.append(
            f"{trained} of the {len(held)} dev and test rows are training rows too, by their prompts and answers; "
            "their loss and scores measure memorised text."
        )
    return found


def label_notices(examples: Sequence[Example], labels: Sequence[str]) -> list[str]:
    """Returns notices on training rows with labels: texts with two of them, and labels with one row or none."""
    found = []
    by_prompt: dict[str, list[Example]] = {}
    for example in examples:
        by_prompt.setdefault(folded(example.prompt), []).append(example)
    apart = [same for same in by_prompt.values() if len({row.label for row in same}) > 1]
    if apart:
        first = apart[0][0]
        other = next(row for row in apart[0] if row.label != first.label)
        found.append(
            f"{sum(map(len, apart))} training rows have the text of another and not its label, such as {first.where} "
            f"and {other.where}; leave the right ones."
        )
    counts = Counter(example.label for example in examples)
    rows = {name: counts[number] for number, name in enumerate(labels)}
    none, single = ([repr(name) for name, number in rows.items() if number == count] for count in (0, 1))
    if none:
        found.append(f"no training row has the label {_listed(none)}; give some, or little is learnt of it.")
    if single:
        found.append(
            f"{len(single)} of {len(labels)} labels ({_listed(single)}) have one training row each; give more, or, "
            "where answers are free text, rows with a prompt and a completion."
        )
    return found


def _listed(names: Sequence[str]) -> str:
    """Names the first labels of many."""
    return ", ".join(names[:MOST_NAMED]) + ", ..." * (len(names) > MOST_NAMED)


def _groups(options: Sequence[str], key: Callable[[str], Hashable]) -> list[list[str]]:
    """Returns options of equal key, where there are several."""
    found: dict[Hashable, list[str]] = {}
    for option in options:
        found.setdefault(key(option), []).append(option)
    return [equal for equal in found.values() if len(equal) > 1]


def _named(options: Sequence[str]) -> str:
    return " and ".join(repr(option.strip()) for option in options)


def rows_as_read(
    form: Format, row: Row, objective: Objective, encoded: Encoded, *, scored: bool = False
) -> tuple[str, str]:
    """Returns (the shape of the rows with the fields that are read, one `row` of them as the model reads it), in words.

    `scored`: whether a scorer gets all fields, and the text of the model in place of an answer.
    """
    named = {name: row.column(name) for name in form.columns if not (scored and name in form.answers)}
    found = {name: field for name, field in named.items() if field is not None}
    read = [name if field == name else f"{name} (here {field!r})" for name, field in found.items()]
    others = [field for field in row.fields if field not in named.values()]
    example, labels = encoded.example, _listed(form.labels)
    shape = (
        f"{form.shape} rows"
        + (f" of {', '.join(read)}" if read else "")
        + (f"; {'for the scorer' if scored else 'not read'}: {', '.join(others)}" if read and others else "")
        + (f"; labels: {labels}" if labels else "")
    )
    option = (example.label or 0) if len(encoded.sequences) > 1 else 0
    ids, count = encoded.sequences[option], encoded.answers[option] if isinstance(objective, CausalObjective) else 0
    before, behind = ids[: len(ids) - count], ids[len(ids) - count :]
    prompt = text_after(objective.tokenizer, (), before, special=True)
    learnt = text_after(objective.tokenizer, before, behind, special=True)
    if count == 0:  # the answer is no text of the sequence
        learnt = "" if example.label is None else example.options[example.label]
    shown = "..." * (len(prompt) > MOST_BEFORE) + prompt[-MOST_BEFORE:]
    after = repr(learnt[:MOST_AFTER] + "..." * (len(learnt) > MOST_AFTER))
    after = "its text, which is scored" if scored else after
    tokens = f"{len(ids)} tokens" + f", the last {count} learnt" * (count > 0)
    return shape, f"{example.where}, as the model reads it ({tokens}): {shown!r} -> {after}"
