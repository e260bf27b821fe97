"""Blanks around labels, label words and the fields of a table are not part of them, in every format."""

import csv
import io
import json

import pandas
import pytest
import torch
from folders import (
    label_rows,
    model_folder,
    refused,
    settings,
    tezo,
    tiny_model,
    tokenizer_for,
    train,
    words_tokenizer,
    write_rows,
)

from tezo.models.loading import LoadedModel
from tezo.system.errors import RequestError
from tezo.tasks.evaluation import measure
from tezo.tasks.examples import Row
from tezo.tasks.formats import choose_format
from tezo.tasks.notices import token_notices
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.row_files import DataConfig
from tezo.tasks.row_sources import read_rows
from tezo.tasks.splits import divide, read_splits, rows_of

ROWS = [
    row | {"text": text}
    for row, text in zip(
        label_rows(16), [row["text"].replace(" ", ", ", 1) if n % 3 else row["text"] for n, row in
                         enumerate(label_rows(16))], strict=True
    )
]  # fmt: skip
"""A third of the texts have no comma, so that they need no quotes."""


def loaded(family: str = "gpt2") -> LoadedModel:
    tokenizer = tokenizer_for(family)
    kind = {"roberta": "masked", "bert": "encoder"}.get(family, "causal")
    return LoadedModel(tiny_model(family, len(tokenizer)), tokenizer, kind)


def separated(rows: list[dict], sign: str) -> str:
    """A table with `sign` in the place of each separator."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter="\x1f", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: value.replace(",", "\x1f") for key, value in row.items()})
    quoted = text.getvalue().split('"')
    return '"'.join(part.replace("\x1f", "," if place % 2 else sign) for place, part in enumerate(quoted))


def spoilt(rows: list[dict]) -> list[dict]:
    around = [" {}", "{} ", "\t{}", "{}\n", "\u3000{}\u00a0", "{}"]
    return [row | {"label": around[n % 6].format(row["label"])} for n, row in enumerate(rows)]


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "roberta", "bert"])
@pytest.mark.parametrize(
    "form", [", ", " ,", "  ,\t", "; ", " ; ", " \t ", "csv", "tsv", "jsonl", "parquet", "memory", "frame"]
)
def test_blanks_around_commas_and_labels_change_no_bit_of_what_is_measured(tmp_path, family, form):
    if form in ("memory", "frame"):
        rows = rows_of(spoilt(ROWS) if form == "memory" else pandas.DataFrame(spoilt(ROWS)), "data")
    elif form.isalpha():
        rows = read_rows(str(write_rows(tmp_path / f"rows.{form}", spoilt(ROWS))), key="data")
    else:
        (tmp_path / "rows.csv").write_text(separated(ROWS, form))
        rows = read_rows(str(tmp_path / "rows.csv"), key="data")
        assert [row.fields for row in rows] == ROWS
    plain = rows_of(ROWS, "data")
    model, data = loaded(family), DataConfig(train="x")
    assert measure(data, model, rows, batch_size=4) == measure(data, model, plain, batch_size=4)
    forms = [choose_format(part, "causal", DataConfig(), str) for part in (rows, plain)]
    assert forms[0].labels == ("bad", "good") and forms[0] == forms[1]


def test_blanks_in_quotes_stay_and_so_do_all_where_the_header_has_none(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('prompt , completion\n" a "" , b " , " c"\n5" x, "y" z\n  d  ,\n "e" "f" , g\n')
    assert [list(row.fields.values()) for row in read_rows(str(path), key="data")] == [
        [' a " , b ', " c"], ['5" x', ' "y" z'], ["d", ""], [' "e" "f"', "g"],
    ]  # fmt: skip
    path.write_text("prompt,completion\nthe capital of France is, Paris\n")
    assert read_rows(str(path), key="data")[0].fields["completion"] == " Paris"


def test_the_rows_that_are_held_out_are_the_same(tmp_path):
    held = []
    for own in (ROWS, spoilt(ROWS)):
        data = DataConfig(train=str(write_rows(tmp_path / "rows.jsonl", own)))
        rows = read_splits(data)
        held.append([row.where for row in divide(rows, choose_format(rows.train, "causal", data, str), data, 3).dev])
    assert held[0] == held[1]


def test_label_words_have_no_blanks_around_them(tmp_path):
    plain = DataConfig(train="x", label_words={"good": "fine", "bad": "sour"})
    blank = DataConfig(train="x", label_words={" good": "fine ", "bad\t": "  sour"})
    assert blank == plain
    model = loaded()
    assert measure(blank, model, rows_of(spoilt(ROWS), "x"), batch_size=4) == measure(
        plain, model, rows_of(ROWS, "x"), batch_size=4
    )
    with pytest.raises(RequestError, match="label_words has a label twice, blanks around it aside: good,  good"):
        DataConfig(train="x", label_words={"good": "fine", " good": "sour"})
    folder, rows = model_folder(tmp_path, "opt"), write_rows(tmp_path / "rows.jsonl", ROWS)
    flags = settings(data__label_words='{" good": " sweet", "bad": "sour "}', method__name="tezo")
    for word in ("", "  "):
        empty = settings(data__label_words=f'{{"good": "{word}", "bad": "sour"}}')
        refused(train(folder, rows, tmp_path / "x", *empty), "data.label_words", "'good'", "empty")
    assert train(folder, rows, tmp_path / "run", *flags, steps=1).code == 0
    again = train(folder, rows, tmp_path / "run", *flags, "--resume", steps=1)
    assert again.code == 0, again.err
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 1


def test_a_classifiers_classes_have_no_blanks_around_them():
    model = tiny_model("bert", 64)
    model.config.id2label = {0: " bad", 1: "good "}
    found = LoadedModel(model, None, "classifier").classes
    form = choose_format(rows_of(spoilt(ROWS), "x"), "classifier", DataConfig(), str, found)
    assert form.options == ("bad", "good")


@pytest.mark.parametrize(
    "pair", [("very good", "very  good"), ("a b", "a\u00a0b"), ("Good", "good"), ("x \n Y", "X y")]
)
def test_two_labels_that_differ_in_blanks_or_case_alone_are_said(pair):
    tokenizer = words_tokenizer(more=["Good", "x", "Y", "X", "y", "b"])
    rows = [Row({"text": "the film", "label": label}, f"rows, line {n}") for n, label in enumerate([*pair, "bad"])]
    form = choose_format(rows, "causal", DataConfig(train="x"), str)
    objective = CausalObjective(tokenizer, torch.device("cpu"), 64, form.options)
    (notice,) = [said for said in token_notices(objective) if repr(pair[0]) in said and repr(pair[1]) in said]
    assert "bad" not in notice


# Tables as spreadsheets write them


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "sep=;;", "\ufeffsep=; "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_line_by_which_excel_names_the_separator_is_read(tmp_path, first, end):
    path = tmp_path / "rows.csv"
    path.write_text(end.join([first, "text, in words;label", '"a; b";good', "c, d;bad", ""]), newline="")
    rows = read_rows(str(path), key="data")
    assert [list(row.fields.items()) for row in rows] == [
        [("text, in words", "a; b"), ("label", "good")], [("text, in words", "c, d"), ("label", "bad")],
    ]  # fmt: skip
    assert [row.where for row in rows] == ["rows.csv, line 3", "rows.csv, line 4"]
    path.write_text(end.join([first, "text;label", "a;b;c"]), newline="")
    with pytest.raises(RequestError, match="line 3, does not have the 2 columns"):
        read_rows(str(path), key="data")


def test_a_separator_in_a_name_in_quotes_separates_nothing(tmp_path):
    (tmp_path / "rows.csv").write_text('"text, in words";label\na, b;good\n')
    (row,) = read_rows(str(tmp_path / "rows.csv"), key="data")
    assert row.fields == {"text, in words": "a, b", "label": "good"}


@pytest.mark.parametrize("header", ["text,label", "text,label,", "text,label,,", ",text,label,"])
@pytest.mark.parametrize("sign", [",", ";", "\t", " , "])
def test_columns_of_separators_alone_are_not_fields_and_no_row_is_lost(tmp_path, header, sign):
    number = header.startswith(",")
    lines = [[*["7"][:number], "a", "good", *behind] for behind in ([], [""], ["", " "], ["", "", ""])]
    text = "\n".join([header, *(",".join(line) for line in lines), ",,", ",,,,", ""]).replace(",", sign)
    (tmp_path / "rows.csv").write_text(text)
    rows = read_rows(str(tmp_path / "rows.csv"), key="data")
    assert [(row["text"], row["label"], row.where) for row in rows] == [
        ("a", "good", f"rows.csv, line {n}") for n in (2, 3, 4, 5)
    ]


@pytest.mark.parametrize("line", ["a,good,more", "a", "a,good,,x"])
def test_a_value_without_a_name_and_a_name_without_a_value_are_refused(tmp_path, line):
    (tmp_path / "rows.csv").write_text(f"text,label\n{line}\n")
    with pytest.raises(RequestError, match="line 2, does not have the 2 columns"):
        read_rows(str(tmp_path / "rows.csv"), key="data")


def test_answers_to_a_table_of_excel_are_in_its_order(tmp_path):
    model = model_folder(tmp_path, "opt")
    (tmp_path / "rows.csv").write_text("\ufeffsep=;\r\ntext ;label \r\n" + "".join(
        f"{row['text']};{row['label']} ;\r\n" for row in label_rows(12)
    ), newline="")  # fmt: skip
    done = tezo("eval", model, "--data", tmp_path / "rows.csv", "--json")
    plain = tezo("eval", model, "--data", write_rows(tmp_path / "plain.csv", label_rows(12)), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == json.loads(plain.out)
