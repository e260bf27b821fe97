"""A model of each family goes through train, eval, predict and export by the command line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cases import mostly_slow
from folders import (
    CAUSAL,
    FAMILIES,
    completion_rows,
    label_rows,
    message_rows,
    model_folder,
    read_jsonl,
    settings,
    tezo,
    train,
    write_rows,
)
from transformers import AutoTokenizer

SHAPES = {"label": label_rows, "completion": completion_rows, "messages": message_rows}
PAIRS = [(family, "label") for family in FAMILIES] + [(f, s) for f in CAUSAL for s in ("completion", "messages")]
every_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)


@dataclass(frozen=True)
class Run:
    """A finished run, with the rows it was measured on."""

    folder: Path
    base: Path
    test: Path
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(family, shape) -> its run, made at first use."""
    root, made = tmp_path_factory.mktemp("families"), {}

    def run(pair: tuple[str, str]) -> Run:
        if pair not in made:
            family, shape = pair
            base = model_folder(root, family, chat=shape == "messages")
            data = write_rows(root / f"{shape}.jsonl", SHAPES[shape](12))
            test = write_rows(root / f"{shape}-test.jsonl", SHAPES[shape](9, seed=1))
            folder = root / "runs" / "-".join(pair)
            done = train(base, data, folder, "--test", test, "--json", steps=5, train__keep_best=False)
            assert done.code == 0, done.err
            made[pair] = Run(folder, base, test, json.loads(done.out))
        return made[pair]

    return run


def metrics_of(folder: Path, *more: Any) -> dict[str, Any]:
    done = tezo("eval", folder, "--json", *more)
    assert done.code == 0, done.err
    return {key: value for key, value in json.loads(done.out).items() if key not in ("rows", "notices")}


@pytest.mark.thinned
@every_pair
def test_training_changes_the_answers_and_writes_every_file(runs, pair):
    run = runs(pair)
    assert abs(run.summary["before"]["loss"] - run.summary["after"]["loss"]) > 1e-3
    assert {path.name for path in run.folder.iterdir()} == {
        "config.yaml", "plan.json", "steps.log", "metrics.jsonl", "adapter", "summary.json", "manifest.json",
        "basis-0.safetensors", "answers.json",
    }  # fmt: skip
    assert json.loads((run.folder / "summary.json").read_text()) == run.summary
    assert run.summary["steps"] == 5
    apart = 0 if pair[0] == "bert" else 2  # passes that check that rows are apart; an encoder's share their directions
    assert run.summary["num_forward_passes"] == 10 + apart
    assert run.summary["rows"] == {"train": 8, "dev": 4, "test": 9}


@pytest.mark.thinned
@every_pair
def test_the_figures_after_are_those_that_eval_gives(runs, pair):
    run = runs(pair)
    measured = pytest.approx(run.summary["after"], abs=1e-6)
    assert metrics_of(run.folder) == measured
    assert metrics_of(run.folder, "--data", run.test) == measured
    assert metrics_of(run.folder, *settings(train__eval_batch_size=2)) == measured


@pytest.mark.thinned
@every_pair
def test_the_figures_before_are_those_of_the_base_model(runs, pair):
    run = runs(pair)
    assert metrics_of(run.base, "--data", run.test) == pytest.approx(run.summary["before"], abs=1e-6)


@pytest.mark.thinned
@every_pair
def test_the_merged_export_is_a_model_with_the_same_figures(runs, pair, tmp_path):
    run = runs(pair)
    done = tezo("export", run.folder, "--format", "merged", "--output", tmp_path / "merged")
    assert done.code == 0, done.err
    assert str(tmp_path / "merged") in done.out
    after = pytest.approx(run.summary["after"], abs=1e-5)
    assert metrics_of(tmp_path / "merged", "--data", run.test) == after


@pytest.mark.thinned
@every_pair
def test_the_lora_export_holds_the_adapter_of_the_run(runs, pair, tmp_path):
    run = runs(pair)
    done = tezo("export", run.folder, "--format", "lora", "--output", tmp_path / "lora")
    assert done.code == 0, done.err
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "lora" / name).read_bytes() == (run.folder / "adapter" / name).read_bytes()


@pytest.mark.thinned
@every_pair
def test_predict_answers_every_row_in_order(runs, pair, tmp_path):
    run = runs(pair)
    rows = read_jsonl(run.test)
    answer = {"label": "label", "completion": "completion"}.get(pair[1])
    asked = [{key: value for key, value in row.items() if key != answer} for row in rows]
    source = write_rows(tmp_path / "asked.jsonl", asked)
    done = tezo("predict", run.folder, "--input", source, "--output", tmp_path / "answers.jsonl")
    assert done.code == 0, done.err
    answers = read_jsonl(tmp_path / "answers.jsonl")
    predictions = [row.pop("prediction") for row in answers]
    sure = [(row.pop("probability"), row.pop("probabilities")) for row in answers if pair[1] == "label"]
    assert all(probability == max(of_labels.values()) for probability, of_labels in sure)
    assert answers == asked
    if pair[1] == "label":
        right = sum(row["label"] == prediction for row, prediction in zip(rows, predictions, strict=True))
        assert set(predictions) <= {"good", "bad"}
        assert right / len(rows) == pytest.approx(run.summary["after"]["accuracy"])
    else:
        assert all(isinstance(prediction, str) for prediction in predictions)
        assert any(predictions), "not one word was generated"


@pytest.mark.parametrize("family", mostly_slow(CAUSAL, "gpt2", "llama"))
def test_generated_answers_do_not_depend_on_their_neighbours_and_stop_in_time(runs, family, tmp_path):
    run = runs((family, "completion"))
    rows = read_jsonl(run.test)
    answers = []
    for name, part in (("all", rows), ("one", rows[:1])):
        source = write_rows(tmp_path / f"{name}.jsonl", part)
        flags = ("--output", tmp_path / f"{name}-answers.jsonl", "--max-new-tokens", 3)
        assert tezo("predict", run.folder, "--input", source, *flags).code == 0
        answers.append(read_jsonl(tmp_path / f"{name}-answers.jsonl")[0]["prediction"])
    tokenizer = AutoTokenizer.from_pretrained(run.base)
    assert answers[0] == answers[1]
    # tokens of random weights need not be those that their text is split into again
    assert len(answers[0]) <= 3 * max(len(tokenizer.decode([i])) for i in range(len(tokenizer)))
