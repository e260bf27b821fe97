"""Which rows a configuration means: read, and divided into those that train, choose the checkpoint, are reported on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from tezo.errors import RequestError
from tezo.tasks import Fields, Format, Row, Task, hold_out, parts, per_class, read_rows, task
from tezo.tasks.data_config import DataConfig

NO_ROWS = "-"
"""data.train of a base model that is measured as it is: there are none."""

NUM_TRAIN, NUM_TEST = 1000, 1000
"""Rows of a task, as MeZO and the papers after it take them."""

MOST_DEV = 0.4
"""Of a task with too few rows, the share that may choose the checkpoint: CB's and COPA's dev rows are the papers', and
WSC's 554 do not lose 500 to it, as they do there."""


@dataclass(frozen=True)
class Splits:
    """Rows by use; dev and test may be empty.

    Attributes:
        notices: what the user should know of how they came about.
    """

    train: list[Row]
    dev: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)
    notices: tuple[str, ...] = ()


def read_splits(data: DataConfig) -> Splits:
    """All rows that are named, before any is chosen."""
    _check_use(data)
    return Splits(training_rows(data), read_part(data, "dev"), evaluation_rows(data))


def _check_use(data: DataConfig) -> None:
    """An error where a setting is of rows from another source than these."""
    if data.task is not None:
        source, idle = f"the task {data.task}", [*(f.name for f in fields(Fields)), "subset"]
    elif Path(str(data.train)).expanduser().is_file():
        source, idle = "a file", ["dir", "subset", "train_split"]
    else:
        source, idle = "a hub data set", ["dir"]
    for name in idle:
        value, default = getattr(data, name), getattr(DataConfig, name)
        if value != default:
            raise RequestError(f"data.{name} is {value!r}, and has no meaning for {source}; leave it out.")


def training_rows(data: DataConfig) -> list[Row]:
    """All rows of data.train, or of a task's training split."""
    if data.task is None:
        assert data.train is not None
        return read_rows(data.train, key="data.train", split=data.train_split, subset=data.subset)
    if data.train is not None:
        raise RequestError(f"data.train is {data.train!r} and data.task is {data.task!r}; leave one of them out.")
    return _task_rows(data, data.train_split, "data.train_split")


def read_part(data: DataConfig, name: str) -> list[Row]:
    """The rows of data.dev or data.test: of a file, or of a split of what is trained on."""
    source, key = getattr(data, name), f"data.{name}"
    if source is None:
        return []
    if data.task is not None:
        return _task_rows(data, source, key)
    if Path(source).suffix == "" and not Path(source).exists() and not Path(str(data.train)).exists():
        return read_rows(str(data.train), key=key, split=source, subset=data.subset)
    return read_rows(source, key=key)


def evaluation_rows(data: DataConfig) -> list[Row]:
    """The rows of data.test, or those that a task is reported on: the same ones for every seed."""
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
    """The rows that figures are made of, and in words where they are from: `file`, or what the run was tested on.

    Args:
        data: of the run.
        seed: of the run.
        file: rows that are named instead.
    """
    if file is not None:
        return read_rows(file, key="data"), file
    if data.task is not None:
        return evaluation_rows(data), f"{data.task}, {data.test or 'test'}"
    if data.test is not None:
        return evaluation_rows(data), data.test
    if data.dev is not None:
        return _drawn_dev(read_part(data, "dev"), data, seed), data.dev
    if data.train == NO_ROWS:
        raise RequestError("data is not set; give --data FILE or --task NAME with the rows to evaluate on.")
    _, held = hold_out(training_rows(data), data.hold_out, _seed_of_draws(data, seed))
    return _drawn_dev(held, data, seed), f"{data.train}, held out of training"


def _seed_of_draws(data: DataConfig, seed: int) -> int:
    return seed if data.seed is None else data.seed


def _drawn_dev(rows: list[Row], data: DataConfig, seed: int) -> list[Row]:
    """As many as data.num_dev says."""
    _check_enough(len(rows), data.num_dev, "data.num_dev", data)
    most = min(data.num_dev or len(rows), len(rows))
    return parts(rows, [most], _seed_of_draws(data, seed), "dev")[0]


def divide(rows: Splits, form: Format, data: DataConfig, seed: int) -> Splits:
    """The rows that are used.

    Args:
        rows: what `read_splits` returned.
        form: of the rows; data.per_class goes by its labels.
        data: sizes.
        seed: of the draws, but for the test rows.
    """
    seed = _seed_of_draws(data, seed)
    if data.task is None and not rows.dev and not rows.test:
        kept, held = hold_out(rows.train, data.hold_out, seed)
        notice = (
            f"{len(held)} of {len(rows.train)} training rows are held out for evaluation; "
            "data.dev and data.test name rows of your own."
        )
        rows = replace(rows, train=kept, dev=held, notices=(notice,))
    takes_dev = data.task is not None and not rows.dev
    if takes_dev and data.per_class and data.num_dev is not None:
        rows, takes_dev = _with_dev(rows, form, data, seed), False
    chosen = _per_class(rows, form, data, seed, takes_dev) if data.per_class else _plain(rows, data, seed, takes_dev)
    used = replace(chosen, dev=_drawn_dev(chosen.dev, data, seed))
    return replace(used, notices=used.notices + _of_repeated(used))


def _of_repeated(splits: Splits) -> tuple[str, ...]:
    """What is to be known of rows that are both trained on and evaluated on, if there are any."""
    trained = {_content(row) for row in splits.train}
    held = [*splits.dev, *splits.test]
    count = sum(_content(row) in trained for row in held)
    if count == 0:
        return ()
    return (
        f"{count} of the {len(held)} dev and test rows are training rows too, word for word; "
        "of these a loss or a score shows what was memorised.",
    )


def _content(row: Row) -> str:
    return json.dumps(row.fields, sort_keys=True, default=str)


def _per_class(rows: Splits, form: Format, data: DataConfig, seed: int, takes_dev: bool) -> Splits:
    assert data.per_class is not None
    if not form.labels:
        raise RequestError("data.per_class is set, but these rows have no labels of their own; leave it out.")
    labels = [form.example(row).label for row in rows.train]
    counts = [data.per_class] * (2 if takes_dev else 1)
    found = per_class(labels, counts, form.labels, seed, fewer=data.allow_fewer)
    train, *dev = ([rows.train[i] for i in part] for part in found)
    notices = rows.notices
    if len(train) < data.per_class * len(form.labels):
        notices += (
            f"some labels have fewer than {sum(counts)} rows: {len(train)} rows train"
            + (f" and {len(dev[0])} choose the checkpoint." if takes_dev else "."),
        )
    return replace(rows, train=train, dev=dev[0] if takes_dev else rows.dev, notices=notices)


def _with_dev(rows: Splits, form: Format, data: DataConfig, seed: int) -> Splits:
    """data.num_dev of a task's rows to choose by, the same ones for any data.per_class, which draws from the others."""
    available, count = len(rows.train), data.num_dev or 0
    together = count + (data.per_class or 0) * len(form.labels)
    _check_enough(available, together, "data.num_dev + data.per_class of each label", data)
    notices = rows.notices
    if available < together:
        count = min(count, int(MOST_DEV * available))
        notices += (f"{data.task} has {available} rows to train on, of which {count} choose the checkpoint.",)
    dev, others = parts(rows.train, (count, available - count), seed, "dev")
    return replace(rows, train=others, dev=dev, notices=notices)


def _plain(rows: Splits, data: DataConfig, seed: int, takes_dev: bool) -> Splits:
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
            f"{counts[0]} train and {counts[1]} choose the checkpoint.",
        )
    train, chosen = parts(rows.train, counts, seed, "train")
    return replace(rows, train=train, dev=chosen, notices=notices)


def _check_enough(found: int, wanted: int | None, key: str, data: DataConfig) -> None:
    if wanted is not None and found < wanted and not data.allow_fewer:
        raise RequestError(f"{key} is {wanted}, but there are {found} rows; lower it, or set data.allow_fewer.")


def _task_rows(data: DataConfig, split: str, key: str) -> list[Row]:
    """The labelled rows of a task's split: from the hub, or from a local folder with the task's name."""
    entry = task(str(data.task))
    if data.dir is None:
        rows = read_rows(entry.hub.name, key=key, split=split, subset=entry.hub.subset)
    else:
        rows = read_rows(str(_file(entry, Path(data.dir).expanduser(), split)), key=key)
    return [row for row in rows if entry.unlabelled is None or row.fields.get("label") != entry.unlabelled]


def _file(entry: Task, folder: Path, split: str) -> Path:
    own = folder / entry.name
    names = [split, "validation"] if split == entry.hub.test else [split]
    found = [path for name in names for path in sorted(own.glob(f"{name}.*"))]
    if found:
        return found[0]
    there: Sequence[str] = sorted({path.stem for path in own.glob("*.*")})
    what = f"it has {', '.join(there)}" if there else "it has no rows"
    raise RequestError(
        f"data.dir: there is no split {split!r} in {own} ({what}); give the folder that has {entry.name}/."
    )
