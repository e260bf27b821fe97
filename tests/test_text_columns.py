"""Labelled rows whose text has another name are read as if it had the usual one, and what was taken is said."""

import json
import random

import pytest
from folders import label_rows, model_folder, read_jsonl, refused, settings, tezo, train, write_rows

import tezo as tezo_package
from tezo.runs.step_log import read_header
from tezo.system.errors import RequestError
from tezo.tasks.columns import PAIRS, USUAL
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


def paired(first: str, second: str, **more) -> list[dict]:
    """Rows with two texts, the second of which stands first."""
    return [
        {"idx": own["idx"], second: f"the {own['sentence']}", first: own["sentence"], "label": own["label"]}
        | {name: value(n) for name, value in more.items()}
        for n, own in enumerate(SST2)
    ]


@pytest.mark.parametrize("kind", ["causal", "masked", "encoder"])
@pytest.mark.parametrize(
    "pair",
    [*PAIRS, ("sentence1", "sentence2"), ("question1", "question2"), ("text_a", "text_b"), ("Premise", "Hypothesis"),
     ("Sentence A", "Sentence B")],
    ids=str,
)  # fmt: skip
def test_a_pair_of_texts_is_one_prompt_with_their_names(pair, kind):
    first, second = pair
    found = paired(first, second, source=lambda n: ("a", "b")[n % 2])
    form, text = form_of(found, kind), SST2[3]["sentence"].strip()
    plain = form_of([{"text": f"{first}: {text}\n{second}: the {text}", "label": own["label"]} for own in SST2], kind)
    joined = {"text": f"{first}: {text}\n{second}: the {text}", "label": SST2[3]["label"]}
    given, usual = form.example(rows(found)[3]), plain.example(Row(joined, "rows.jsonl, line 4"))
    assert (given.prompt, given.slot, given.answer) == (usual.prompt, usual.slot, usual.answer)
    (notice,) = form.notices
    assert f"{first!r} and {second!r} are taken for the texts, 'label' for the label" in notice
    again = form_of(found, kind, template=form.template, label_words=dict(form.words), shape="label")
    assert again.example(rows(found)[3]) == given and again.notices == ()


@pytest.mark.parametrize(
    "pair", [("review", "message"), ("sentence1", "comment"), ("title", "abstract"), ("text1", "body2"), ("q1", "q3")]
)
def test_two_texts_that_are_no_pair_are_asked_about_with_the_settings_to_write(pair):
    first, second = pair
    with pytest.raises(RequestError) as refusal:
        form_of([{**own, second: own[second] * 2} if first in USUAL else own for own in paired(first, second)])
    said = str(refusal.value)
    for part in ("rows.jsonl, line 1", "no field 'text'", f"'idx', {second!r}, {first!r}, 'label'",
                 f"data.text={second}", f"data.template='{{{second}}} {{{first}}} Label:'"):  # fmt: skip
        assert part in said, said
    found = paired(first, second)
    assert form_of(found, text=first).text == first
    both = form_of(found, template=f"{{{first}}} {{{second}}} Label:")
    text = SST2[0]["sentence"].strip()
    assert both.example(rows(found)[0]).prompt == f"{text} the {text} Label:"


def test_a_third_text_is_asked_about_beside_a_pair():
    with pytest.raises(RequestError, match="'hypothesis' and 'premise' and 'reason' may be the text"):
        form_of(paired("premise", "hypothesis", reason=lambda n: f"since {n} is so"))


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ({"mood": lambda n: ("good", "bad")[n % 2]}, "did you mean data.label=mood?"),
        ({"stars": lambda n: n % 3}, "did you mean data.label=stars?"),
        ({}, "'label'; other names are set with"),
        ({"score": lambda n: n / 7}, "'label'; other names are set with"),
    ],
    ids=["words", "numbers", "nothing", "measurements"],
)
def test_rows_without_a_label_are_refused_with_their_columns_and_the_line(own, line):
    fields = [
        {"sentence": one["sentence"]} | {key: value(n) for key, value in own.items()} for n, one in enumerate(SST2)
    ]
    with pytest.raises(RequestError) as refusal:
        form_of(fields)
    said = str(refusal.value)
    for part in (f"the fields {', '.join(['sentence', *own])} fit no known shape", line, "data.text, data.label"):
        assert part in said, said
    if "=" in line:
        assert form_of(fields, label=line.partition("=")[2].rstrip("?")).text == "sentence"
    assert form_of(fields, text="sentence", shape="text").shape == "text"


def test_a_usual_name_is_a_text_although_its_values_repeat():
    few = [{"sentence": "the film was good", "idx": n} for n in range(6)]
    form = form_of(few, label_words={"0": "bad", "1": "good"})
    assert form.text == "sentence"


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


@pytest.mark.parametrize(("train_name", "test_name"), [("text", "sentence"), ("sentence", "text"), ("title", "review")])
def test_dev_and_test_rows_may_have_the_text_under_another_name(tmp_path, train_name, test_name):
    model = model_folder(tmp_path, "opt")
    named = {
        name: write_rows(tmp_path / f"{name}.jsonl", [{name: own["sentence"], "label": own["label"]} for own in SST2])
        for name in {train_name, test_name, "text"}
    }
    flags = settings(method__name="tezo", data__hold_out=0.25)
    done = train(model, named[train_name], tmp_path / "run", *flags, "--test", named[test_name])
    assert done.code == 0, done.err
    usual = train(model, named["text"], tmp_path / "usual", *flags, "--test", named["text"])
    assert usual.code == 0
    for key in ("answers", "held_rows"):
        assert read_header(tmp_path / "run/steps.log")[key] == read_header(tmp_path / "usual/steps.log")[key]
    for name in {train_name, test_name} - {"text"}:
        assert done.says(f"'{name}' is taken for the text")


def test_a_run_that_found_its_text_reads_files_that_have_it_under_another_name(tmp_path):
    model = model_folder(tmp_path, "opt")
    rows_of = {name: [{name: own["text"], "label": own["label"]} for own in label_rows(24)] for name in
               ("sentence", "text", "review")}  # fmt: skip
    files = {name: write_rows(tmp_path / f"{name}.jsonl", own) for name, own in rows_of.items()}
    run, flags = tmp_path / "run", settings(method__name="tezo", train__keep_best=False)
    done = train(model, files["sentence"], run, *flags, "--test", files["text"])
    assert done.code == 0, done.err

    def measured(*given):
        done = tezo("eval", run, "--json", *given)
        assert done.code == 0, done.err
        found = json.loads(done.out)
        return found.pop("notices"), found

    notices, expected = measured("--data", files["sentence"])
    assert not any("found anew" in notice for notice in notices)
    for given in ((), ("--data", files["text"]), ("--data", files["review"])):
        notices, found = measured(*given)
        assert found == expected
        assert any("no field 'sentence'" in notice and "found anew" in notice for notice in notices)
    assert any("'review' is taken for the text" in notice for notice in notices)
    answers = []
    for name in files:
        done = tezo("predict", run, "--input", files[name], "--output", tmp_path / f"answers-{name}.jsonl")
        assert done.code == 0 and done.says("found anew") == (name != "sentence"), done.err
        answers.append([row["probabilities"] for row in read_jsonl(tmp_path / f"answers-{name}.jsonl")])
    assert answers[0] == answers[1] == answers[2]
    opened = tezo_package.open_run(run)
    expected = opened.evaluate(rows_of["sentence"]), opened.predict(rows_of["sentence"])
    with pytest.warns(UserWarning, match="found anew"):
        assert (opened.evaluate(rows_of["text"]), opened.predict(rows_of["text"])) == expected
    with pytest.warns(UserWarning, match="found anew"):
        found = opened.probabilities(rows_of["text"])
    assert found == opened.probabilities(rows_of["sentence"])


@pytest.mark.parametrize("given", [{"data__text": "sentence"}, {"data__template": "{sentence} Label:"}], ids=str)
def test_a_field_or_a_template_that_the_user_named_stays(given, tmp_path):
    model, data = model_folder(tmp_path, "opt"), write_rows(tmp_path / "rows.jsonl", SST2)
    done = train(model, data, tmp_path / "run", *settings(method__name="tezo", **given))
    assert done.code == 0, done.err
    other = write_rows(tmp_path / "other.jsonl", [{"text": own["sentence"], "label": own["label"]} for own in SST2])
    refused(tezo("eval", tmp_path / "run", "--data", other), "other.jsonl, line 1", "no field 'sentence'")
    named = "data.text=text" if "data__text" in given else "data.template={text} Label:"
    done = tezo("eval", tmp_path / "run", "--data", other, "--set", named)
    assert done.code == 0 and "found anew" not in done.err, done.err


def test_a_run_on_two_texts_says_the_prompt_and_knows_it_later(tmp_path):
    model, data = model_folder(tmp_path, "opt"), write_rows(tmp_path / "rows.jsonl", paired("premise", "hypothesis"))
    done = train(model, data, tmp_path / "run", *settings(method__name="tezo"))
    assert done.code == 0 and done.says("'premise' and 'hypothesis' are taken for the texts"), done.err
    assert done.says("label rows of premise, hypothesis, label; not read: idx", r"'premise: {premise}\nhypothesis:")
    asked = write_rows(tmp_path / "new.jsonl", [{"hypothesis": "the film", "premise": "a film"}])
    done = tezo("predict", tmp_path / "run", "--input", asked, "--output", tmp_path / "answers.jsonl")
    assert done.code == 0 and len(read_jsonl(tmp_path / "answers.jsonl")) == 1, done.err
    dry = tezo("train", "--model", model, "--data", data, "--dry-run")
    assert "are taken for the texts" in dry.out and "label rows of premise, hypothesis, label" in dry.out
