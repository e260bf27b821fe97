"""The sixteen tasks: prompts to the letter, on rows written for the project; labels; what bad rows get; metrics."""

import json
import re
from pathlib import Path

import pytest

from tezo.system.errors import RequestError
from tezo.tasks.catalogue import CAUSAL, MASKED, TASKS, example_row, task
from tezo.tasks.examples import Row, drop, normalized, squad

GOLDEN = Path(__file__).parent / "golden"
GOLDENS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(GOLDEN.glob("*.json"))}
CASES = [
    pytest.param(name, kind, id=f"{name}-{kind}")
    for name, golden in GOLDENS.items()
    for kind in ("causal", "masked")
    if kind in golden
]


def format_of(name, kind):
    return task(name).wording(kind)


def shown(example, kind):
    if kind == "causal":
        assert example.slot is None
        return example.prompt
    return example.prompt[: example.slot] + "<mask>" + example.prompt[example.slot :]


def test_the_papers_tasks_are_all_there_each_with_a_golden_prompt_for_every_kind_of_language_model():
    assert [entry.name for entry in CAUSAL] == [
        "sst2", "rte", "cb", "boolq", "wsc", "wic", "multirc", "copa", "record", "squad", "drop",
    ]  # fmt: skip
    assert {entry.name for entry in MASKED} == {"sst5", "snli", "mnli", "qnli", "trec"}
    assert all("masked" in TASKS[name].wordings for name in ("sst2", "rte"))
    for name, entry in TASKS.items():
        assert {"causal", "masked"} & set(entry.wordings) == {"causal", "masked"} & set(GOLDENS[name]), name


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_prompt_is_the_golden_one_character_by_character(name, kind):
    golden = GOLDENS[name]
    example = format_of(name, kind).example(example_row(name))
    assert shown(example, kind) == golden[kind]["prompt"]
    assert list(example.options) == golden[kind]["options"]
    assert example.answer == golden[kind]["answer"]
    if example.options:
        assert example.options[example.label] == example.answer


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_without_its_answer_a_row_has_the_same_prompt(name, kind):
    form = format_of(name, kind)
    known = form.example(example_row(name))
    hidden = {
        key: value for key, value in example_row(name).fields.items() if key not in ("label", "coarse_label", "answers")
    }
    asked = form.example(Row(hidden, "here"), answered=False)
    assert (asked.prompt, asked.slot, asked.options) == (known.prompt, known.slot, known.options)
    assert asked.answer == "" and asked.label is None and not asked.references


@pytest.mark.parametrize("name", ["copa", "record"])
def test_options_of_a_rows_own_are_learnt_by_writing_the_right_one(name):
    golden = GOLDENS[name]
    example = format_of(name, "causal").training_example(example_row(name))
    assert example.options == () and example.answer == golden["causal"]["answer"] and not example.ends


def test_all_references_of_a_free_answer_are_kept():
    example = format_of("squad", "causal").example(example_row("squad"))
    assert example.references == ("red brick", "brick")


def test_every_right_entity_counts():
    row = {**example_row("record").fields, "answers": ["Tom Hale", "Bergen"]}
    assert format_of("record", "causal").example(Row(row, "here")).right == (2, 0)


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("sst2", {"label": 2}, "label is 2; it must be a whole number from 0 to 1"),
        ("sst2", {"label": "1"}, "field 'label' is str, not int"),
        ("trec", {"text": "a\0b"}, "the text has a NUL character in it"),
        ("trec", {"coarse_label": -1}, "coarse_label is -1"),
        ("record", {"answers": ["Oslo"]}, "none of its answers is among its entities"),
        ("squad", {"answers": {"text": []}}, "there is no answer"),
        ("copa", {"question": "why"}, "question is 'why'; it must be cause or effect"),
        ("boolq", {"passage": 3}, "field 'passage' is int, not str"),
    ],
)
def test_a_bad_row_is_named_with_its_field(name, change, fault):
    kind = "causal" if "causal" in TASKS[name].wordings else "masked"
    with pytest.raises(RequestError, match=re.escape(fault)) as error:
        format_of(name, kind).example(Row({**example_row(name).fields, **change}, "train.jsonl, line 3"))
    assert str(error.value).startswith("train.jsonl, line 3: ")


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_row_without_a_field_is_named_with_the_field(name, kind):
    for field in example_row(name).fields:
        row = {key: value for key, value in example_row(name).fields.items() if key != field}
        with pytest.raises(RequestError, match=f"train.jsonl, line 3: there is no field '{field}'"):
            format_of(name, kind).example(Row(row, "train.jsonl, line 3"))


def test_an_unknown_task_is_answered_with_the_nearest_name():
    with pytest.raises(RequestError, match=r"there is no task 'sst-2'.*sst2"):
        task("sst-2")


def test_a_task_is_refused_for_a_kind_of_model_it_has_no_words_for():
    with pytest.raises(RequestError, match="squad is for causal models, but this model is masked"):
        task("squad").wording("masked")


@pytest.mark.parametrize(
    ("said", "references", "exact", "f1"),
    [
        ("The Red  Brick.", ["red brick"], 1.0, 1.0),
        ("brick", ["red brick", "stone"], 0.0, 2 / 3),
        ("a brick of stone", ["red brick", "brick stone"], 0.0, 4 / 5),
        ("", ["red"], 0.0, 0.0),
        ("red red", ["red"], 0.0, 2 / 3),
    ],
)
def test_exact_match_and_f1_as_squad_has_them(said, references, exact, f1):
    assert squad(said, references) == {"exact_match": exact, "f1": pytest.approx(f1)}
    assert normalized("An  apple, the (red) one!") == "apple red one"


@pytest.mark.parametrize(
    ("said", "spans", "exact", "f1"),
    [
        ("21", ["21"], 1.0, 1.0),
        ("21.0 points", ["21"], 0.0, 0.67),
        ("20", ["21"], 0.0, 0.0),
        ("12 yards", ["21 yards"], 0.0, 0.0),  # the number does not match, so the word does not count
        ("the Bears", ["Bears"], 1.0, 1.0),
        ("Bears", ["Bears", "Lions"], 0.0, 0.5),
        ("Bears", ["Chicago Bears"], 0.0, 0.67),
        ("Bears Chicago", ["Chicago Bears"], 0.0, 1.0),
        ("dog dog", ["dog"], 0.0, 1.0),
    ],
)
def test_exact_match_and_f1_as_drop_has_them(said, spans, exact, f1):
    assert drop(said, spans) == {"drop_exact_match": exact, "drop_f1": f1}
