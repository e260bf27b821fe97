"""What a report says of a run's answers: counts for each label, and a few rows before and after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tezo.report.report_tables import ARROW, MISSING, Cell, Table
from tezo.runs.answers_file import OUTCOMES, KeptAnswers, LabelCounts, ShownAnswer
from tezo.runs.result_words import count_text

MOST_LABELS = 100
MOST_SHOWN = 12
"""Labels and rows on the page; a stranger's file can name thousands."""
_KNOWN = {words: outcome for outcome, words in OUTCOMES.items()}


@dataclass(frozen=True)
class AnsweredRows:
    """Rows with their answers, as the page shows them.

    Attributes:
        counted: which of the test rows were counted, where it is not all; else empty.
        outcomes: in words -> how many rows, with their thousands apart.
        labels: a line for each label; None where rows share none.
        shown: a few rows, each with whether it was right before and is right after; None for free text.
    """

    counted: str
    outcomes: Mapping[str, str]
    labels: Table | None
    shown: Sequence[tuple[ShownAnswer, tuple[bool, bool] | None]]


def answered_rows(answers: KeptAnswers) -> AnsweredRows:
    """What the page shows of answers."""
    part = answers.rows < answers.of and bool(answers.outcomes)
    return AnsweredRows(
        counted=f"The first {count_text(answers.rows)} of {count_text(answers.of)} rows are counted." if part else "",
        outcomes={outcome: count_text(number) for outcome, number in [*answers.outcomes.items()][:MOST_SHOWN]},
        labels=labels_table(answers.labels) if answers.labels else None,
        shown=[(row, _KNOWN.get(row.outcome)) for row in answers.shown[:MOST_SHOWN]],
    )


def labels_table(labels: Sequence[LabelCounts]) -> Table:
    """Rows, right answers, recall and precision of each label before and after, and of all labels together."""
    rows = [(one.label, _label_cells(one)) for one in labels[:MOST_LABELS]]
    left_out = len(labels) - len(rows)
    before, after = sum(one.before.right for one in labels), sum(one.after.right for one in labels)
    total = sum(one.rows for one in labels)
    all_cells = [Cell(count_text(total), total), _counts(before, after), _shares(before, after, total, total)]
    rows.append(("all labels", [*all_cells, Cell(MISSING)]))
    caption = "Answers by label" + (f", {count_text(left_out)} of the labels left out" if left_out else "")
    return Table(caption, ("label", "rows", "right", "recall", "precision"), rows)


def _label_cells(one: LabelCounts) -> list[Cell]:
    return [
        Cell(count_text(one.rows), one.rows),
        _counts(one.before.right, one.after.right),
        _shares(one.before.right, one.after.right, one.rows, one.rows),
        _shares(one.before.right, one.after.right, one.before.answered, one.after.answered),
    ]


def _counts(before: int, after: int) -> Cell:
    return Cell(f"{count_text(before)}{ARROW}{count_text(after)}".replace(" ", "\N{NO-BREAK SPACE}"))


def _shares(before: int, after: int, of_before: int, of_after: int) -> Cell:
    bar = (before / of_before, after / of_after) if of_before and of_after else None
    return Cell(f"{_share(before, of_before)}{ARROW}{_share(after, of_after)}", bar=bar)


def _share(part: int, whole: int) -> str:
    """A whole percentage; a dash for a share of nothing."""
    return f"{100 * part / whole:.0f}\N{NO-BREAK SPACE}%" if whole else MISSING
