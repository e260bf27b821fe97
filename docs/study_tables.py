"""The tables of the study of bases that see the data, drawn from what `benchmarks/study.py` has written."""

from collections.abc import Callable
from typing import Any

import drawing
from drawing import grid, machine, read
from tezo_studies.reproduce import find_table
from tezo_studies.reproduce.study_tables import STUDY_DECODER

VARIED = "lozo-adam-act"
"""The line that removed lines are variants of."""


def study(name: str) -> str:
    """Dev losses of the study, with the forward passes that its lines take to a loss, and its figure."""
    made = study_numbers(name)
    if made is None:
        return ""
    lines = current_lines(made)
    cells = cells_of(made, lines, lambda column: mean_of(column["dev_loss"], "{:.3f}") + rate_of(column))
    rows = [[line["label"], *own, *shares_of(line)] for line, own in zip(lines, cells, strict=True)]
    heads = ["dev loss at the end (rate)", *map(column_head, made["columns"]), "to TeZO's", "to TeZO-Adam's"]
    return grid(heads, [row for row in rows if set(row[1:]) != {"-"}]) + (
        f"\nMeans over seeds {', '.join(map(str, made['seeds']))} ± standard deviations; of the rates the one with "
        "the lowest mean, * the first or last of its search. To TeZO's: the share of the budget after "
        "which a line has the loss that TeZO ends with on the same rows and seed, its median over columns and seeds, "
        f"and in how many it has it at all. {made['runs']} runs; `{made['command']}`; {machine(made)}.\n\n"
        f"![dev loss against forward passes](figures/{name}.png)\n\n"
        "*Dev loss against forward passes, those that collect a basis among them; means over seeds, bands from the "
        "least to the most.*\n"
    )


def study_removed(name: str) -> str:
    """Dev losses of the lines whose settings the library no longer has, below those of the line they vary."""
    made = study_numbers(name)
    if made is None:
        return ""
    current = current_lines(made)
    removed = [line for line in made["lines"] if line not in current]
    measured = made | {"columns": [key for key in made["columns"] if any(key in line["columns"] for line in removed)]}
    lines = [line for line in current if line["key"] == VARIED] + removed
    cells = cells_of(measured, lines, lambda column: mean_of(column["dev_loss"], "{:.3f}") + rate_of(column))
    rows = [[line["label"], *own] for line, own in zip(lines, cells, strict=True)]
    return grid(["dev loss at the end (rate)", *map(column_head, measured["columns"])], rows) if removed else ""


def study_accuracy(name: str) -> str:
    """Test accuracies of the study, with the gap to fine-tuning that a line leaves."""
    made = study_numbers(name)
    if made is None:
        return ""
    lines = current_lines(made)
    cells = cells_of(made, lines, lambda column: mean_of(column["accuracy"], "{:.1f}", 100) + gap_of(column))
    rows = [[line["label"], *own] for line, own in zip(lines, cells, strict=True)]
    gaps = {key: made["gaps"][key] for key in made["columns"] if made["gaps"][key]["points"] is not None}
    flat = [column_head(key) for key, gap in gaps.items() if not gap["is_gap"]]
    none = f" No gap, FT being less than {100 * made['least_gap']:.0f} points above MeZO: {'; '.join(flat)}."
    return grid(["test accuracy, percent", *map(column_head, made["columns"])], rows) + (
        "\nMeans over seeds ± standard deviations. In brackets the gap to FT that a line leaves, over the gap that "
        f"MeZO leaves.{none if flat else ''}\n"
    )


def study_short(name: str) -> str:
    """The forward passes that the study's lines take to a loss, and which are adapters."""
    made = study_numbers(name)
    if made is None:
        return ""
    rows = [
        [line["label"], *shares_of(line), f"{100 * line['basis_share']:.1f} %", "yes" if line["exports"] else "no"]
        for line in current_lines(made)
        if line["passes_to_tezo"]["of"] and len(line["columns"]) >= min(2, len(made["columns"]))
    ]
    heads = ["", "budget to TeZO's loss", "to TeZO-Adam's", "passes for the basis", "exact LoRA adapter"]
    best = next((line["label"] for line in made["lines"] if line["key"] == made["best_adapter"]), "none")
    return grid(heads, rows) + (
        f"\nMedians over columns ({', '.join(map(column_head, made['columns']))}) and {len(made['seeds'])} seeds, in "
        "brackets in how many the "
        f"loss is reached; the lowest median dev loss of an adapter: {best}. `{made['command']}`; {machine(made)}.\n"
    )


def study_ranked(name: str) -> str:
    """All lines without a gradient in the column that most of them were run in, the lowest dev loss first."""
    made = study_numbers(name)
    if made is None:
        return ""
    lines = [line for line in current_lines(made) if line["passes_to_tezo"]["of"]]
    key = max(made["columns"], key=lambda key: sum(key in line["columns"] for line in lines))
    ranked = sorted(
        ((line["label"], line["columns"][key]) for line in lines if key in line["columns"]),
        key=lambda pair: pair[1]["dev_loss"]["mean"],
    )
    rows = [
        [
            label,
            mean_of(column["dev_loss"], "{:.3f}") + rate_of(column),
            mean_of(column["accuracy"], "{:.1f}", 100),
            *shares_of(column),
        ]
        for label, column in ranked
    ]
    heads = [column_head(key), "dev loss at the end (rate)", "test accuracy, percent", "to TeZO's", "to TeZO-Adam's"]
    seeds = len(made["seeds"])
    return grid(heads, rows) + f"\nMeans over {seeds} seeds ± standard deviations; shares are medians over them.\n"


def study_decoder() -> str:
    """Losses of shared directions and of those of each example, batch size by batch size, and the figure."""
    made = study_numbers("study-decoder")
    if made is None:
        return ""
    heads, rows = [""], [[line["label"]] for line in made["lines"]]
    for key in made["columns"]:
        heads += [f"{column_head(key)}: dev loss (rate)", "test loss", "passes to TeZO's dev loss"]
        for row, line in zip(rows, made["lines"], strict=True):
            column = line["columns"].get(key)
            row += ["-"] * 3 if column is None else [
                mean_of(column["dev_loss"], "{:.3f}") + rate_of(column),
                mean_of(column["test_loss"], "{:.3f}"),
                share_of(column["passes_to_tezo"]),
            ]  # fmt: skip
    return grid(heads, rows) + (
        f"\nAfter {STUDY_DECODER.steps} steps, means over seeds {', '.join(map(str, made['seeds']))} ± standard "
        "deviations; of the rates the one with the lowest dev loss on the first seed, * the first or last of its "
        "search. Passes: the part of all after which a line has the dev loss that TeZO with shared directions ends "
        "with in the same column and seed, a median over seeds, and in how many it has it at all. "
        f"{made['runs']} runs; `{made['command']}`; {machine(made)}.\n\n"
        "![dev loss against forward passes](figures/study-decoder.png)\n\n"
        "*Dev loss against forward passes; dashed: the rows of a batch share a direction, solid: each has its own; "
        "means over seeds, bands from the least to the most.*\n"
    )


def study_numbers(name: str) -> Any:
    """What `benchmarks/study.py` has written; None: nothing yet."""
    return read(f"{name}/numbers") if (drawing.RESULTS / f"{name}/numbers.json").is_file() else None


def current_lines(made: Any) -> list[dict[str, Any]]:
    """The lines that the table still has: results keep those that it had when they were measured."""
    keys = {line.key for line in find_table(made["table"]).lines}
    return [line for line in made["lines"] if line["key"] in keys]


def cells_of(made: Any, lines: list[dict[str, Any]], shown: Callable[[dict[str, Any]], str]) -> list[list[str]]:
    """What is shown of each column of each line."""
    found = [[line["columns"].get(key) for key in made["columns"]] for line in lines]
    return [["-" if column is None else shown(column) for column in columns] for columns in found]


def column_head(key: str) -> str:
    """sst2-16 -> SST2, k=16; completions-batch-64 -> batch 64."""
    name, _, count = key.partition("-")
    return count.replace("-", " ") if count.startswith("batch") else f"{name.upper()}, k={count}"


def mean_of(values: dict[str, Any], form: str, by: float = 1.0) -> str:
    """Mean ± standard deviation."""
    if values["mean"] is None:
        return "-"
    shown = [form.format(by * values[key]) for key in ("mean", "stdev") if values[key] is not None]
    return " ± ".join(shown)


def rate_of(column: dict[str, Any]) -> str:
    """The learning rate, for behind a figure."""
    return f" ({column['rate']:g}{'*' * column['at_an_end']})" if column["rate"] is not None else ""


def gap_of(column: dict[str, Any]) -> str:
    """The share of the gap to fine-tuning that is left, for behind a figure."""
    return f" ({column['gap_left']:.2f})" if column["gap_left"] is not None else ""


def shares_of(line: dict[str, Any]) -> list[str]:
    """The share of the budget to each reference's loss."""
    return [share_of(line["passes_to_tezo"]), share_of(line["passes_to_tezo_adam"])]


def share_of(share: dict[str, Any]) -> str:
    """A share of the budget, and how many runs it is of."""
    median = "never" if share["median"] is None else f"{100 * share['median']:.0f} %"
    return f"{median} ({share['reached']} of {share['of']})" if share["of"] else "-"
