"""The section `data` of a recipe."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The rows."""

    train: str | None = None
    """A JSONL, CSV, TSV or Parquet file, or a hub data set."""
    task: str | None = None
    """Instead of train: one of the paper's data sets, see `tezo tasks`."""
    dir: str | None = None
    """Folder with a task's rows, TASK/train.jsonl and TASK/validation.jsonl; None: the hub."""
    dev: str | None = None
    """Rows that choose the checkpoint, evaluated during the run: a file, or a split of the hub data set."""
    test: str | None = None
    """Rows for the figures before and after: a file, or a split of the hub data set. None: the dev rows."""
    hold_out: float = 0.1
    """Share of the training rows used as dev rows where neither dev nor test is given."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    train_split: str = "train"
    """Split of a hub data set to train on."""
    shape: Literal["auto", "completion", "messages", "label"] = "auto"
    """What a row is; auto goes by the fields of the first."""
    text: str = "text"
    """Field of a labelled text."""
    label: str = "label"
    """Field of its label."""
    prompt: str = "prompt"
    """Field of a prompt."""
    completion: str = "completion"
    """Field of its completion."""
    messages: str = "messages"
    """Field of a conversation."""
    template: str | None = None
    """Of labelled rows: {field} stands for a field, {mask} for the mask of a masked model."""
    label_words: dict[str, str] | None = None
    """Label -> word, or description for an encoder; None: the labels found, as they are."""
    num_train: int | None = None
    """Training rows; None: all, of a task 1000."""
    num_dev: int | None = None
    """Dev rows; None: all that are given; of a task 500 (cb and copa 100), taken from the training rows."""
    num_test: int | None = None
    """Test rows, the same for every seed; None: all, of a task at most 1000."""
    per_class: int | None = None
    """Training rows of each label (k-shot), and of a task as many dev rows but where num_dev says; None: num_train."""
    allow_fewer: bool = False
    """Take what there is where there are fewer rows than num_train or per_class says."""
    seed: int | None = None
    """Of the choice of rows; None: train.seed."""
    max_length: int | None = None
    """Longest input in tokens; None: the model's."""
