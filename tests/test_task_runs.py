"""The tasks through the command line: train, evaluate, predict, from a folder of rows; sizes of splits; faults."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from folders import (
    bpe_tokenizer,
    label_rows,
    read_jsonl,
    refused,
    saved,
    settings,
    tezo,
    tiny_model,
    words_tokenizer,
    write_rows,
)

from tezo.errors import RequestError
from tezo.evaluate import evaluate, option_scores, predict
from tezo.objectives import CausalObjective
from tezo.recipe import DataConfig
from tezo.splits import divide, evaluation_rows, read_splits
from tezo.tasks import TASKS, Demonstrated, Example, Row, TaskFormat, task
from tezo.tasks.catalogue import example_row
from tezo.tasks.metrics import squad

LABEL_WORDS = [
    "terrible", "great", "Yes", "No", "Maybe", "okay",
    "Expression", "Entity", "Description", "Human", "Location", "Number",
]  # fmt: skip
RUNS = [(name, kind) for name, entry in TASKS.items() for kind in entry.wordings]
METRICS = {
    "copa": {"loss", "accuracy"},
    "record": {"loss", "accuracy", "exact_match", "f1"},
    "squad": {"loss", "token_accuracy", "exact_match", "f1"},
    "drop": {"loss", "token_accuracy", "exact_match", "f1", "drop_exact_match", "drop_f1"},
}


def rows_of(name: str, count: int) -> list[dict]:
    """Rows of a task that differ in their labels and in a number."""
    row = example_row(name).fields
    words = next(iter(TASKS[name].wordings.values())).words
    field = "coarse_label" if name == "trec" else "label"
    labels = {field: len(words) or 2} if field in row else {}
    return [{**row, **{key: i % most for key, most in labels.items()}, "idx": i} for i in range(count)]


def write_task(root: Path, name: str, train: int, validation: int = 6) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    write_rows(folder / "train.jsonl", rows_of(name, train))
    write_rows(folder / "validation.jsonl", rows_of(name, validation))
    return root


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    tokenizer = bpe_tokenizer()
    saved(tiny_model("opt", len(tokenizer)), tokenizer, root / "causal")
    for kind, family in (("masked", "roberta"), ("encoder", "bert")):
        tokenizer = words_tokenizer(closing=True, more=LABEL_WORDS)
        saved(tiny_model(family, len(tokenizer)), tokenizer, root / kind)
    for name in TASKS:
        write_task(root / "data", name, 24)
    return root


def trained(home: Path, name: str, kind: str, output: Path, **values):
    flags = ("--model", home / kind, "--task", name, "--data-dir", home / "data", "--steps", 1, "--output", output)
    named = {"method__rank": 4, "train__batch_size": 4} | values
    return tezo("train", *flags, "--json", *settings(**named))


@pytest.mark.parametrize(("name", "kind"), RUNS, ids=[f"{name}-{kind}" for name, kind in RUNS])
def test_a_task_is_trained_on_evaluated_and_answered(home, tmp_path, name, kind):
    done = trained(home, name, kind, tmp_path / "run")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["rows"] == {"train": 15, "dev": 9, "test": 6}
    assert any("24 rows to train on, not 1000 +" in notice for notice in summary["notices"])
    assert set(summary["after"]) == METRICS.get(name, {"loss", "accuracy", "macro_f1"})
    again = tezo("eval", tmp_path / "run", "--json")
    found = json.loads(again.out)
    assert found.pop("rows") == 6
    found.pop("notices")
    assert found == pytest.approx(summary["after"], abs=1e-5)
    file = home / "data" / name / "validation.jsonl"
    asked = tezo("predict", tmp_path / "run", "--input", file, "--output", tmp_path / "answers.jsonl")
    assert asked.code == 0, asked.err
    wording = TASKS[name].wordings[kind]
    for row in read_jsonl(tmp_path / "answers.jsonl"):
        if wording.labels:
            assert row["prediction"] in wording.labels
        elif name == "record":
            assert row["prediction"] in row["entities"]
        elif name == "copa":
            assert row["prediction"].lower() in (row["choice1"].lower(), row["choice2"].lower())


def test_a_model_as_it_is_is_measured_on_a_task(home):
    done = tezo("eval", home / "causal", "--task", "rte", "--data-dir", home / "data", "--json")
    assert done.code == 0, done.err
    assert {"accuracy", "macro_f1"} < set(json.loads(done.out))


def form_of(name: str, kind: str) -> TaskFormat:
    return TaskFormat(task(name), task(name).wording(kind))


def divided(root: Path, name: str, kind: str, run_seed: int = 0, **data):
    config = DataConfig(task=name, dir=str(root), **data)
    return divide(read_splits(config), form_of(name, kind), config, run_seed)


def places(rows) -> set[str]:
    return {row.where for row in rows}


@pytest.mark.parametrize(("name", "train", "expected"), [
    ("wsc", 554, (333, 221)), ("cb", 250, (150, 100)), ("rte", 2490, (1000, 500)), ("copa", 400, (300, 100)),
])  # fmt: skip
def test_a_dev_set_does_not_eat_the_training_rows(tmp_path, name, train, expected):
    rows = divided(write_task(tmp_path, name, train), name, "causal")
    assert (len(rows.train), len(rows.dev)) == expected
    assert not places(rows.train) & places(rows.dev)
    assert bool(rows.notices) == (train < 1500)


def test_sizes_that_are_asked_for_are_kept_or_refused(tmp_path):
    root = write_task(tmp_path, "wsc", 60, 20)
    rows = divided(root, "wsc", "causal", num_train=40, num_dev=20, num_test=10)
    assert [len(part) for part in (rows.train, rows.dev, rows.test)] == [40, 20, 10]
    for sizes, fault in (
        ({"num_train": 50, "num_dev": 20}, r"data\.num_train \+ data\.num_dev is 70, but there are 60 rows"),
        ({"num_test": 21}, r"data\.num_test is 21, but there are 20 rows"),
    ):
        with pytest.raises(RequestError, match=fault):
            divided(root, "wsc", "causal", **sizes)
        assert divided(root, "wsc", "causal", allow_fewer=True, **sizes)


def test_few_shots_are_k_of_each_class_for_training_and_for_choosing(tmp_path):
    root = write_task(tmp_path, "trec", 120, 30)
    form = form_of("trec", "masked")
    drawn = [divided(root, "trec", "masked", seed, per_class=7, num_test=9) for seed in (13, 21)]
    for rows in drawn:
        for part in (rows.train, rows.dev):
            assert Counter(form.example(row).label for row in part) == dict.fromkeys(range(6), 7)
        assert not places(rows.train) & places(rows.dev)
    assert places(drawn[0].train) != places(drawn[1].train)
    assert drawn[0].test == drawn[1].test, "the rows that are reported on are the same for every seed"
    assert drawn[0].train == divided(root, "trec", "masked", 99, seed=13, per_class=7).train


def test_few_shots_may_be_read_off_a_larger_dev_set_that_is_the_same_for_every_k(tmp_path):
    root = write_task(tmp_path, "trec", 240, 30)
    form = form_of("trec", "masked")
    drawn = {k: divided(root, "trec", "masked", 13, per_class=k, num_dev=100) for k in (3, 9)}
    for k, rows in drawn.items():
        assert len(rows.dev) == 100 and not places(rows.train) & places(rows.dev) and not rows.notices
        assert Counter(form.example(row).label for row in rows.train) == dict.fromkeys(range(6), k)
    assert drawn[3].dev == drawn[9].dev != divided(root, "trec", "masked", 21, per_class=3, num_dev=100).dev
    with pytest.raises(RequestError, match=r"data\.num_dev \+ data\.per_class of each label is 280, .* 240 rows"):
        divided(root, "trec", "masked", per_class=30, num_dev=100)
    few = divided(root, "trec", "masked", per_class=30, num_dev=100, allow_fewer=True)
    assert (len(few.train), len(few.dev)) == (144, 96) and len(few.notices) == 2, "dev rows are two fifths at most"


def test_rows_without_a_label_are_left_out(tmp_path):
    root = write_task(tmp_path, "snli", 12)
    write_rows(root / "snli/validation.jsonl", [{**row, "label": i - 1} for i, row in enumerate(rows_of("snli", 4))])
    assert [row.fields["label"] for row in evaluation_rows(DataConfig(task="snli", dir=str(root)))] == [0, 1, 2]


def test_any_right_option_counts_and_the_references_measure_its_name():
    tokenizer = bpe_tokenizer()
    model = tiny_model("opt", len(tokenizer))
    objective = CausalObjective(tokenizer, torch.device("cpu"), 100, ())
    options, names = (" good", " bad", " a film"), ("Good", "Bad", "A film")
    asked = Example("It was", " good", options, 0, "a line", names=names)
    (best,) = predict(model, objective, [objective.encode(asked)], 1, 0)
    right = names.index(best)
    other = (right + 1) % 3
    for indices, hit in (((other, right), 1.0), ((other,), 0.0)):
        references = tuple(names[i] for i in indices)
        example = Example(
            "It was", options[other], options, other, "", names=names, right=indices, references=references
        )
        found = evaluate(model, objective, [objective.encode(example)], 1, measures=(squad,))
        assert (found["accuracy"], found["exact_match"]) == (hit, hit)


def test_an_answer_in_free_text_ends_with_its_line():
    tokenizer = bpe_tokenizer()
    model = tiny_model("opt", len(tokenizer), tie_word_embeddings=False)
    line_end = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    objective = CausalObjective(tokenizer, torch.device("cpu"), 100, ())

    with torch.no_grad():  # close behind the best token: it is chosen now and then
        model.lm_head.weight[line_end] = model.lm_head.weight[5:].mean(0) + 0.5 * torch.randn(
            16, generator=torch.manual_seed(3)
        )
    prompts = ("It was a film", "the meal was cold", "my", "ask the waiter", "we buy bread")
    examples = [objective.encode(Example(prompt, "", (), None, "", ends=False)) for prompt in prompts]
    whole = [tokenizer.decode(continued(model, e.sequences[0], 12)) for e in examples]
    assert any("\n" in text for text in whole)
    assert predict(model, objective, examples, 2, 12) == [text.partition("\n")[0].strip() for text in whole]


@torch.no_grad()
def continued(model, ids: tuple[int, ...], count: int) -> list[int]:
    """The likeliest token, `count` times."""
    found = list(ids)
    for _ in range(count):
        found.append(int(model(input_ids=torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


# Faults


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--task", "wik"], ["data.task", "'wik'", "Did you mean 'wic'"]),
        (["--task", "rte", "--data", "rows.jsonl"], ["data.train", "'rows.jsonl'", "'rte'", "leave one"]),
        (["--task", "rte", "--set", "data.test=tset"], ["data.dir", "'tset'", "train, validation"]),
        (["--task", "rte", "--set", "data.train_split=trian"], ["data.dir", "'trian'", "train, validation"]),
        (["--task", "rte", "--set", "data.num_test=7"], ["data.num_test", "7", "6 rows"]),
        (["--task", "rte", "--set", "data.per_class=40"], ["data.per_class", "40", "'Yes'", "12 rows"]),
        (["--task", "squad", "--set", "data.per_class=2"], ["data.per_class", "no labels"]),
        (["--task", "snli"], ["data.task", "snli", "masked", "causal"]),
    ],
)
def test_a_task_that_cannot_be_had(home, tmp_path, flags, parts):
    always = ("--model", home / "causal", "--data-dir", home / "data", "--output", tmp_path / "out")
    refused(tezo("train", *always, *flags), *parts)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_the_task(home, tmp_path):
    flags = ("--model", home / "causal", "--task", "rte", "--data-dir", tmp_path, "--output", tmp_path / "out")
    refused(tezo("train", *flags), "data.dir", "rte", "no rows")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"label": 2}, ["train.jsonl, line 1", "label is 2", "0 to 1"]),
        ({"label": "yes"}, ["train.jsonl, line 1", "'label'", "str"]),
        ({"premise": None}, ["train.jsonl, line 1", "'premise'", "NoneType"]),
        ({"hypothesis": ...}, ["train.jsonl, line 1", "'hypothesis'"]),
    ],
)
def test_a_row_that_does_not_fit_its_task(home, tmp_path, change, parts):
    shutil.copytree(home / "data/rte", tmp_path / "rte")
    first, *others = rows_of("rte", 6)
    changed = {key: value for key, value in (first | change).items() if value is not ...}
    write_rows(tmp_path / "rte/train.jsonl", [changed, *others])
    flags = ("--model", home / "causal", "--task", "rte", "--data-dir", tmp_path, "--output", tmp_path / "out")
    refused(tezo("train", *flags, *settings(data__num_train=4, data__num_dev=2)), *parts)


def test_models_that_cannot_take_a_masked_task(home, tmp_path):
    tokenizer = words_tokenizer(closing=True, more=[word for word in LABEL_WORDS if word != "Maybe"])
    folder = saved(tiny_model("roberta", len(tokenizer)), tokenizer, tmp_path / "wordless")
    flags = ("--task", "snli", "--data-dir", home / "data", "--output", tmp_path / "out")
    refused(tezo("train", "--model", folder, *flags), "data.label_words", "'Maybe'", "one token")
    tokenizer = words_tokenizer(closing=True, more=LABEL_WORDS)
    tokenizer.mask_token = None
    folder = saved(tiny_model("roberta", len(tokenizer)), tokenizer, tmp_path / "maskless")
    refused(tezo("train", "--model", folder, *flags), "no mask token")


def test_a_model_too_short_for_an_answer(home, tmp_path):
    flags = ("--task", "squad", "--data-dir", home / "data", "--output", tmp_path / "out")
    tokenizer = bpe_tokenizer()
    short = saved(tiny_model("opt", len(tokenizer), max_position_embeddings=40), tokenizer, tmp_path / "short")
    refused(tezo("train", "--model", short, *flags), "max_new_tokens", "50", "40")


def test_tasks_are_listed_and_shown():
    listed = tezo("tasks").out.splitlines()
    assert [line.split()[0] for line in listed] == list(TASKS)
    shown = tezo("tasks", "trec").out
    assert "<mask>:" in shown and "Expression" in shown and "CogComp/trec" in shown
    everything = json.loads(tezo("tasks", "--json").out)
    assert [entry["name"] for entry in everything] == list(TASKS)
    assert all(model["prompt"] for entry in everything for model in entry["models"].values())
    refused(tezo("tasks", "snil"), "data.task", "Did you mean 'snli'")


# In-context learning, calibration, objectives that are no losses


def test_demonstrations_come_before_the_question_solved_and_drawn_anew_for_each_row():
    inner = form_of("rte", "causal")
    pool = [Row({**example_row("rte").fields, "premise": f"Premise {i}.", "label": i % 2}, f"p{i}") for i in range(9)]
    form = Demonstrated(inner, pool, 3, seed=0)
    for row in pool:
        *shown, asked = form.example(row).prompt.split("\n\n")
        assert asked == inner.example(row).prompt
        solved = {(inner.example(other).prompt + inner.example(other).answer).strip() for other in pool if other != row}
        assert len(set(shown)) == 3 and set(shown) <= solved
    assert len({form.example(row).prompt.rpartition("\n\n")[0] for row in pool}) > 5
    with pytest.raises(RequestError, match=r"shots is 9, but there are 8 other rows"):
        Demonstrated(inner, pool, 9, seed=0).example(pool[0])


def test_calibrated_scores_are_what_the_rows_own_text_adds():
    tokenizer = bpe_tokenizer()
    model = tiny_model("opt", len(tokenizer))
    objective = CausalObjective(tokenizer, torch.device("cpu"), 150, ())
    rows = [Row(fields, "here") for fields in rows_of("copa", 3)]
    encoded = [objective.encode(form_of("copa", "causal").example(row)) for row in rows]
    nulls = [objective.encode(Example(" because", "", e.example.options, None, "")) for e in encoded]

    def whole(e) -> list[float]:
        return [option_log_prob(model, e.sequences[i], e.answers[i]) for i in range(len(e.sequences))]

    found = option_scores(model, objective, encoded, 2, calibrate=True)
    for scores, e, null in zip(found, encoded, nulls, strict=True):
        expected = [a - b for a, b in zip(whole(e), whole(null), strict=True)]
        assert scores.tolist() == pytest.approx(expected, abs=1e-4)
    sst2 = form_of("sst2", "causal").example(example_row("sst2"))
    assert sst2.null == " It was"


@torch.no_grad()
def option_log_prob(model, sequence: tuple[int, ...], answer: int) -> float:
    log_probs = model(input_ids=torch.tensor([sequence])).logits[0].double().log_softmax(-1)
    start = len(sequence) - answer
    return sum(float(log_probs[place - 1, sequence[place]]) for place in range(start, len(sequence)))


def test_shots_and_calibration_by_the_command_line(home):
    always = ("eval", home / "causal", "--data-dir", home / "data", "--json")
    found = {}
    for flags in ((), ("--shots", 2), ("--calibrate",)):
        done = tezo(*always, "--task", "sst2", *flags)
        assert done.code == 0, done.err
        found[flags] = json.loads(done.out)["loss"]
    assert len(set(found.values())) == 3
    refused(tezo(*always, "--task", "sst2", "--shots", 40), "shots is 40", "lower")
    masked = ("eval", home / "masked", "--data-dir", home / "data", "--task", "sst2")
    refused(tezo(*masked, "--shots", 2), "shots is 2", "masked")
    refused(tezo(*masked, "--calibrate"), "calibrate", "causal")


@pytest.mark.parametrize(
    ("name", "objective"), [("sst2", "accuracy"), ("copa", "accuracy"), ("squad", "f1"), ("drop", "drop_f1")]
)
def test_a_metric_is_an_objective(home, tmp_path, name, objective):
    done = trained(home, name, "causal", tmp_path / "run", train__objective=objective, train__log_every=1)
    assert done.code == 0, done.err
    (line,) = [line for line in read_jsonl(tmp_path / "run/metrics.jsonl") if "projected_grads" in line]
    assert -1 <= line["loss"] <= 0


def test_the_accuracy_of_a_separable_task_grows_by_its_own_objective(tmp_path):
    tokenizer = words_tokenizer()
    model = saved(tiny_model("opt", len(tokenizer)), tokenizer, tmp_path / "opt")
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(32))
    flags = ("--model", model, "--data", rows, "--test", rows, "--method", "mezo-norm", "--json")
    named = {"method__lr": 0.02, "method__rho": 0.05, "train__batch_size": 32, "train__objective": "accuracy",
             "train__keep_best": False}  # fmt: skip
    done = tezo("train", *flags, "--steps", 400, "--output", tmp_path / "run", *settings(**named))
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["before"]["accuracy"] < 0.7 and summary["after"]["accuracy"] > 0.85


@pytest.mark.parametrize(
    ("name", "values", "parts"),
    [
        ("sst2", {"train__objective": "acuracy"}, ["train.objective", "'acuracy'", "Did you mean 'accuracy'"]),
        ("squad", {"train__objective": "accuracy"}, ["train.objective", "'accuracy'", "token_accuracy"]),
        ("sst2", {"train__objective": "accuracy", "method__name": "adam", "method__rank": None},
         ["train.objective", "accuracy", "no gradient"]),
    ],
)  # fmt: skip
def test_objectives_that_cannot_be_had(home, tmp_path, name, values, parts):
    values = {key: value for key, value in ({"method__rank": 4} | values).items() if value is not None}
    flags = ("--model", home / "causal", "--task", name, "--data-dir", home / "data", "--output", tmp_path / "out")
    refused(tezo("train", *flags, *settings(**values)), *parts)
    assert not (tmp_path / "out").exists()
