"""Reads the rows of a configuration, and divides them into training, dev and test rows by the seed."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from tezo.directions.random import permutation
from tezo.models.kinds import IN_MEMORY
from tezo.models.local_names import hint, is_gone
from tezo.system.digests import hash_of
from tezo.system.errors import RequestError
from tezo.tasks.catalogue import task
from tezo.tasks.examples import Row, check_fields_differ, class_names, rows_of_fields
from tezo.tasks.row_files import DataConfig
from tezo.tasks.row_sources import is_local, read_rows
from tezo.tasks.rows import Format

T = TypeVar("T")

Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file, folder or pattern, the name of a hub data set, a list of dicts, a DataFrame of pandas, or a split of a data
set of `datasets`."""

OF_FORMATS = ("shape", "text", "label", "prompt", "completion", "messages", "template", "label_words")
"""Settings of rows that are not of a task."""

LEAST_HELD_OUT, SHARE_OF_FEW, MOST_HELD_OUT = 32, 0.3, 500
"""Rows held out by default: at least so many, or this share where there are few, and at most so many. The accuracy on
32 rows has a standard error of at most 9 points."""


def parts(rows: Sequence[T], counts: Sequence[int], seed: int, name: str) -> list[list[T]]:
    """Returns disjoint random parts of `rows`, in the order of `rows`; draws of different names are independent.

    `counts`: number of rows of each part; their sum is at most `len(rows)`.
    """
    order = permutation(len(rows), seed=seed, step=0, name=name)
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [[rows[i] for i in sorted(order[a:b])] for a, b in itertools.pairwise(bounds)]


def per_class(
    labels: Sequence[int | None], counts: Sequence[int], names: Sequence[str], seed: int, *, fewer: bool = False
) -> list[list[int]]:
    """Returns the indices of rows, ascending, of disjoint random parts with `counts` rows of each label.

    `labels` are indices into `names`. Too few rows of a label are a `RequestError`, or, with `fewer`, divided among the
    parts in proportion.
    """
    chosen: list[list[int]] = [[] for _ in counts]
    total = sum(counts)
    for index, label in enumerate(names):
        with_label = [i for i, row_label in enumerate(labels) if row_label == index]
        if len(with_label) < total and not fewer:
            also = " and as many dev rows" if len(counts) > 1 else ""
            raise RequestError(
                f"data.per_class is {counts[0]}{also}, but label {label!r} has {len(with_label)} rows to draw from; "
                "lower it, or set data.allow_fewer."
            )
        wanted = [len(with_label) * count // total for count in counts] if len(with_label) < total else counts
        for part, rows in zip(chosen, parts(with_label, wanted, seed, f"per_class.{label}"), strict=True):
            part += rows
    return [sorted(part) for part in chosen]


def count_held_out(rows: int, share: float | None) -> int:
    """Returns how many of some rows are held out, from 1 to `MOST_HELD_OUT`.

    `share` of them; None: a tenth, at least `LEAST_HELD_OUT` or `SHARE_OF_FEW` of the rows.
    """
    least = min(LEAST_HELD_OUT, round(SHARE_OF_FEW * rows))
    count = round(share * rows) if share is not None else max(least, round(rows / 10))
    return min(MOST_HELD_OUT, max(1, count))


def hold_out(rows: Sequence[T], groups: Sequence[str], count: int, seed: int) -> tuple[list[T], list[T]]:
    """Returns (kept rows, `count` held-out rows), with the groups in proportion in both.

    Raises:
        RequestError: there are too few rows.
    """
    if count >= len(rows):
        raise _too_few(len(rows), count)
    order = permutation(len(rows), seed=seed, step=0, name="hold_out")
    by_group: dict[str, list[int]] = {}
    for i in order:
        by_group.setdefault(groups[i], []).append(i)
    # every k-th of the rows sorted by group, in random order within a group
    in_groups = [i for name in sorted(by_group) for i in by_group[name]]
    held = {in_groups[(2 * place + 1) * len(rows) // (2 * count)] for place in range(count)}
    return [row for i, row in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]


def too_few_to_judge(count: int) -> bool:
    """Returns whether the loss of so many dev rows is too much by chance to choose anything by."""
    return count < LEAST_HELD_OUT


def are_few(count: int) -> bool:
    """Returns whether `SHARE_OF_FEW` of so many rows are too few dev rows to choose by."""
    return too_few_to_judge(round(SHARE_OF_FEW * count))


def _too_few(available: int, count: int) -> RequestError:
    return RequestError(
        f"data.train has {available} row(s), too few to hold {count} out as dev rows; give data.dev, or "
        "data.test with data.hold_out=0 to go without."
    )


NO_ROWS = "-"
"""Value of data.train for a base model that is evaluated without training rows."""

NUM_TRAIN, NUM_TEST = 1000, 1000
"""Default numbers of training and test rows of a task, as in MeZO and later papers."""

MOST_DEV = 0.4
"""Maximum fraction of dev rows, for a task with too few rows. CB and COPA keep the papers' numbers of dev rows; WSC
does not use 500 of its 554 rows as dev rows, as the papers do."""


@dataclass(frozen=True)
class Splits:
    """Rows by use, with notices for the user on how they were chosen; dev and test may be empty."""

    train: list[Row]
    dev: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)
    notices: tuple[str, ...] = ()

    def noted(self, notice: str) -> "Splits":
        """Returns the rows with one notice more."""
        return replace(self, notices=(*self.notices, notice))

    @property
    def digest(self) -> str:
        """The SHA-256 of all rows, in hexadecimal."""
        return hash_of([digest_of(part) for part in (self.train, self.dev, self.test)])


def digest_of(rows: Sequence[Row]) -> str:
    """Returns the SHA-256 of all fields of rows in their order, in hexadecimal."""
    return hash_of([json.dumps(row.fields, sort_keys=True, default=str) for row in rows])


def read_splits(data: DataConfig, objects: Mapping[str, Rows] | None = None) -> Splits:
    """Reads all rows that the settings name; `divide` chooses among them.

    `objects`: the parts that are in memory, by "train", "dev" and "test"; `data` has `IN_MEMORY` in their place.

    Raises:
        RequestError: a setting is of rows from another source, or the rows do not fit.
    """
    objects = objects or {}
    _check_use(data, objects)
    given = {part: rows_of(source, "data" if part == "train" else part) for part, source in objects.items()}
    return Splits(
        given["train"] if "train" in given else training_rows(data),
        given["dev"] if "dev" in given else _part(data, "dev"),
        _drawn_test(given["test"], data) if "test" in given else evaluation_rows(data),
    )


def _check_use(data: DataConfig, objects: Mapping[str, Rows]) -> None:
    """Refuses settings that do not apply to the source of the rows."""
    if data.task is not None:
        for part in objects:
            raise RequestError(
                f"data.task is {data.task}, and {'data' if part == 'train' else part} are rows in memory; leave one of "
                "them out."
            )
        source, idle = f"the task {data.task}", [*OF_FORMATS, "subset", "streaming"]
    elif objects:
        source = "rows in memory"
        idle = ["dir", "subset", "train_split", "streaming"] if data.train == IN_MEMORY else ["dir"]
    elif is_local(str(data.train)):
        source, idle = "files", ["dir", "subset", "train_split", "streaming"]
    else:
        source, idle = "a hub data set", ["dir"]
    for name in idle:
        value, default = getattr(data, name), getattr(DataConfig, name)
        if value != default:
            raise RequestError(f"data.{name} is {value!r}, but has no meaning for {source}; leave it out.")


def training_rows(data: DataConfig) -> list[Row]:
    """Returns all rows of data.train, or of the task's training split."""
    if data.train == NO_ROWS:
        raise RequestError(
            "data.train is not set, and there are no training rows to show (--shots) or to fit to (--probe); name them "
            "with --set data.train=ROWS."
        )
    if data.task is None:
        assert data.train is not None
        held_out = 0 if data.dev is not None or data.hold_out == 0 else max(data.num_dev or 0, MOST_HELD_OUT)
        first = _streamed(data, "num_train", more=held_out)
        return read_rows(data.train, key="data.train", split=data.train_split, subset=data.subset, first=first)
    if data.train is not None:
        raise RequestError(f"data.train is {data.train!r} and data.task is {data.task!r}; leave one of them out.")
    return _task_rows(data, data.train_split, "data.train_split")


def _part(data: DataConfig, name: str) -> list[Row]:
    """Returns the rows of data.dev or data.test: from a file, or from a split of the training data set; [] if unset."""
    source, key = getattr(data, name), f"data.{name}"
    if source is None:
        return []
    if data.task is not None:
        return _task_rows(data, source, key)
    if Path(source).suffix == "" and not is_local(source) and not is_local(str(data.train)):
        if data.train == IN_MEMORY != source:
            raise RequestError(
                f"{key} is {source!r}, which would be a split of a hub data set, and the training rows are in memory; "
                "give rows, or a file."
            )
        first = _streamed(data, f"num_{name}")
        return read_rows(str(data.train), key=key, split=source, subset=data.subset, first=first)
    return read_rows(source, key=key)


def _streamed(data: DataConfig, name: str, more: int = 0) -> int | None:
    """Returns how many rows of a split of the hub data set are streamed; None: it is downloaded whole."""
    count: int | None = getattr(data, name)
    if not data.streaming:
        return None
    if count is None:
        raise RequestError(f"data.streaming is set, and data.{name} is not; give it, so that there is an end.")
    return count + more


def evaluation_rows(data: DataConfig) -> list[Row]:
    """Returns the rows of data.test, or of the task's test split; the same rows for every seed."""
    if data.task is None or data.test is not None:
        return _drawn_test(_part(data, "test"), data)
    return _drawn_test(_task_rows(data, task(data.task).hub.test, "data.test"), data)


def _drawn_test(rows: list[Row], data: DataConfig) -> list[Row]:
    count = data.num_test if data.num_test is not None else NUM_TEST if data.task is not None else None
    _check_enough(len(rows), data.num_test, "data.num_test", data)
    return rows if count is None or len(rows) <= count else parts(rows, [count], 0, "test")[0]


def rows_to_report(data: DataConfig, seed: int, file: str | None) -> tuple[list[Row], str]:
    """Returns (rows to evaluate on, their source in words): those of `file`, or, if None, those of the run."""
    if file is not None:
        return read_rows(file, key="data"), file
    if data.task is not None:
        return evaluation_rows(data), f"{data.task}, {data.test or 'test'}"
    source = data.test or data.dev or str(data.train)
    if is_gone(source):
        raise RequestError(
            f"data: the rows of this run were in {source}, which is not here; give --data FILE (evaluate(FILE) in "
            f"Python).{hint(source)}"
        )
    if data.test is not None:
        return evaluation_rows(data), data.test
    if data.dev is not None:
        return _drawn_dev(_part(data, "dev"), data, seed), data.dev
    if data.train == NO_ROWS:
        raise RequestError(
            "data is not set, and there is no run folder of that name, which would have rows; give --data FILE or "
            "--task NAME with the rows to evaluate on."
        )
    _, held = _held_out(training_rows(data), data, data.draw_seed(seed))
    if not held:
        raise RequestError("data is not set, and the run had neither dev nor test rows; give --data FILE.")
    return held, f"{data.train}, held out of training"


def _drawn_dev(rows: list[Row], data: DataConfig, seed: int) -> list[Row]:
    """Draws data.num_dev of the dev rows; all if it is not set."""
    _check_enough(len(rows), data.num_dev, "data.num_dev", data)
    most = min(data.num_dev or len(rows), len(rows))
    return parts(rows, [most], data.draw_seed(seed), "dev")[0]


def divide(rows: Splits, form: Format, data: DataConfig, seed: int, *, spares_few: bool = False) -> Splits:
    """Chooses the training and dev rows that are used, by the seed, of those that `read_splits` returned.

    Args:
        rows: as they were read.
        form: reads a row.
        data: which rows are wanted.
        seed: of the draws.
        spares_few: whether none of few training rows is held out where there are test rows.

    Raises:
        RequestError: there are too few rows, and data.allow_fewer is not set.
    """
    seed = data.draw_seed(seed)
    if data.task is None and not rows.dev:
        is_spared = spares_few and data.hold_out is None and data.num_dev is None and bool(rows.test)
        kept, held = rows.train, list[Row]()
        if is_spared and are_few(len(rows.train)):
            rows = rows.noted(
                f"all {len(kept)} training rows are learnt from, since few dev rows would say little; "
                "data.hold_out=0.3 holds some out."
            )
        else:
            kept, held = _held_out(rows.train, data, seed)
        if not held and not rows.test:
            raise RequestError("data.hold_out is 0, and there are no other rows to evaluate on; give data.test.")
        if held:
            rows = rows.noted(
                f"{len(held)} of {len(rows.train)} training rows are held out as dev rows; data.dev names others."
            )
        rows = replace(rows, train=kept, dev=held)
    takes_dev = data.task is not None and not rows.dev
    if takes_dev and data.per_class and data.num_dev is not None:
        rows, takes_dev = _with_dev(rows, form, data, seed), False
    chosen = _by_class(rows, form, data, seed, takes_dev) if data.per_class else _by_count(rows, data, seed, takes_dev)
    return replace(chosen, dev=_drawn_dev(chosen.dev, data, seed))


def _held_out(rows: list[Row], data: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Returns (training rows, dev rows) of rows without separate dev rows."""
    if data.hold_out == 0:
        return rows, []
    groups, share = [str(row.get(data.label)).strip() for row in rows], data.hold_out
    count = data.num_dev if share is None and data.num_dev is not None else count_held_out(len(rows), share)
    kept, held = hold_out(rows, groups, count, seed)
    return kept, held if share is None else _drawn_dev(held, data, seed)


def _by_class(rows: Splits, form: Format, data: DataConfig, seed: int, takes_dev: bool) -> Splits:
    assert data.per_class is not None
    if not form.labels:
        raise RequestError("data.per_class is set, but these rows have no labels in common; leave it out.")
    labels = [form.example(row).label for row in rows.train]
    counts = [data.per_class] * (2 if takes_dev else 1)
    drawn = per_class(labels, counts, form.labels, seed, fewer=data.allow_fewer)
    train, *dev = ([rows.train[i] for i in part] for part in drawn)
    chosen = replace(rows, train=train, dev=dev[0] if takes_dev else rows.dev)
    if len(train) == data.per_class * len(form.labels):
        return chosen
    also = f" and {len(chosen.dev)} dev rows" if takes_dev else ""
    return chosen.noted(f"some labels have fewer than {sum(counts)} rows: {len(train)} training rows{also} are used.")


def _with_dev(rows: Splits, form: Format, data: DataConfig, seed: int) -> Splits:
    """Draws data.num_dev dev rows of a task; data.per_class draws from the others, so they are the same for any k."""
    available, count = len(rows.train), data.num_dev or 0
    together = count + (data.per_class or 0) * len(form.labels)
    _check_enough(available, together, "data.num_dev + data.per_class of each label", data)
    if available < together:
        count = min(count, int(MOST_DEV * available))
        rows = rows.noted(f"{data.task} has {available} rows to train on; {count} of them are dev rows.")
    dev, others = parts(rows.train, (count, available - count), seed, "dev")
    return replace(rows, train=others, dev=dev)


def _by_count(rows: Splits, data: DataConfig, seed: int, takes_dev: bool) -> Splits:
    available = len(rows.train)
    if not takes_dev:
        _check_enough(available, data.num_train, "data.num_train", data)
        count = min(data.num_train or (NUM_TRAIN if data.task is not None else available), available)
        return replace(rows, train=parts(rows.train, [count], seed, "train")[0])
    train, dev = data.num_train or NUM_TRAIN, data.num_dev or task(str(data.task)).num_dev
    if data.num_train is not None or data.num_dev is not None:
        _check_enough(available, train + dev, "data.num_train + data.num_dev", data)
    if available < train + dev:
        few_dev = min(dev, int(MOST_DEV * available))
        few = min(train, available - few_dev)
        rows = rows.noted(
            f"{data.task} has {available} rows to train on, not {train} + {dev}: "
            f"{few} training rows and {few_dev} dev rows are used."
        )
        train, dev = few, few_dev
    drawn, chosen = parts(rows.train, (train, dev), seed, "train")
    return replace(rows, train=drawn, dev=chosen)


def _check_enough(available: int, wanted: int | None, key: str, data: DataConfig) -> None:
    if wanted is not None and available < wanted and not data.allow_fewer:
        raise RequestError(f"{key} is {wanted}, but there are {available} rows; lower it, or set data.allow_fewer.")


def _task_rows(data: DataConfig, split: str, key: str) -> list[Row]:
    """Reads the labelled rows of a task's split, from the hub or from the task's folder in data.dir."""
    entry = task(str(data.task))
    if Path(split).suffix or Path(split).name != split:
        raise RequestError(
            f"{key} is {split!r}, and data.task is {entry.name!r}, which has splits and no files; give the name of a "
            "split, or leave it out."
        )
    if data.dir is None:
        rows = read_rows(entry.hub.name, key=key, split=split, subset=entry.hub.subset)
    else:
        folder = Path(data.dir).expanduser() / entry.name
        names = [split, "validation"] if split == entry.hub.test else [split]
        paths = [path for name in names for path in sorted(folder.glob(f"{name}.*"))]
        if not paths:
            splits = ", ".join(sorted({path.stem for path in folder.glob("*.*")})) or "no rows"
            raise RequestError(
                f"data.dir: there is no split {split!r} in {folder} (it has {splits}); give the folder that contains "
                f"{entry.name}/."
            )
        rows = read_rows(str(paths[0]), key=key)
    return [row for row in rows if entry.unlabelled is None or row.fields.get("label") != entry.unlabelled]


def rows_of(source: Rows, key: str) -> list[Row]:
    """Reads all rows of `source`, a name or the rows themselves; `key` is the argument that gave it, for messages.

    Raises:
        RequestError: it cannot be read, it has no rows, or a row is not a dict.
    """
    if isinstance(source, str | Path):
        return read_rows(str(source), key=key)
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        keys = f" of {', '.join(map(str, source))}" if isinstance(source, Mapping) else ""
        raise RequestError(
            f"{key} is {type(source).__name__}{keys}; give a list of dicts, a DataFrame, or one split of a data set."
        )
    given: Any = source
    if hasattr(given, "columns") and hasattr(given, "to_dict"):  # a DataFrame of pandas
        check_fields_differ([str(name) for name in given.columns], key)
        given = given.to_dict("records")
    found = list(given)
    for number, row in enumerate(found, start=1):
        if not isinstance(row, Mapping):
            raise RequestError(f"{key}, row {number}, is {type(row).__name__}; a row is a dict of its fields.")
    if not found:
        raise RequestError(f"{key} has no rows; give at least one.")
    return rows_of_fields(found, f"{key}, ", class_names(getattr(source, "features", None)))


def reported_rows(rows: Splits, form: Format, data: DataConfig, seed: int) -> list[Row]:
    """Returns the rows that a run's figures are made of: its test rows, or its dev rows where it has none."""
    used = divide(rows, form, data, seed)
    return used.test or used.dev
