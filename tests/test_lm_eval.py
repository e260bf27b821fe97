"""lm-evaluation-harness is handed the tuned model in memory, and finds what direct evaluation finds."""

import json
import sys
from pathlib import Path

import pytest
import torch
from cases import mostly_slow
from folders import completion_rows, label_rows, model_folder, refused, tezo, write_rows
from transformers import AutoModelForCausalLM

import tezo as library

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
DECODER = Path(__file__).parents[2] / "shared/models/stories260K"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: {output_type}
doc_to_text: "{text}"
doc_to_target: "{target}"
target_delimiter: " "
metric_list:
  - metric: acc
"""
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what the harness imports
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two tasks of the harness over rows of ours, and a tuned run of each."""
    home = tmp_path_factory.mktemp("harness")
    model = model_folder(home, "opt")
    (home / "tasks").mkdir()
    said = write_rows(home / "said.jsonl", completion_rows(12))
    labelled = write_rows(home / "labelled.jsonl", label_rows(24))
    text = TASK.format(name="said", rows=said, output_type="loglikelihood", text="{{prompt}}", target="{{completion}}")
    (home / "tasks/said.yaml").write_text(text + "  - metric: perplexity\n")
    text = TASK.format(
        name="mood", rows=labelled, output_type="multiple_choice", text="{{text}}\\nLabel:", target="{{label}}"
    )
    (home / "tasks/mood.yaml").write_text(text + 'doc_to_choice: ["bad", "good"]\n')
    tuning = {"method": "tezo", "steps": 6, "batch_size": 8, "lr": 0.3, "rho": 0.01, "rank": 4, "keep_best": False,
              "guard": False}  # fmt: skip
    for rows, name in ((said, "said-run"), (labelled, "mood-run")):
        library.train(model, rows, dev=rows, output=home / name, **tuning).close()
    return home


def log_likelihoods(model, tokenizer, rows) -> list[float]:
    found = []
    for row in rows:
        prompt, whole = (tokenizer(text).input_ids for text in (row["prompt"], row["prompt"] + row["completion"]))
        with torch.no_grad():
            log_probs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        found.append(sum(float(log_probs[i - 1, whole[i]]) for i in range(len(prompt), len(whole))))
    return found


def by_harness(run, home, name="said") -> list[float]:
    results = library.lm_eval(run, name, task_folder=home / "tasks")
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0][0] for sample in samples]


def test_the_harness_finds_the_log_likelihoods_of_the_tuned_model_and_of_the_base(home, tmp_path):
    run = library.open_run(home / "said-run")
    merged = AutoModelForCausalLM.from_pretrained(run.export(tmp_path / "merged", "merged")).eval()
    base = AutoModelForCausalLM.from_pretrained(model_folder(home, "opt")).eval()
    rows = completion_rows(12)
    tuned, plain = (log_likelihoods(model, run.tokenizer, rows) for model in (merged, base))
    assert by_harness(run, home) == pytest.approx(tuned, abs=1e-3)
    assert by_harness(model_folder(home, "opt"), home) == pytest.approx(plain, abs=1e-3)
    assert max(abs(a - b) for a, b in zip(tuned, plain, strict=True)) > 0.1


def test_the_model_of_a_run_is_tuned_again_after_the_harness_as_before(home):
    run = library.open_run(home / "said-run")
    before = run.evaluate(home / "said.jsonl")
    by_harness(run, home)
    assert run.evaluate(home / "said.jsonl") == before
    run.close()


@pytest.mark.slow
def test_the_accuracy_of_the_harness_is_that_of_tezo_eval(home):
    done = [
        tezo("eval", name, "--lm-eval", "mood,said", "--task-folder", home / "tasks", "--json")
        for name in (home / "mood-run", model_folder(home, "opt"))
    ]
    assert all(d.code == 0 for d in done), done[0].err
    ours = [
        tezo("eval", name, "--data", home / "labelled.jsonl", "--json")
        for name in (home / "mood-run", model_folder(home, "opt"))
    ]
    theirs = [json.loads(d.out)["mood"]["acc,none"] for d in done]
    assert theirs == [json.loads(d.out)["accuracy"] for d in ours]
    assert theirs[0] != theirs[1]


def test_patterns_name_tasks_and_the_table_has_their_metrics(home):
    done = tezo("eval", home / "mood-run", "--lm-eval", "mo*,said", "--task-folder", home / "tasks")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert [line[0] for line in lines[:3]] == ["mood", "acc", "said"] and lines[1][2] == "+-"
    assert {line[0] for line in lines[3:]} == {"acc", "perplexity"}


@pytest.mark.skipif(not DECODER.is_dir(), reason=f"there is no {DECODER}")
def test_a_pretrained_decoder_is_tuned_and_evaluated_without_a_network(home, tmp_path):
    rows = completion_rows(12)
    run = library.train(DECODER, rows, dev=rows, method="tezo", steps=6, lr=1e-3, keep_best=False, guard=False)
    tuned = by_harness(run, home)
    assert max(abs(a - b) for a, b in zip(tuned, by_harness(DECODER, home), strict=True)) > 0.01
    assert tuned == pytest.approx(log_likelihoods(run.merge(), run.tokenizer, rows), abs=1e-2)


def test_requests_that_the_harness_cannot_meet(home, monkeypatch):
    more = ("--lm-eval", "mood", "--task-folder")
    refused(tezo("eval", home / "mood-run", *more, home / "none"), "task_folder", "there is no folder")
    refused(tezo("eval", home / "mood-run", *more, home / "tasks", "--probe"), "--lm-eval", "--probe")
    refused(tezo("eval", home / "mood-run", "--task-folder", home / "tasks"), "--lm-eval names no task")
    refused(tezo("eval", model_folder(home, "bert"), *more, home / "tasks"), "this model is encoder")
    (home / "tasks/lost.yaml").write_text((home / "tasks/said.yaml").read_text().replace("said", "lost"))
    refused(tezo("eval", home / "mood-run", "--lm-eval", "lost", *more[2:], home / "tasks"), "lm-eval", "lost.jsonl")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refused(tezo("eval", home / "mood-run", *more, home / "tasks"), "pip install 'tezo[lm-eval]'")


@pytest.mark.slow
def test_a_task_that_nobody_has(home):
    refused(tezo("eval", home / "mood-run", "--lm-eval", "moods"), "no task 'moods'", "lm-eval ls tasks")


ALL_KINDS = {
    "said": {},
    "mood": {},
    "rolled": {"output_type": "loglikelihood_rolling", "text": "", "target": "{{prompt}}{{completion}}",
               "metric": "word_perplexity"},
    "asked": {"output_type": "generate_until", "text": "{{prompt}}", "target": "{{completion}}",
              "metric": "exact_match", "more": "generation_kwargs:\n  max_gen_toks: 6\n  until: [\"\\n\", \"the\"]\n"},
}  # fmt: skip


@pytest.mark.parametrize("family", mostly_slow(["opt", "stories260K"], "opt"))
def test_an_evaluator_has_the_figures_of_the_harness_itself(home, tmp_path, family):
    # Rows scored and continued by the evaluator that engines share, beside the harness's model of transformers.
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from tezo.tasks.harness import HarnessModel
    from tezo.training.opening import open_model, run_config

    if family == "stories260K" and not DECODER.is_dir():
        pytest.skip("the pretrained decoder is not at hand")
    kinds = {name: kind for name, kind in ALL_KINDS.items() if name != "asked" or family == "stories260K"}  # byte level
    for name, kind in kinds.items():
        if kind:
            rows = home / "said.jsonl"
            text = TASK.format(name=name, rows=rows, **{key: kind[key] for key in ("output_type", "text", "target")})
            (tmp_path / f"{name}.yaml").write_text(text.replace("metric: acc", f"metric: {kind['metric']}")
                                                   + kind.get("more", ""))  # fmt: skip
        else:
            (tmp_path / f"{name}.yaml").write_text((home / f"tasks/{name}.yaml").read_text())
    folder = str(DECODER if family == "stories260K" else model_folder(tmp_path, family))
    loaded = open_model(folder, run_config(folder, []))
    reference = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4)
    found = []
    for model in (reference, HarnessModel(loaded, 4)):
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        done = simple_evaluate(model, tasks=list(kinds), task_manager=manager, bootstrap_iters=0)
        found.append({name: sorted(done["samples"][name], key=lambda sample: sample["doc_id"]) for name in kinds})
    for name in kinds:
        for theirs, ours in zip(found[0][name], found[1][name], strict=True):
            if name == "asked":
                assert ours["resps"] == theirs["resps"]
            elif name == "rolled":
                assert ours["resps"][0][0] == pytest.approx(theirs["resps"][0][0], abs=1e-3)
            else:
                for (mine,), (right,) in zip(ours["resps"], theirs["resps"], strict=True):
                    assert mine[0] == pytest.approx(right[0], abs=1e-3) and mine[1] == right[1]
    assert "asked" not in kinds or any(sample["resps"][0][0] for sample in found[0]["asked"])


@pytest.mark.engine
def test_a_file_in_llama_cpp_has_the_figures_of_transformers(home, tmp_path):
    from folders import bpe_tokenizer
    from gguf_files import tiny_llama, write_gguf
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer = bpe_tokenizer(chat=True)
    model = tiny_llama(len(tokenizer), max_position_embeddings=512).eval()
    file = write_gguf(tmp_path / "tiny.gguf", model, tokenizer)
    found = []
    for name in ("said", "mood"):
        done = tezo("eval", file, "--set", "model.engine=llama.cpp", "--lm-eval", name, "--task-folder", home / "tasks",
                    "--json")  # fmt: skip
        assert done.code == 0, done.err
        found.append(json.loads(done.out)[name])
    manager = TaskManager(include_path=str(home / "tasks"), include_defaults=False)
    reference = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, add_bos_token=False)  # as the file says
    theirs = simple_evaluate(reference, tasks=["said", "mood"], task_manager=manager, bootstrap_iters=0)["results"]
    for name, ours in zip(("said", "mood"), found, strict=True):
        for key, value in theirs[name].items():
            if isinstance(value, float):
                assert ours[key] == pytest.approx(value, rel=1e-3), (name, key)
