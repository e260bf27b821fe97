"""Random choice of rows: parts of given sizes, rows per class, rows held out for a dev set. Functions of the seed.

Reads the rows of a configuration and divides them into training, dev and test rows.

Rows that are in memory already: lists of dicts, data sets of `datasets`, DataFrames of pandas.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from tezo.directions.random import permutation
from tezo.models.kinds import IN_MEMORY
from tezo.models.local_names import hint, is_gone
from tezo.system.errors import RequestError
from tezo.tasks.catalogue import task
from tezo.tasks.examples import Row, check_fields_differ, class_names, rows_of_fields
from tezo.tasks.formats import Fields
from tezo.tasks.row_files import DataConfig
from tezo.tasks.row_sources import is_local, read_rows
from tezo.tasks.rows import Format
from tezo.tasks.wordings import Task

T = TypeVar("T")

LEAST_HELD_OUT, SHARE_OF_FEW, MOST_HELD_OUT = 32, 0.3, 500
"""Rows held out by default: at least so many, or this share where there are few, and at most so many. The accuracy on
32 rows has a standard error of at most 9 points."""


def shares(available: int, wanted: Sequence[int]) -> list[int]:
    """The counts `wanted`; scaled down in proportion if their sum exceeds `available`."""
    total = sum(wanted)
    return [available * count // total for count in wanted] if available < total else list(wanted)


def parts(rows: Sequence[T], counts: Sequence[int], seed: int, name: str) -> list[list[T]]:
    """Disjoint random parts of `rows`, in the order of `rows`.

    Args:
        rows: the rows to draw from.
        counts: number of rows of each part; their sum is at most `len(rows)`.
        seed: seed of the draw.
        name: name of the draw; draws of different names are independent.
    """
    order = permutation(len(rows), seed=seed, step=0, name=name)
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [[rows[i] for i in sorted(order[a:b])] for a, b in itertools.pairwise(bounds)]


def per_class(
    labels: Sequence[int | None], counts: Sequence[int], names: Sequence[str], seed: int, *, fewer: bool = False
) -> list[list[int]]:
    """Disjoint random parts with the same number of rows of every label.

    Args:
        labels: labels of the rows, as indices into `names`.
        counts: for each part, its number of rows per label.
        names: names of the labels.
        seed: seed of the draw.
        fewer: if a label has too few rows, divide them among the parts in proportion; otherwise that is an error.

    Returns:
        For each part the indices of its rows, ascending.

    Raises:
        RequestError: a label has too few rows, and `fewer` is False.
    """
    chosen: list[list[int]] = [[] for _ in counts]
    for index, label in enumerate(names):
        own = [i for i, row_label in enumerate(labels) if row_label == index]
        if len(own) < sum(counts) and not fewer:
            also = " and as many dev rows" if len(counts) > 1 else ""
            raise RequestError(
                f"data.per_class is {counts[0]}{also}, but label {label!r} has {len(own)} rows to draw from; "
                "lower it, or set data.allow_fewer."
            )
        for part, rows in zip(chosen, parts(own, shares(len(own), counts), seed, f"per_class.{label}"), strict=True):
            part += rows
    return [sorted(part) for part in chosen]


def hold_out(rows: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """(kept rows, held-out rows): a random fraction `share` is held out, at least 1 and at most 500 rows."""
    count = min(MOST_HELD_OUT, max(1, round(share * len(rows))))
    if count >= len(rows):
        raise _too_few(len(rows), count)
    held, kept = parts(rows, (count, len(rows) - count), seed, "hold_out")
    return kept, held


def hold_out_of_groups(
    rows: Sequence[T], groups: Sequence[str], count: int | None, seed: int
) -> tuple[list[T], list[T]]:
    """(kept rows, held-out rows), with the groups in proportion in both.

    Args:
        rows: the rows to draw from.
        groups: the group of each row, such as its label.
        count: number of rows to hold out; None: a tenth, at least `LEAST_HELD_OUT` or `SHARE_OF_FEW` of the rows, and
            at most `MOST_HELD_OUT`.
        seed: seed of the draw.

    Raises:
        RequestError: there are too few rows.
    """
    if count is None:
        least = min(LEAST_HELD_OUT, round(SHARE_OF_FEW * len(rows)))
        count = min(MOST_HELD_OUT, max(1, least, round(len(rows) / 10)))
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


def _too_few(available: int, count: int) -> RequestError:
    return RequestError(
        f"data.train has {available} row(s), too few to hold {count} out as dev rows; give data.dev, or set "
        "data.hold_out=0 to go without."
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
    """Rows by use; dev and test may be empty.

    Attributes:
        train: rows to train on.
        dev: rows that choose the checkpoint.
        test: rows for the reported metrics.
        notices: notices for the user on how the rows were chosen.
    """

    train: list[Row]
    dev: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)
    notices: tuple[str, ...] = ()


def read_splits(data: DataConfig) -> Splits:
    """Reads all rows that the settings name; `divide` chooses among them."""
    _check_use(data)
    return Splits(training_rows(data), read_part(data, "dev"), evaluation_rows(data))


def _check_use(data: DataConfig) -> None:
    """Raises `RequestError` if a setting does not apply to the source of the rows."""
    if data.task is not None:
        source, idle = f"the task {data.task}", [*(f.name for f in fields(Fields)), "subset", "streaming"]
    elif is_local(str(data.train)):
        source, idle = "files", ["dir", "subset", "train_split", "streaming"]
    else:
        source, idle = "a hub data set", ["dir"]
    for name in idle:
        value, default = getattr(data, name), getattr(DataConfig, name)
        if value != default:
            raise RequestError(f"data.{name} is {value!r}, but has no meaning for {source}; leave it out.")


def training_rows(data: DataConfig) -> list[Row]:
    """All rows of data.train, or of the task's training split."""
    if data.task is None:
        assert data.train is not None
        first = _streamed(data, data.num_train, "data.num_train", more=_most_held_out(data))
        return read_rows(data.train, key="data.train", split=data.train_split, subset=data.subset, first=first)
    if data.train is not None:
        raise RequestError(f"data.train is {data.train!r} and data.task is {data.task!r}; leave one of them out.")
    return _task_rows(data, data.train_split, "data.train_split")


def read_part(data: DataConfig, name: str) -> list[Row]:
    """The rows of data.dev or data.test: from a file, or from a split of the training data set; [] if it is not set."""
    source, key = getattr(data, name), f"data.{name}"
    if source is None:
        return []
    if data.task is not None:
        return _task_rows(data, source, key)
    if Path(source).suffix == "" and not is_local(source) and not is_local(str(data.train)):
        first = _streamed(data, getattr(data, f"num_{name}"), f"data.num_{name}")
        return read_rows(str(data.train), key=key, split=source, subset=data.subset, first=first)
    return read_rows(source, key=key)


def _streamed(data: DataConfig, count: int | None, key: str, more: int = 0) -> int | None:
    """How many rows of a split of the hub data set are streamed; None: it is downloaded whole."""
    if not data.streaming:
        return None
    if count is None:
        raise RequestError(f"data.streaming is set, and {key} is not; give it, so that there is an end.")
    return count + more


def _most_held_out(data: DataConfig) -> int:
    """Rows to read besides data.num_train, enough for `_held_out`."""
    return 0 if data.dev is not None or data.hold_out == 0 else max(data.num_dev or 0, MOST_HELD_OUT)


def evaluation_rows(data: DataConfig) -> list[Row]:
    """The rows of data.test, or of the task's test split; the same rows for every seed."""
    if data.task is None or data.test is not None:
        rows = read_part(data, "test")
    else:
        rows = _task_rows(data, task(data.task).hub.test, "data.test")
    return drawn_test(rows, data)


def drawn_test(rows: list[Row], data: DataConfig) -> list[Row]:
    """As many of the test rows as data.num_test says, the same ones for every seed."""
    count = data.num_test if data.num_test is not None else NUM_TEST if data.task is not None else None
    _check_enough(len(rows), data.num_test, "data.num_test", data)
    return rows if count is None or len(rows) <= count else parts(rows, [count], 0, "test")[0]


def rows_to_report(data: DataConfig, seed: int, file: str | None) -> tuple[list[Row], str]:
    """(rows to evaluate on, their source in words): `file`, or the rows that the run was evaluated on.

    Args:
        data: data settings of the run.
        seed: seed of the run.
        file: rows to use instead; None: the rows of the run.
    """
    if file is not None:
        return read_rows(file, key="data"), file
    if data.task is not None:
        return evaluation_rows(data), f"{data.task}, {data.test or 'test'}"
    own = data.test or data.dev or str(data.train)
    if is_gone(own):
        raise RequestError(
            f"data: the rows of this run were in {own}, which is not here; give --data FILE (evaluate(FILE) in Python)."
            f"{hint(own)}"
        )
    if data.test is not None:
        return evaluation_rows(data), data.test
    if data.dev is not None:
        return _drawn_dev(read_part(data, "dev"), data, seed), data.dev
    if data.train == NO_ROWS:
        raise RequestError(
            "data is not set, and there is no run folder of that name, which would have rows; give --data FILE or "
            "--task NAME with the rows to evaluate on."
        )
    _, held = _held_out(training_rows(data), data, _seed_of_draws(data, seed))
    if not held:
        raise RequestError("data is not set, and the run had neither dev nor test rows; give --data FILE.")
    return held, f"{data.train}, held out of training"


def _seed_of_draws(data: DataConfig, seed: int) -> int:
    return seed if data.seed is None else data.seed


def _drawn_dev(rows: list[Row], data: DataConfig, seed: int) -> list[Row]:
    """data.num_dev of the dev rows; all if it is not set."""
    _check_enough(len(rows), data.num_dev, "data.num_dev", data)
    most = min(data.num_dev or len(rows), len(rows))
    return parts(rows, [most], _seed_of_draws(data, seed), "dev")[0]


def divide(rows: Splits, form: Format, data: DataConfig, seed: int) -> Splits:
    """Chooses the rows that are used.

    Args:
        rows: result of `read_splits`.
        form: format of the rows; its labels are those of data.per_class.
        data: data settings, with the numbers of rows.
        seed: seed of the training and dev rows; the test rows do not depend on it.

    Raises:
        RequestError: there are too few rows, and data.allow_fewer is not set.
    """
    seed = _seed_of_draws(data, seed)
    if data.task is None and not rows.dev:
        kept, held = _held_out(rows.train, data, seed)
        if not held and not rows.test:
            raise RequestError("data.hold_out is 0, and there are no other rows to evaluate on; give data.test.")
        notice = (
            f"{len(held)} of {len(rows.train)} training rows are held out as dev rows, which choose the step to keep; "
            "data.dev names others."
        )
        rows = replace(rows, train=kept, dev=held, notices=(notice,) if held else ())
    takes_dev = data.task is not None and not rows.dev
    if takes_dev and data.per_class and data.num_dev is not None:
        rows, takes_dev = _with_dev(rows, form, data, seed), False
    chosen = _by_class(rows, form, data, seed, takes_dev) if data.per_class else _by_count(rows, data, seed, takes_dev)
    used = replace(chosen, dev=_drawn_dev(chosen.dev, data, seed))
    return replace(used, notices=used.notices + _repetition_notice(used))


def _held_out(rows: list[Row], data: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """(training rows, dev rows) of rows without dev rows of their own."""
    if data.hold_out == 0:
        return rows, []
    if data.hold_out is not None:
        kept, held = hold_out(rows, data.hold_out, seed)
        return kept, _drawn_dev(held, data, seed)
    return hold_out_of_groups(
        rows, [str(row.fields.get(row.column(data.label) or data.label)) for row in rows], data.num_dev, seed
    )


def _repetition_notice(splits: Splits) -> tuple[str, ...]:
    """A notice on dev and test rows that are training rows too; empty if there are none."""
    trained = {_content(row) for row in splits.train}
    held = [*splits.dev, *splits.test]
    count = sum(_content(row) in trained for row in held)
    if count == 0:
        return ()
    return (
        f"{count} of the {len(held)} dev and test rows are training rows too, word for word; "
        "their loss and scores measure what was memorised.",
    )


def _content(row: Row) -> str:
    return json.dumps(row.fields, sort_keys=True, default=str)


def _by_class(rows: Splits, form: Format, data: DataConfig, seed: int, takes_dev: bool) -> Splits:
    assert data.per_class is not None
    if not form.labels:
        raise RequestError("data.per_class is set, but these rows have no labels in common; leave it out.")
    labels = [form.example(row).label for row in rows.train]
    counts = [data.per_class] * (2 if takes_dev else 1)
    drawn = per_class(labels, counts, form.labels, seed, fewer=data.allow_fewer)
    train, *dev = ([rows.train[i] for i in part] for part in drawn)
    notices = rows.notices
    if len(train) < data.per_class * len(form.labels):
        notices += (
            f"some labels have fewer than {sum(counts)} rows: {len(train)} training rows"
            + (f" and {len(dev[0])} dev rows are used." if takes_dev else " are used."),
        )
    return replace(rows, train=train, dev=dev[0] if takes_dev else rows.dev, notices=notices)


def _with_dev(rows: Splits, form: Format, data: DataConfig, seed: int) -> Splits:
    """Draws data.num_dev dev rows of a task; data.per_class draws from the others, so they are the same for any k."""
    available, count = len(rows.train), data.num_dev or 0
    together = count + (data.per_class or 0) * len(form.labels)
    _check_enough(available, together, "data.num_dev + data.per_class of each label", data)
    notices = rows.notices
    if available < together:
        count = min(count, int(MOST_DEV * available))
        notices += (f"{data.task} has {available} rows to train on; {count} of them are dev rows.",)
    dev, others = parts(rows.train, (count, available - count), seed, "dev")
    return replace(rows, train=others, dev=dev, notices=notices)


def _by_count(rows: Splits, data: DataConfig, seed: int, takes_dev: bool) -> Splits:
    if not takes_dev:
        default = NUM_TRAIN if data.task is not None else len(rows.train)
        _check_enough(len(rows.train), data.num_train, "data.num_train", data)
        count = min(data.num_train or default, len(rows.train))
        return replace(rows, train=parts(rows.train, [count], seed, "train")[0])
    wanted = data.num_train or NUM_TRAIN, data.num_dev or task(str(data.task)).num_dev
    if data.num_train is not None or data.num_dev is not None:
        _check_enough(len(rows.train), sum(wanted), "data.num_train + data.num_dev", data)
    dev = min(wanted[1], int(MOST_DEV * len(rows.train))) if len(rows.train) < sum(wanted) else wanted[1]
    counts, notices = (min(wanted[0], len(rows.train) - dev), dev), rows.notices
    if counts != wanted:
        notices += (
            f"{data.task} has {len(rows.train)} rows to train on, not {wanted[0]} + {wanted[1]}: "
            f"{counts[0]} training rows and {counts[1]} dev rows are used.",
        )
    train, chosen = parts(rows.train, counts, seed, "train")
    return replace(rows, train=train, dev=chosen, notices=notices)


def _check_enough(available: int, wanted: int | None, key: str, data: DataConfig) -> None:
    if wanted is not None and available < wanted and not data.allow_fewer:
        raise RequestError(f"{key} is {wanted}, but there are {available} rows; lower it, or set data.allow_fewer.")


def _task_rows(data: DataConfig, split: str, key: str) -> list[Row]:
    """The labelled rows of a task's split, from the hub or from the task's folder in data.dir."""
    entry = task(str(data.task))
    if data.dir is None:
        rows = read_rows(entry.hub.name, key=key, split=split, subset=entry.hub.subset)
    else:
        rows = read_rows(str(_file(entry, Path(data.dir).expanduser(), split)), key=key)
    return [row for row in rows if entry.unlabelled is None or row.fields.get("label") != entry.unlabelled]


def _file(entry: Task, folder: Path, split: str) -> Path:
    own = folder / entry.name
    names = [split, "validation"] if split == entry.hub.test else [split]
    paths = [path for name in names for path in sorted(own.glob(f"{name}.*"))]
    if paths:
        return paths[0]
    splits: Sequence[str] = sorted({path.stem for path in own.glob("*.*")})
    content = f"it has {', '.join(splits)}" if splits else "it has no rows"
    raise RequestError(
        f"data.dir: there is no split {split!r} in {own} ({content}); give the folder that contains {entry.name}/."
    )


Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file, folder or pattern, the name of a hub data set, a list of dicts, a DataFrame of pandas, or a split of a data
set of `datasets`."""


def is_named(source: object) -> bool:
    """Whether rows are given by a name, rather than as objects."""
    return isinstance(source, str | Path)


def rows_of(source: Rows, key: str) -> list[Row]:
    """All rows of `source`.

    Args:
        source: a name, or the rows themselves.
        key: the argument that gave it, for messages.

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
    found = list(_records(source, key))
    for number, row in enumerate(found, start=1):
        if not isinstance(row, Mapping):
            raise RequestError(f"{key}, row {number}, is {type(row).__name__}; a row is a dict of its fields.")
    if not found:
        raise RequestError(f"{key} has no rows; give at least one.")
    return rows_of_fields(found, f"{key}, ", class_names(getattr(source, "features", None)))


def _records(source: Any, key: str) -> Iterable[Any]:
    """The rows of a DataFrame of pandas; anything else as it is."""
    if not (hasattr(source, "columns") and hasattr(source, "to_dict")):
        return cast("Iterable[Any]", source)
    check_fields_differ([str(name) for name in source.columns], key)
    return cast("Iterable[Any]", source.to_dict("records"))


def splits_of(data: DataConfig, objects: Mapping[str, Rows]) -> Splits:
    """What `read_splits` gives, where some of it is in memory.

    Args:
        data: has `IN_MEMORY` in the place of each part that is.
        objects: those parts, by "train", "dev" and "test".

    Raises:
        RequestError: a setting is of rows from another source, or the rows do not fit.
    """
    _check_use_of_objects(data, objects)
    given = {part: rows_of(source, "data" if part == "train" else part) for part, source in objects.items()}
    return Splits(
        given["train"] if "train" in given else training_rows(data),
        given["dev"] if "dev" in given else read_part(data, "dev"),
        drawn_test(given["test"], data) if "test" in given else evaluation_rows(data),
    )


def reported_rows(rows: Splits, form: Format, data: DataConfig, seed: int) -> list[Row]:
    """The rows that a run's figures are made of: its test rows, or its dev rows where it has none.

    Args:
        rows: what `splits_of` returned.
        form: of the rows.
        data: of the run.
        seed: of the run.
    """
    used = divide(rows, form, data, seed)
    return used.test or used.dev


def _check_use_of_objects(data: DataConfig, objects: Mapping[str, Rows]) -> None:
    part = next(iter(objects))
    if data.task is not None:
        raise RequestError(
            f"data.task is {data.task}, and {'data' if part == 'train' else part} are rows in memory; leave one of "
            "them out."
        )
    for name in ("dir", "subset", "train_split", "streaming") if data.train == IN_MEMORY else ("dir",):
        if getattr(data, name) != getattr(DataConfig, name):
            raise RequestError(
                f"data.{name} is {getattr(data, name)!r}, and has no meaning for rows in memory; leave it out."
            )
