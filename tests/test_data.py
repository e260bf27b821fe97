"""Files to rows, rows to examples; and every fault of a data file through the command line."""

import json
from functools import partial

import pytest
from folders import (
    CHAT_TEMPLATE,
    completion_rows,
    label_rows,
    message_rows,
    model_folder,
    refused,
    settings,
    tezo,
    train,
    words_tokenizer,
    write_rows,
)

from tezo.system.errors import RequestError
from tezo.tasks.examples import Row
from tezo.tasks.formats import choose_format
from tezo.tasks.notices import token_notices
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.masked import MaskedObjective
from tezo.tasks.row_files import DataConfig
from tezo.tasks.row_sources import read_rows
from tezo.tasks.setup import render_chat

AWKWARD = [
    {"text": 'He said "quite good", twice', "label": "good"},
    {"text": "two\nlines\r\nand a third", "label": "bad"},
    {"text": " spaces, commas; tabs\tand ümläuts 語 🙂 ", "label": "good"},
    {"text": "{mask} {label} {text} {} {{x}} %s \\n \\1", "label": "bad"},
    {"text": "a line\u2028separator, a\x85next line and a\x0cform feed", "label": "good"},
]


def no_chat(messages: object) -> str:
    raise AssertionError("not asked for")


def label_format(kind: str, rows: list[dict], **fields):
    numbered = [Row(row, f"rows, line {n}") for n, row in enumerate(rows, start=1)]
    return choose_format(numbered, kind, DataConfig(**fields), no_chat), numbered


# Reading


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    rows = read_rows(str(write_rows(tmp_path / f"rows.{suffix}", AWKWARD)), key="data.train")
    assert [row.fields for row in rows] == AWKWARD
    assert len({row.where for row in rows}) == len(AWKWARD)
    assert all(row.where.startswith(f"rows.{suffix}, ") for row in rows)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_byte_order_mark_and_blank_lines_are_not_data(tmp_path, suffix):
    plain = write_rows(tmp_path / f"plain.{suffix}", label_rows(3))
    lines = plain.read_bytes().splitlines(keepends=True)
    marked = tmp_path / f"marked.{suffix}"
    marked.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n\n")
    assert [row.fields for row in read_rows(str(marked), key="data")] == label_rows(3)


def test_a_row_knows_the_line_it_stands_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n\n{"a": 2}\r\n{"a": 3}')
    assert [row.where for row in read_rows(str(path), key="data")] == [f"rows.jsonl, line {n}" for n in (1, 4, 5)]


def test_numbers_stand_for_labels_in_every_kind_of_file(tmp_path):
    rows = [{"text": "the film", "label": 1}, {"text": "a meal", "label": 0}]
    for suffix in ("jsonl", "csv", "parquet"):
        found = read_rows(str(write_rows(tmp_path / f"rows.{suffix}", rows)), key="data")
        form = choose_format(found, "causal", DataConfig(), no_chat)
        assert form.labels == ("0", "1")
        assert [form.example(row).label for row in found] == [1, 0]


# Formats


def test_the_shape_goes_by_the_fields_of_the_first_row():
    shapes = {"label": label_rows(4), "completion": completion_rows(4), "messages": message_rows(4)}
    for shape, rows in shapes.items():
        form, _ = label_format("causal", rows)
        assert form.shape == shape
    with pytest.raises(RequestError, match="fit no known shape"):
        label_format("causal", [{"review": "x", "stars": 5}])


def test_a_template_takes_any_fields_of_the_row():
    rows = [{"title": "song", "body": "sweet", "year": 1999, "mood": "good"}, {"title": "meal", "mood": "bad"}]
    form, numbered = label_format("causal", rows, label="mood", template="{year}: {title} / {body} / {title} =>")
    assert form.example(numbered[0]).prompt == "1999: song / sweet / song =>"
    with pytest.raises(RequestError, match="rows, line 2: there is no field 'year'"):
        form.example(numbered[1])


def test_a_field_may_have_any_name_and_a_template_without_one_is_refused():
    rows = [
        {"Review Text": word, "by-whom": "me", "the-label": label}
        for word, label in (("sweet", "good"), ("sour", "bad"))
    ]
    named = {"label": "the-label", "text": "Review Text"}
    form, numbered = label_format("causal", rows, **named)
    assert [form.example(row).prompt for row in numbered] == ["sweet\nLabel:", "sour\nLabel:"]
    form, numbered = label_format("causal", rows, **named, template='{"a": 1, { Review Text }} {by-whom}')
    assert form.example(numbered[0]).prompt == '{"a": 1, sweet} me'
    with pytest.raises(RequestError, match=r"there is no field 'Reviw Text'.*Did you mean 'Review Text'"):
        form, numbered = label_format("causal", rows, label="the-label", text="Reviw Text")
        form.example(numbered[0])
    for kind, template in (("causal", "It was"), ("causal", '{"a": 1}'), ("masked", "It was {mask}.")):
        with pytest.raises(RequestError, match=r"names no field, .* Review Text, by-whom\."):
            label_format(kind, rows, **named, template=template)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"template": "{label} {text}"}, r"data.template is '{label} {text}', which puts the label into the prompt"),
        ({"template": "{text} {LABEL}:"}, r"data.template is '{text} {LABEL}:', which"),
        ({"text": "label"}, r"data.text is 'label', which puts the label into the prompt"),
    ],
)
@pytest.mark.parametrize("own", ["label", "Label"])
def test_a_prompt_that_has_the_label_in_it_is_refused(own, fields, said):
    rows = [{"text": row["text"], own: row["label"]} for row in label_rows(4)]
    with pytest.raises(RequestError, match=said):
        label_format("causal", rows, **fields)


def test_a_notice_says_which_labelled_rows_have_no_text():
    rows = [{"text": text, "title": "", "label": "good"} for text in ("sweet", "", " \u200b\n", "kind")]
    words = {"good": "good", "bad": "bad"}
    form, numbered = label_format("causal", rows, label_words=words, template="{title} {text} =>")
    objective = CausalObjective(words_tokenizer(), "cpu", 100, form.options)
    for row in numbered:
        objective.encode(form.example(row))
    (notice,) = token_notices(objective)
    assert notice.startswith("2 row(s) (rows, line 2; rows, line 3): the text is empty")


def test_words_stand_for_labels_in_the_order_given():
    rows = label_rows(2)
    form, numbered = label_format("causal", rows, label_words={"bad": "stale", "good": "fresh"})
    example = form.example(numbered[0])
    assert (form.labels, example.options) == (("bad", "good"), (" stale", " fresh"))
    assert (example.label, example.answer) == (1, " fresh")
    encoder, numbered = label_format("encoder", rows, label_words={"bad": "stale meal", "good": "fresh meal"})
    assert encoder.example(numbered[0]).options == ("stale meal", "fresh meal")


@pytest.mark.parametrize("text", ["{mask}", "{label}", "{text}", "{nothing}", "{", "a {mask} b {mask}", "\\1 \\g<0>"])
def test_braces_in_the_text_of_a_row_are_only_text(text):
    form, numbered = label_format("causal", [{"text": text, "label": "good"}, {"text": "x", "label": "bad"}])
    assert form.example(numbered[0]).prompt == f"{text}\nLabel:"
    tokenizer = words_tokenizer(closing=True)
    form, numbered = label_format("masked", [{"text": text, "label": "good"}, {"text": "x", "label": "bad"}])
    objective = MaskedObjective(tokenizer, "cpu", 100, form.options)
    encoded = objective.encode(form.example(numbered[0]))
    tail = list(tokenizer(" It was <mask>.")["input_ids"])[1:]
    assert encoded.sequences[0].count(tokenizer.mask_token_id) == 1
    assert list(encoded.sequences[0][-len(tail) :]) == tail


def test_the_answer_may_be_missing_where_it_is_asked_for():
    form, numbered = label_format("causal", label_rows(2))
    example = form.example(Row({"text": "the film"}, "new, line 1"), answered=False)
    assert (example.label, example.answer, example.options) == (None, "", form.options)
    chat, numbered = label_format("causal", message_rows(2))
    assert chat.shape == "messages"
    with pytest.raises(RequestError, match="the last message is not the assistant's"):
        chat.example(Row({"messages": numbered[0].fields["messages"][:1]}, "new, line 1"))


def test_a_conversation_is_put_as_the_models_template_has_it(tmp_path):
    tokenizer = words_tokenizer(chat=True)
    rows = [Row(row, "chat") for row in message_rows(1)]
    form = choose_format(rows, "causal", DataConfig(), partial(render_chat, tokenizer))
    example = form.example(rows[0])
    user, assistant = (message["content"] for message in rows[0].fields["messages"])
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert example.prompt == f"user : {user}\nassistant :"
    assert example.answer == f" {assistant}"  # the template's own space before it
    ids = CausalObjective(tokenizer, "cpu", 100, ()).encode(example).sequences[0]
    assert ids[0] != tokenizer.bos_token_id, "the template puts special tokens, if any; none may be added to it"


# Faults, through the command line


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    for family in ("opt", "roberta", "bert"):
        model_folder(root, family)
    write_rows(root / "rows.jsonl", label_rows(8))
    return root


LINE = '{"text": "the film", "label": "good"}\n{"text": "a meal", "label": "bad"}\n'
HEADER = "text,label\nthe film,good\n"
FAULTS = {
    "empty": ("jsonl", "", ["no rows"]),
    "blank": ("jsonl", "\n\n", ["no rows"]),
    "no csv rows": ("csv", "text,label\n", ["no rows"]),
    "broken line": ("jsonl", LINE + '{"text": "x", \n', ["line 3", "not JSON", "fix that line"]),
    "broken csv": ("csv", HEADER + '"a meal"x,bad\n', ["line 3", "fix that line"]),
    "open quote": ("csv", HEADER + '"a meal,bad\n', ["line 3", "fix that line"]),
    "too many columns": ("csv", HEADER + "a,meal,bad\n", ["line 3", "2 columns"]),
    "too few columns": ("csv", HEADER + "meal\n", ["line 3", "2 columns"]),
    "array": ("jsonl", LINE + "[1, 2]\n", ["line 3", "not an object"]),
    "number": ("jsonl", LINE + "7\n", ["line 3", "not an object"]),
    "half a character": ("jsonl", LINE + '{"text": "\\ud83d", "label": "good"}\n', ["line 3", "surrogate"]),
    "endless number": ("jsonl", LINE + '{"text": ' + "7" * 5000 + "}\n", ["line 3", "not JSON"]),
    "not utf-8": ("jsonl", LINE.encode() + b'{"text": "caf\xe9", "label": "good"}\n', ["line 3", "UTF-8"]),
    "not utf-8 csv": ("csv", HEADER.encode() + b"caf\xe9,good\n", ["line 3", "UTF-8"]),
    "lacks a field": ("jsonl", LINE + '{"txet": "x", "label": "good"}\n', ["line 3", "'text'", "'txet'"]),
    "lacks a label": ("jsonl", LINE + '{"text": "x"}\n', ["line 3", "'label'"]),
    "label of no kind": ("jsonl", LINE + '{"text": "x", "label": null}\n', ["line 3", "'label'", "string"]),
    "other fields": ("jsonl", '{"review": "x", "stars": 5}\n', ["line 1", "review, stars", "'prompt'", "data.text"]),
    "one label": ("jsonl", '{"text": "x", "label": "good"}\n' * 3, ["data.label", "good", "two"]),
    "suffix": ("xml", LINE, [".jsonl", ".parquet", "convert"]),
    "not parquet": ("parquet", LINE, ["not a Parquet file"]),
}


OF_TRAINING_ROWS = {"one label", "other fields"}


@pytest.mark.parametrize(
    ("fault", "place"), [(f, p) for f in FAULTS for p in ("train", "test") if p == "train" or f not in OF_TRAINING_ROWS]
)
def test_a_faulty_file_is_refused(home, tmp_path, fault, place):
    suffix, content, parts = FAULTS[fault]
    path = tmp_path / f"bad.{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    data, flags = (path, ()) if place == "train" else (home / "rows.jsonl", ("--test", path))
    done = train(home / "opt", data, tmp_path / "out", *flags)
    refused(done, *parts)
    assert fault == "one label" or path.name in done.err
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named_with_its_key(home, tmp_path):
    missing = tmp_path / "nowhere.jsonl"
    refused(train(home / "opt", missing, tmp_path / "out"), "data.train", missing, "no file", "path")
    for key in ("dev", "test"):
        done = train(home / "opt", home / "rows.jsonl", tmp_path / "out", **{f"data__{key}": missing})
        refused(done, f"data.{key}", missing, "no file")
    refused(tezo("eval", home / "opt", "--data", missing), "data", missing, "no file")
    assert not (tmp_path / "out").exists()


def test_an_unknown_label_in_test_rows_is_refused_with_its_line(home, tmp_path):
    test = write_rows(tmp_path / "test.jsonl", [*label_rows(3), {"text": "x", "label": "goood"}])
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "out", "--test", test)
    refused(done, "test.jsonl, line 4", "'goood'", "'good'", "data.label_words")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "values", "parts"),
    [
        ("roberta", {"data__label_words": "{good: very good, bad: bad}"}, ["data.label_words", "'very good'", "token"]),
        ("roberta", {"data__label_words": "{good: xyzzy, bad: bad}"}, ["data.label_words", "'xyzzy'", "token"]),
        ("roberta", {"data__template": "{text} It was"}, ["data.template", "'{text} It was'", "{mask}"]),
        ("roberta", {"data__template": "{mask} {text} {mask}"}, ["data.template", "2 masks", "one"]),
        ("opt", {"data__template": "{text} {mask}"}, ["data.template", "'{text} {mask}'", "causal"]),
        ("opt", {"data__template": "{txet}"}, ["rows.jsonl, line", "'txet'", "'text'"]),
        ("opt", {"data__per_class": 40}, ["data.per_class", "40", "'bad'", "4", "lower"]),
        (
            "opt",
            {"data__label_words": "{good: fine}"},
            ["data.label_words: there is only one label (good)", "name two"],
        ),
        ("opt", {"data__label_words": "{good: fine, bad: fine}"}, ["data.label_words", "fine"]),
        ("bert", {"data__shape": "completion"}, ["data.shape", "completion", "encoder"]),
        ("opt", {"data__shape": "messages"}, ["rows.jsonl, line", "'messages'"]),
    ],
)
def test_data_and_model_that_do_not_go_together(home, tmp_path, model, values, parts):
    refused(train(home / model, home / "rows.jsonl", tmp_path / "out", **values), *parts)
    assert not (tmp_path / "out").exists()


def test_messages_need_a_chat_template_and_per_class_needs_labels(home, tmp_path):
    chat = write_rows(tmp_path / "chat.jsonl", message_rows(4))
    done = train(home / "opt", chat, tmp_path / "out")
    refused(done, "data.messages", "no chat template", "'prompt'")
    text = write_rows(tmp_path / "text.jsonl", completion_rows(4))
    refused(train(home / "opt", text, tmp_path / "out", data__per_class=2), "data.per_class", "no labels")
    assert not (tmp_path / "out").exists()


def test_predict_keeps_every_field_of_every_kind_of_file(home, tmp_path):
    assert train(home / "opt", home / "rows.jsonl", tmp_path / "run").code == 0
    rows = [{"id": str(i), "text": row["text"]} for i, row in enumerate(AWKWARD)]
    for suffix in ("jsonl", "csv", "parquet"):
        source, target = write_rows(tmp_path / f"new.{suffix}", rows), tmp_path / f"{suffix}.answers.jsonl"
        done = tezo("predict", tmp_path / "run", "--input", source, "--output", target, *settings(data__max_length=90))
        assert done.code == 0, done.err
        answers = [json.loads(line) for line in target.read_text(encoding="utf-8").split("\n") if line]
        assert [{"id": a["id"], "text": a["text"]} for a in answers] == rows
        assert {a["prediction"] for a in answers} <= {"good", "bad"}
