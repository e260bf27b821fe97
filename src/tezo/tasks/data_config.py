"""The section `data` of a recipe."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The section `data`: where rows come from, how they become prompts, and how many are used."""

    train: str | None = None
    """Training rows: a file, a folder or pattern (data/*.jsonl) of files, or a hub data set; see docs/rows.md."""
    task: str | None = None
    """One of the paper's data sets, instead of train; see `tezo tasks`."""
    dir: str | None = None
    """Folder with the task's rows, TASK/train.jsonl and TASK/validation.jsonl. Default: the hub."""
    dev: str | None = None
    """Dev rows, evaluated during the run to choose the checkpoint: a file, or a split of the hub data set."""
    test: str | None = None
    """Rows for the metrics before and after training: a file, or a split of the hub data set. Default: the dev rows."""
    hold_out: float | None = None
    """Share of rows held out as dev rows if none are given; 0: none. Default: 0.1, at least 32 rows (0.3 of few)."""
    subset: str | None = None
    """Configuration name of the hub data set."""
    train_split: str = "train"
    """Split to train on, of the hub data set or the task."""
    streaming: bool = False
    """Read only the first rows of a hub data set: num_train, and those that are held out; test rows by num_test."""
    shape: Literal["auto", "completion", "messages", "instruction", "label", "text"] = "auto"
    """Shape: completion, messages, instruction, label or text. Default auto: by the fields of the first row."""
    text: str = "text"
    """Name of the field with the text of a labelled row, or of plain text."""
    label: str = "label"
    """Name of the field with the label."""
    prompt: str = "prompt"
    """Name of the field with the prompt."""
    completion: str = "completion"
    """Name of the field with the completion."""
    messages: str = "messages"
    """Name of the field with the messages of a conversation. Where it is missing: conversations."""
    template: str | None = None
    """Prompt of labelled rows: {field} inserts a field, {mask} the mask token. Default: by the kind of model."""
    label_words: dict[str, str] | None = None
    """Word (encoder: description, classifier: class) that stands for each label. Default: the labels themselves."""
    num_train: int | None = None
    """Training rows. Default: all; for a task 1000."""
    num_dev: int | None = None
    """Dev rows. Default: all that are given or held out; for a task 500 (cb and copa 100), from the training rows."""
    num_test: int | None = None
    """Test rows, the same for every seed. Default: all; for a task at most 1000."""
    per_class: int | None = None
    """Training rows per label (k-shot). A task also draws as many dev rows per label, unless num_dev is set."""
    allow_fewer: bool = False
    """Use all rows there are if they are fewer than num_train, num_dev, num_test or per_class."""
    seed: int | None = None
    """Seed of the choice of rows. Default: train.seed."""
    max_length: int | None = None
    """Maximum input length in tokens. Default: the model's maximum, at most 2048."""
