"""Labelled rows whose text has another name are read as if it had the usual one, and what was taken is said."""

import json
import random

import pytest
from folders import label_rows, model_folder, read_jsonl, refused, settings, tezo, train, write_rows

from tezo.runs.step_log import read_header
from tezo.system.errors import RequestError
from tezo.tasks.columns import USUAL
from tezo.tasks.examples import Row
from tezo.tasks.formats import choose_format
from tezo.tasks.row_files import DataConfig

SST2 = [
    {"sentence": f"{row['text']} ", "label": int(row["label"] == "good"), "idx": n}
    for n, row in enumerate(label_rows(24))
]


def rows(fields: list[dict]) -> list[Row]:
    return [Row(own, f"rows.jsonl, line {n}") for n, own in enumerate(fields, start=1)]


def form_of(fields: list[dict], kind: str = "causal", **data):
    return choose_format(rows(fields), kind, DataConfig(train="x", **data), str)


def wider(**more) -> list[dict]:
    return [{key: value(n) for key, value in more.items()} | own for n, own in enumerate(SST2)]


def test_rows_of_sst2_are_read_as_they_are():
    plain = [{"text": own["sentence"], "label": own["label"]} for own in SST2]
    for kind in ("causal", "masked", "encoder"):
        form, usual = form_of(SST2, kind), form_of(plain, kind)
        assert [form.example(row) for row in rows(SST2)] == [usual.example(row) for row in rows(plain)]
        (notice,) = form.notices
        assert "'sentence' is taken for the text, 'label' for the label" in notice and usual.notices == ()


@pytest.mark.parametrize("seed", range(6))
def test_columns_that_number_or_group_rows_are_no_text_in_any_order(seed):
    """In a table all values are strings."""
    draw = random.Random(seed)
    others = {
        "idx": str, "ID": lambda n: f"row-{n}", "": str, "Unnamed: 0": str, "review_id": lambda n: f"r{n}x",
        "stars": lambda n: str(n % 5), "date": lambda n: f"2020-01-{n:02}", "lang": lambda _: "en",
        "source": lambda n: ("imdb", "yelp")[n % 2], "score": lambda n: n / 7, "tags": lambda _: ["a", "b"],
        "empty": lambda _: None, "uuid": lambda n: f"{n:x}f-ab",
    }  # fmt: skip
    names = draw.sample(list(others), draw.randint(0, len(others)))
    found = []
    for own in wider(**{name: others[name] for name in names}):
        fields = list((own | {"Comment": own["sentence"]}).items())
        draw.shuffle(fields)
        found.append({name: value for name, value in fields if name != "sentence"})
    assert form_of(found).text == "Comment"


@pytest.mark.parametrize("name", sorted(USUAL))
def test_a_usual_name_is_taken_before_shorter_texts(name):
    fields = [{"about": f"the film {n}", name.title(): f"a {own['sentence']}", "label": own["label"]} for n, own in
              enumerate(SST2)]  # fmt: skip
    form = form_of(fields)
    assert form.example(rows(fields)[0]).prompt.startswith("a ")
    if name != "text":  # which is the field itself
        assert f"{name.title()!r} is taken for the text" in form.notices[0] and "'about' not read" in form.notices[0]


@pytest.mark.parametrize(
    ("pair", "template"),
    [
        (("sentence1", "sentence2"), "'{sentence1} {sentence2} Label:'"),
        (("title", "body"), "'{title} {body} Label:'"),
        (("question", "passage"), "'{question} {passage} Label:'"),
    ],
)
def test_two_texts_are_asked_about_with_the_settings_to_write(pair, template):
    first, second = pair
    fields = [
        {"idx": own["idx"], first: own["sentence"], second: f"the {own['sentence']}", "label": own["label"]}
        for own in SST2
    ]
    with pytest.raises(RequestError) as refusal:
        form_of(fields)
    said = str(refusal.value)
    for part in ("rows.jsonl, line 1", "no field 'text'", f"'idx', {pair[0]!r}, {pair[1]!r}, 'label'",
                 f"data.text={pair[0]}", f"data.template={template}"):  # fmt: skip
        assert part in said, said
    assert form_of(fields, text=pair[0]).text == pair[0]
    both = form_of(fields, template=template.strip("'"))
    assert both.example(rows(fields)[0]).prompt == (
        f"{SST2[0]['sentence'].strip()} the {SST2[0]['sentence'].strip()} Label:"
    )


def test_rows_without_a_text_and_a_name_that_was_given_are_refused():
    with pytest.raises(RequestError, match=r"no field 'text', but 'label', 'idx'; set data\.text"):
        form_of([{"label": own["label"], "idx": own["idx"]} for own in SST2])
    with pytest.raises(RequestError, match=r"no field 'sentense'.*Did you mean 'sentence'"):
        form_of(SST2, text="sentense").example(rows(SST2)[0])
    assert form_of(SST2, template="{idx}: {sentence}").notices == ()


def test_a_run_on_such_rows_says_what_it_took_and_knows_it_later(tmp_path):
    model, data = model_folder(tmp_path, "opt"), write_rows(tmp_path / "rows.jsonl", SST2)
    plain = [{"text": own["sentence"], "label": own["label"]} for own in SST2]
    flags = settings(method__name="tezo")
    done = train(model, data, tmp_path / "run", *flags)
    assert done.code == 0, done.err
    assert done.says(
        "label rows of sentence, label; not read: idx", "note: there is no field 'text': 'sentence' is taken"
    )
    usual = train(model, write_rows(tmp_path / "plain.jsonl", plain), tmp_path / "usual", *flags)
    assert usual.code == 0 and "is taken for" not in usual.err
    for key in ("rows", "answers", "held_rows"):
        assert read_header(tmp_path / "run/steps.log")[key] == read_header(tmp_path / "usual/steps.log")[key]
    again = train(model, data, tmp_path / "run", *flags, "--resume")
    assert again.code == 0, again.err
    asked = write_rows(tmp_path / "new.jsonl", [{"sentence": own["sentence"]} for own in SST2[:5]])
    done = tezo("predict", tmp_path / "run", "--input", asked, "--output", tmp_path / "answers.jsonl")
    assert done.code == 0 and "is taken for" not in done.err, done.err
    words = settings(data__label_words="{0: bad, 1: good}")
    for command in (
        ["eval", model, "--data", data],
        ["predict", model, "--input", asked, "--output", tmp_path / "b.jsonl"],
    ):
        done = tezo(*command, *words)
        assert done.code == 0 and done.says("'sentence' is taken for the text"), done.err
    assert len(read_jsonl(tmp_path / "b.jsonl")) == 5
    done = tezo("eval", model, "--data", data, "--json")
    assert "'sentence' is taken for the text" in json.loads(done.out)["notices"][0]
    pairs = write_rows(tmp_path / "pairs.jsonl", [own | {"sentence2": own["sentence"]} for own in SST2])
    refused(train(model, pairs, tmp_path / "x", "--set", "data.text=text2"), "text2")
