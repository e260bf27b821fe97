"""Folders for tasks: rows of each, a model of each kind, and a run on one of them."""

from pathlib import Path

from folders import bpe_tokenizer, saved, settings, tezo, tiny_model, words_tokenizer, write_rows

from tezo.tasks.catalogue import TASKS, example_row, task
from tezo.tasks.rows import Format

LABEL_WORDS = [
    "terrible", "great", "Yes", "No", "Maybe", "okay",
    "Expression", "Entity", "Description", "Human", "Location", "Number",
]  # fmt: skip


def rows_of(name: str, count: int, first: int = 0) -> list[dict]:
    """Rows of a task that differ in their labels and in a number, from `first` on, which is in their text too."""
    row = example_row(name).fields
    text = max((key for key, value in row.items() if isinstance(value, str)), key=lambda key: len(row[key]))
    words = next(iter(TASKS[name].wordings.values())).options
    field = "coarse_label" if name == "trec" else "label"
    labels = {field: len(words) or 2} if field in row else {}
    return [
        {**row, text: f"{row[text]} {first + i}", **{key: i % most for key, most in labels.items()}, "idx": first + i}
        for i in range(count)
    ]


def write_task(root: Path, name: str, train: int, validation: int = 6) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    write_rows(folder / "train.jsonl", rows_of(name, train))
    write_rows(folder / "validation.jsonl", rows_of(name, validation, first=train))
    return root


def models_and_tasks(root: Path) -> Path:
    """`root` with a model of each kind, and every task's rows in "data"."""
    tokenizer = bpe_tokenizer()
    saved(tiny_model("opt", len(tokenizer)), tokenizer, root / "causal")
    for kind, family in (("masked", "roberta"), ("encoder", "bert")):
        tokenizer = words_tokenizer(closing=True, more=LABEL_WORDS)
        saved(tiny_model(family, len(tokenizer)), tokenizer, root / kind)
    for name in TASKS:
        write_task(root / "data", name, 24)
    return root


def trained(home: Path, name: str, kind: str, output: Path, **values):
    flags = ("--model", home / kind, "--task", name, "--data-dir", home / "data", "--steps", 1, "--output", output)
    named = {"method__name": "head-feedback", "method__rank": 4, "train__batch_size": 4} | values
    return tezo("train", *flags, "--json", *settings(**named))


def form_of(name: str, kind: str) -> Format:
    return task(name).wording(kind)
