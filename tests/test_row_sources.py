"""Where rows come from: every kind of file, alone, compressed, in folders and patterns; hub sets; standard input."""

import csv
import gzip
import io
import json
from pathlib import Path

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
from folders import label_rows, model_folder, read_jsonl, refused, settings, tezo, train, write_rows

from tezo.runs.step_log import read_header
from tezo.system.errors import RequestError
from tezo.tasks.examples import Row
from tezo.tasks.formats import choose_format
from tezo.tasks.row_files import DataConfig
from tezo.tasks.row_sources import read_rows
from tezo.tasks.splits import read_splits, rows_of

# What readers that guess types change: dates, numbers with zeros in front, words that mean nothing elsewhere.
GUESSED = [
    {"text": "2020-01-01 00:00:00", "label": "007"},
    {"text": "2020-01-02", "label": "NA"},
    {"text": "null", "label": "1e5"},
    {"text": "True", "label": "0"},
]
STRINGS = ["jsonl", "json", "csv", "tsv", "parquet"]


def fields(source, **more) -> list[dict]:
    return [row.fields for row in read_rows(str(source), key="data.train", **more)]


def compressed(path: Path) -> Path:
    target = path.with_name(path.name + ".gz")
    target.write_bytes(gzip.compress(path.read_bytes()))
    return target


def written(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        return path
    return write_rows(path, rows)


@pytest.mark.parametrize("suffix", STRINGS)
def test_rows_are_what_the_file_says_compressed_or_not(tmp_path, suffix):
    path = written(tmp_path / f"rows.{suffix}", GUESSED)
    assert fields(path) == fields(compressed(path)) == GUESSED
    assert [row.where.replace(".gz", "") for row in read_rows(f"{path}.gz", key="data")] == [
        row.where for row in read_rows(str(path), key="data")
    ]


@pytest.mark.parametrize("shown", ["one line", "indented", "data", "data, indented", "lines"])
def test_json_may_be_an_array_or_lines(tmp_path, shown):
    rows = [*GUESSED, {"text": [1, 2.5, None], "other": {"a": True}}]
    whole = {"version": 1, "data": rows} if shown.startswith("data") else rows
    text = json.dumps(whole, indent=2 if "indented" in shown else None)
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)) if shown == "lines" else text)
    assert fields(tmp_path / "rows.json") == rows
    assert fields(compressed(tmp_path / "rows.json")) == rows


def test_a_text_file_has_a_row_a_line(tmp_path):
    (tmp_path / "rows.txt").write_bytes("first\r\n\n  second\u2028 \n \nlast".encode())
    rows = read_rows(str(tmp_path / "rows.txt"), key="data")
    assert [row.fields for row in rows] == [{"text": "first"}, {"text": "  second\u2028 "}, {"text": "last"}]
    assert [row.where for row in rows] == [f"rows.txt, line {n}" for n in (1, 3, 5)]


def test_a_folder_and_a_pattern_are_their_files_in_the_order_of_their_names(tmp_path):
    rows = label_rows(9)
    (tmp_path / "more").mkdir()
    parts = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl")]
    for place, path in reversed(list(enumerate(parts))):
        plain = write_rows(path.with_name(path.name.removesuffix(".gz")), rows[3 * place : 3 * place + 3])
        if path.suffix == ".gz":
            compressed(plain)
            plain.unlink()
    (tmp_path / "README.md").write_text("not rows")
    (tmp_path / ".hidden.jsonl").write_text("not rows")
    write_rows(tmp_path / "more/a.jsonl", rows[:3])
    assert fields(tmp_path) == fields(tmp_path / "*.jsonl*") == rows
    assert fields(tmp_path / "?.jsonl") == rows[:3] + rows[6:]
    below = read_rows(str(tmp_path / "**/a.jsonl"), key="data")
    assert [row.fields for row in below] == rows[:3] * 2
    assert len({row.where for row in below}) == 6, "places tell files of one name apart"


def test_a_pattern_is_relative_to_where_one_is(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data/a.jsonl", GUESSED)
    monkeypatch.chdir(tmp_path)
    assert fields("data/*.jsonl") == fields("data") == fields("data/a.jsonl") == GUESSED


def test_a_folder_that_save_to_disk_wrote(tmp_path):
    datasets.Dataset.from_list(GUESSED).save_to_disk(tmp_path / "saved")
    assert fields(tmp_path / "saved") == GUESSED
    both = {"train": datasets.Dataset.from_list(GUESSED), "test": datasets.Dataset.from_list(GUESSED)}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    assert fields(tmp_path / "both/test") == GUESSED
    with pytest.raises(RequestError, match="the splits test, train; give one of them"):
        read_rows(str(tmp_path / "both"), key="data.train")


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_may_have_its_rows_in_a_field(tmp_path, suffix, indent):
    path = tmp_path / f"rows.{suffix}"
    talk = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    marked = {"text": "x", "spans": [{"start": 1}]}
    contents = [
        (GUESSED, GUESSED),
        *(({name: GUESSED, "version": 1}, GUESSED) for name in ("data", "rows", "train")),
        ({"whatever": GUESSED}, GUESSED),
        ({"train": [talk]}, [talk]),
        (talk, [talk]),  # one row, and no rows of messages
        (marked, [marked]),
        ({"rows": "x"}, [{"rows": "x"}]),
    ]
    for whole, rows in contents:
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(whole, indent=indent).encode())
        assert fields(path) == rows


@pytest.mark.parametrize("length", [131_072, 131_073, 500_000])
def test_a_csv_field_may_be_long_and_the_limit_of_the_process_stays(tmp_path, length):
    rows = [{"text": "x" * length, "label": "good"}, {"text": "y", "label": "bad"}]
    path, usual = write_rows(tmp_path / "rows.csv", rows), csv.field_size_limit(1234)
    try:
        assert fields(path) == rows
        path.write_text(path.read_text() + '"z"z,good\n')
        with pytest.raises(RequestError, match="line 4, is invalid"):
            fields(path)
    finally:
        assert csv.field_size_limit(usual) == 1234


def test_a_row_of_several_lines_and_an_open_quote_are_named_by_the_line_where_they_begin(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('text,label\n"a\nb",good\n\nc,bad\n"d,good\ne,bad\nf,good\n')
    with pytest.raises(RequestError, match=r"line 6, is invalid .a quote that is not closed"):
        fields(path)
    path.write_text('text,label\n"a\nb",good\n\nc,bad\n')
    assert [row.where for row in read_rows(str(path), key="data")] == ["rows.csv, line 2", "rows.csv, line 5"]


@pytest.mark.parametrize(("suffix", "sign"), [("csv", ";"), ("csv", "\t"), ("tsv", ","), ("tsv", ";")])
def test_fields_may_be_separated_as_elsewhere_where_the_header_says_so(tmp_path, suffix, sign):
    path = tmp_path / f"rows.{suffix}"
    path.write_text(f'text{sign}label\n"a {sign} b"{sign}good\n')
    assert fields(path) == [{"text": f"a {sign} b", "label": "good"}]
    (tmp_path / "one.csv").write_text("text\na; b\n")
    assert fields(tmp_path / "one.csv") == [{"text": "a; b"}]


def frame(**columns) -> pandas.DataFrame:
    return pandas.DataFrame(columns)


LABELS = datasets.ClassLabel(names=["dull", "bright"])
NUMBERED = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]})
NAMED = NUMBERED.cast_column("label", LABELS)
PLAIN = [{"text": "a", "label": 1}, {"text": "b", "label": 0}]


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": np.str_("a"), "label": np.int64(1)}, {"text": "b", "label": np.int8(0)}],
        [{"text": "a", "label": torch.tensor(1)}, {"text": "b", "label": np.array(0)}],
        *(NUMBERED.with_format(name) for name in (None, "numpy", "torch")),
        *(NUMBERED.to_iterable_dataset().with_format(name) for name in ("numpy", "torch")),
        frame(text=["a", "b"], label=[1, 0]),
        frame(text=pandas.array(["a", "b"], dtype="string"), label=pandas.array([1, 0], dtype="Int64")),
        frame(text=pandas.Categorical(["a", "b"]), label=[1, 0]).set_index(pandas.Index([7, 9])),
    ],
)
def test_rows_in_memory_have_the_values_of_python(rows):
    found = rows_of(rows, "data")
    assert [row.fields for row in found] == PLAIN and [row.where for row in found] == ["data, row 1", "data, row 2"]
    assert {type(value) for row in found for value in row.fields.values()} == {str, int}


def test_a_value_that_is_missing_is_none_however_it_is_written(tmp_path):
    nothing = {"text": None, "x": None, "deep": [{"y": None}], "far": None}
    given = {"text": float("nan"), "x": np.float32("nan"), "deep": [{"y": pandas.NA}], "far": pandas.NaT}
    assert rows_of([given], "data")[0].fields == nothing
    assert [r.fields for r in rows_of(frame(text=["a", None], x=[1.5, float("nan")]), "data")] == [
        {"text": "a", "x": 1.5},
        {"text": None, "x": None},
    ]
    (tmp_path / "rows.jsonl").write_text('{"text": NaN, "x": Infinity}\n')
    assert fields(tmp_path / "rows.jsonl") == [{"text": None, "x": float("inf")}]


@pytest.mark.parametrize("source", ["memory", "streamed", "torch", "saved", "parquet", "hub"])
def test_numbers_of_classes_have_their_names_wherever_the_set_is(tmp_path, monkeypatch, source):
    if source == "saved":
        NAMED.save_to_disk(tmp_path / "rows")
    elif source == "parquet":
        NAMED.to_parquet(tmp_path / "rows.parquet")
    elif source == "hub":
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: NAMED)
        monkeypatch.setattr("tezo.tasks.row_sources.ask_hub", lambda *_: None)
    by_name = {"saved": tmp_path / "rows", "parquet": tmp_path / "rows.parquet", "hub": "owner/rows"}
    others = {"memory": NAMED, "streamed": NAMED.to_iterable_dataset(), "torch": NAMED.with_format("torch")}
    rows = rows_of(str(by_name[source]) if source in by_name else others[source], "data")
    assert [row.fields for row in rows] == PLAIN, "the rows keep their numbers, which tasks and predict need"
    form = choose_format(rows, "causal", DataConfig(), str)
    assert form.labels == ("dull", "bright") and [form.example(row).answer for row in rows] == [" bright", " dull"]


@pytest.mark.parametrize(
    "words", [{"0": "cold", "1": "warm"}, {"dull": "cold", "bright": "warm"}], ids=["numbers", "names"]
)
def test_label_words_may_be_of_the_numbers_or_the_names_of_classes(words):
    rows = rows_of(NAMED, "data")
    form = choose_format(rows, "causal", DataConfig(label_words=words), str)
    assert [form.example(row).answer for row in rows] == [" warm", " cold"]


def test_a_classifiers_classes_are_found_by_the_names_of_the_sets_classes():
    rows = rows_of(NAMED, "data")

    def answers(*classes: str) -> list[str]:
        form = choose_format(rows, "classifier", DataConfig(), str, classes)
        return [form.example(row).answer for row in rows]

    assert answers("Bright", "Dull") == ["Bright", "Dull"], "the numbers of the head are others"
    assert answers("LABEL_0", "LABEL_1") == ["LABEL_1", "LABEL_0"]
    with pytest.raises(RequestError, match=r"dull, bright, and the model's pos, neg; .*data\.label_words="):
        answers("pos", "neg")


def test_a_row_that_no_one_has_labelled_is_refused_in_a_sentence():
    rows = rows_of(datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, -1]}, features=NAMED.features), "data")
    form = choose_format(rows, "causal", DataConfig(), str)
    with pytest.raises(RequestError, match=r"data, row 2: the label is -1, .* without a label; .*dull, bright"):
        form.example(rows[1])
    assert form.example(rows[1], answered=False).label is None
    form = choose_format(rows_of(NUMBERED, "data"), "causal", DataConfig(), str)
    with pytest.raises(RequestError, match=r"'-1' is unknown, .* without a label"):
        form.example(Row({"text": "a", "label": -1}, "test, row 1"))


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (frame(a=[1], b=[2]).set_axis(["label", "label"], axis=1), ["2 fields called 'label'"]),
        (datasets.DatasetDict({"train": NUMBERED}), ["DatasetDict of train", "one split"]),
        (NUMBERED.with_format("pandas"), ["row 1, is DataFrame"]),
        (frame(text=[]), ["no rows"]),
    ],
)
def test_objects_that_are_no_rows_are_refused_in_a_sentence(rows, parts):
    with pytest.raises(RequestError, match=r"^data") as refusal:
        rows_of(rows, "data")
    assert all(part in str(refusal.value) for part in parts), refusal.value


TWICE = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["label", "label"])


@pytest.mark.parametrize("kind", ["csv", "blank csv", "jsonl", "array", "parquet"])
def test_two_fields_of_one_name_are_refused(tmp_path, kind):
    texts = {
        "csv": "text,label,label\na,b,c\n",
        "blank csv": "text,label, label\na,b,c\n",
        "jsonl": '{"text": "a", "label": "b", "label": "c"}\n{"text": "a"}\n',
        "array": '[\n{"text": "a", "label": "b", "label": "c"}\n]',
    }
    path = tmp_path / f"rows.{kind.split()[-1].replace('array', 'json')}"
    if kind == "parquet":
        pyarrow.parquet.write_table(TWICE, path)
    else:
        path.write_text(texts[kind])
    with pytest.raises(RequestError, match=r"fields (are )?called 'label'"):
        fields(path)
    (tmp_path / "unnamed.csv").write_text("text,label,,\na,b,,\n")
    assert fields(tmp_path / "unnamed.csv")[0]["label"] == "b", "spreadsheets write empty columns"


@pytest.mark.parametrize(
    ("files", "source", "parts"),
    [
        ({}, "", ["is a folder without files", "data.dir"]),
        ({}, "*.jsonl", ["no file matches", "pattern"]),
        ({"a.jsonl": "{}", "b.txt": "x"}, "", ["several kinds (.jsonl, .txt)", "/*.jsonl"]),
        ({"train.jsonl": "{}", "test.jsonl": "{}"}, "", ["several splits (test.jsonl, train.jsonl)"]),
        ({"a.jsonl.gz": "{}"}, "a.jsonl.gz", ["no sound gzip file"]),
        ({"a.zip.gz": "{}"}, "a.zip.gz", ["not one of", ".jsonl"]),
        ({"a.json": '[\n{"text": "x"},\n{"text": }\n]'}, "a.json", ["line 3", "not JSON"]),
        ({"a.json": '{\n"data": [\n{"text" "x"}]}'}, "a.json", ["line 3", "not JSON"]),
        ({"a.json": '{"text": "x"}\n{"text": \n'}, "a.json", ["line 2", "not JSON"]),
        ({"a.json": '{"text": \n{"text": "x"}\n'}, "a.json", ["line 1", "not JSON"]),
        ({"a.json": '[{"text": "x"}, 7]'}, "a.json", ["row 2", "not an object"]),
        ({"a.json": '[{"text": "\\ud83d"}]'}, "a.json", ["row 1", "surrogate"]),
        ({"a.json": "[" * 100_000}, "a.json", ["nested too deeply"]),
        ({"a.json": "[]"}, "a.json", ["no rows"]),
        ({"a.json": '[{"a": ' + "7" * 5000 + "}]"}, "a.json", ["line 1", "not JSON"]),
        ({"a.json": frame(text=["a", "b"], label=[0, 1]).to_json()}, "a.json", ["columns (text, label)", "orient="]),
        ({"a.json": '{"text": ["a", "b"],\n"label": [0, 1]}'}, "a.json", ["columns (text, label)", "one object a row"]),
        ({"a.json": '{\n"train": [{}], "test": [{}]}'}, "a.json", ["several lists of rows (train, test)"]),
        ({"a.json": '{\n"text": "x"\n}\n{\n"text": "x"\n}'}, "a.json", ["line 4", "several values", "an array"]),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path, files, source, parts):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=r"^data\.train: ") as refusal:
        read_rows(str(tmp_path / source), key="data.train")
    assert all(part in str(refusal.value) for part in parts), refusal.value


# Runs


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    write_rows(root / "rows.jsonl", label_rows(24))
    assert train(root / "opt", root / "rows.jsonl", root / "run").code == 0
    return root


@pytest.mark.parametrize("kind", ["json", "csv.gz", "folder", "pattern"])
def test_the_same_rows_are_the_same_run(home, tmp_path, kind):
    (tmp_path / "data").mkdir()
    rows = label_rows(24)
    if kind == "json":
        source = written(tmp_path / "rows.json", rows)
    elif kind == "csv.gz":
        source = compressed(write_rows(tmp_path / "rows.csv", rows))
    else:
        for place in range(3):
            write_rows(tmp_path / f"data/{place}.jsonl", rows[8 * place : 8 * place + 8])
        source = tmp_path / ("data" if kind == "folder" else "data/*.jsonl")
    assert train(home / "opt", source, tmp_path / "run").code == 0
    found, own = (read_header(folder / "run/steps.log") for folder in (tmp_path, home))
    assert {key: found[key] for key in ("rows", "answers", "held_rows")} == {
        key: own[key] for key in ("rows", "answers", "held_rows")
    }
    for name in ("adapter_model.safetensors",):
        assert (tmp_path / "run/adapter" / name).read_bytes() == (home / "run/adapter" / name).read_bytes()


def test_predict_reads_standard_input(home, tmp_path, monkeypatch):
    rows = [{"text": row["text"]} for row in label_rows(5, seed=2)]
    asked = write_rows(tmp_path / "new.jsonl", rows)
    assert tezo("predict", home / "run", "--input", asked, "--output", tmp_path / "file.jsonl").code == 0
    for number, text in enumerate((asked.read_text(), json.dumps(rows))):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        done = tezo("predict", home / "run", "--input", "-", "--output", tmp_path / f"{number}.jsonl")
        assert done.code == 0, done.err
        assert read_jsonl(tmp_path / f"{number}.jsonl") == read_jsonl(tmp_path / "file.jsonl")
    for text, parts in (("", ["no rows"]), ('{"text": "x"}\n{', ["standard input, line 2", "not JSON"])):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        refused(tezo("predict", home / "run", "--input", "-", "--output", tmp_path / "x.jsonl"), "input", *parts)


# Streaming, of a folder of shards that stands in for a hub data set


@pytest.fixture
def hub(tmp_path, monkeypatch):
    shards = tmp_path / "shards/data"
    shards.mkdir(parents=True)
    rows = label_rows(1200)
    write_rows(shards / "train-00000-of-00002.parquet", rows)
    write_rows(shards / "test-00000-of-00001.parquet", rows[:40])
    (shards / "train-00001-of-00002.parquet").write_bytes(b"a shard that is never needed")
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda _name, _subset, **more: load(str(shards.parent), **more))
    monkeypatch.setattr("tezo.tasks.row_sources.ask_hub", lambda *_: None)
    return rows


def test_streaming_reads_the_first_rows_and_no_more(hub):
    data = DataConfig(train="owner/rows", streaming=True, num_train=100, test="test", num_test=7)
    rows = read_splits(data)
    assert [row.fields for row in rows.train] == hub[:600], "100, and as many as may be held out"
    assert [row.fields for row in rows.test] == hub[:7]
    alone = read_splits(DataConfig(train="owner/rows", streaming=True, num_train=100, hold_out=0, test=None))
    assert [row.fields for row in alone.train] == hub[:100]
    with pytest.raises(RequestError, match="could not be loaded"):
        read_splits(DataConfig(train="owner/rows", num_train=100))


def test_a_streamed_run_has_as_many_rows_as_are_asked_for(hub, home, tmp_path):
    flags = settings(data__streaming="true", data__num_train=50, data__num_dev=20)
    done = train(home / "opt", "owner/rows", tmp_path / "run", *flags)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run/summary.json").read_text())["rows"] == {"train": 50, "dev": 20, "test": 0}
    done = tezo("eval", tmp_path / "run", "--json")
    assert json.loads(done.out)["rows"] == 20, done.err


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({"train": "owner/rows"}, r"data\.num_train is not"),
        ({"train": "owner/rows", "num_train": 5, "test": "test"}, r"data\.num_test is not"),
        ({"train": __file__, "num_train": 5}, r"data\.streaming is True, but has no meaning for files"),
        ({"task": "sst2"}, r"data\.streaming is True, but has no meaning for the task"),
    ],
)
def test_streaming_needs_an_end_and_a_hub_data_set(hub, data, fault):
    with pytest.raises(RequestError, match=fault):
        read_splits(DataConfig(streaming=True, **data))
