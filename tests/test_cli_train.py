"""The command line: what it prints and where, what it says of cut prompts and held-out rows, how a run fails."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from folders import (
    bpe_tokenizer,
    completion_rows,
    label_rows,
    model_folder,
    read_jsonl,
    refused,
    saved,
    settings,
    tezo,
    tiny_model,
    tokenizer_for,
    train,
    write_rows,
)
from safetensors.torch import load_file, save_file

from tezo.methods import METHODS
from tezo.runs.words import work_text
from tezo.tasks.examples import MOST_TEXT
from tezo.training.choices import choose_size
from tezo.training.settings import TrainConfig

PROGRAM = Path(sys.executable).parent / "tezo"
COMMANDS = ("train", "eval", "predict", "export", "methods", "doctor", "report")
# Runs each command line in turn, in a fresh interpreter, and says what it imported.
HELP = """
import sys
import threading
from tezo.cli.main import main
for arguments in {arguments!r}:
    try:
        main(arguments)
    except SystemExit as stop:
        assert not stop.code, (arguments, stop.code)
heavy = [name for name in ("torch", "transformers", "datasets", "numpy") if name in sys.modules]
assert not heavy, heavy
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    write_rows(root / "rows.jsonl", label_rows(12))
    write_rows(root / "test.jsonl", label_rows(6, seed=1))
    write_rows(root / "text.jsonl", completion_rows(8))
    model_folder(root, "opt")
    return root


def program(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_help_of_every_command_works_without_importing_torch():
    script = HELP.format(arguments=[["--help"], *([name, "--help"] for name in COMMANDS)])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"tezo {name}" in done.stdout or f"{name} [OPTIONS]" in done.stdout


@pytest.mark.slow
def test_the_installed_program_fails_in_words_and_with_debug_in_full(home, tmp_path):
    flags = ("train", "--model", home / "opt", "--data", tmp_path / "no.jsonl", "--output", tmp_path / "out")
    done = program(*flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert sum("error" in line for line in done.stderr.splitlines()) == 1
    assert "no.jsonl" in done.stderr
    done = program("--debug", *flags)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_name_that_the_hub_does_not_have(home, tmp_path):
    flags = ("--data", home / "rows.jsonl", "--output", tmp_path / "out")
    refused(
        tezo("train", "--model", "nobody/no-such-model", *flags),
        "model.name: nobody/no-such-model",
        "hub cannot be reached",
    )
    assert not (tmp_path / "out").exists()


def test_a_command_that_is_not_there_is_refused():
    done = tezo("trian")
    assert done.code == 2
    assert "trian" in done.err


def test_results_go_to_standard_output_and_progress_to_standard_error(home, tmp_path):
    run = tmp_path / "a run"
    done = train(home / "opt", home / "rows.jsonl", run, "--test", home / "test.jsonl")
    summary = json.loads((run / "summary.json").read_text())
    words = "".join(done.out.split())
    assert done.code == 0
    assert "6testrows" in words
    assert f"loss{summary['before']['loss']:.4f}{summary['after']['loss']:.4f}" in words.replace("│", "")
    assert str(run / "adapter") in done.out
    assert work_text(summary) in " ".join(done.out.split()) and f"{summary['steps']} steps, " in work_text(summary)
    assert f"tezo predict '{run}' --input" in done.out
    assert done.says("head-feedback on", home / "opt", "rank 4", "8 training rows, 4 dev, 6 test", "step 0 test")


def test_json_is_all_there_is_on_standard_output(home, tmp_path):
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "run", "--json")
    assert done.code == 0 and "loading the model" in done.err.splitlines() and "step 0" not in done.err
    assert json.loads(done.out) == json.loads((tmp_path / "run" / "summary.json").read_text())
    measured = tezo("eval", tmp_path / "run", "--data", home / "test.jsonl", "--json")
    assert json.loads(measured.out)["rows"] == 6


def test_held_out_rows_are_said(home, tmp_path):
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "run", data__hold_out=0.25)
    assert done.says("3 of 12 training rows are held out", "data.dev names others", "9 training rows, 3 dev, 0 test")
    assert "dev rows, which also chose the step" in " ".join(done.out.split())
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "other", "--test", home / "test.jsonl")
    assert done.says("4 of 12 training rows are held out", "8 training rows, 4 dev, 6 test")
    assert "6 test rows" in " ".join(done.out.split())
    named = {"data__hold_out": 0, "data__test": home / "test.jsonl"}
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "none", **named)
    assert done.says("12 training rows, 0 dev, 6 test") and not done.says("held out")


def test_free_text_is_sampled_before_and_after(home, tmp_path):
    rows = write_rows(tmp_path / "text.jsonl", completion_rows(12))
    done = train(home / "opt", rows, tmp_path / "run")
    dev = [line for line in done.err.splitlines() if line.startswith("sample of text.jsonl, line ")]
    assert done.code == 0 and len(dev) == 2
    samples = [line.split() for line in done.err.splitlines() if line.startswith(("  prompt", "  before", "  after"))]
    assert [words[0] for words in samples] == ["prompt", "before", "after"] * 2
    labelled = train(home / "opt", home / "rows.jsonl", tmp_path / "other")
    assert "sample of" not in labelled.err


def test_a_run_ends_with_a_verdict(home, tmp_path):
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "run")
    said = json.loads((tmp_path / "run/summary.json").read_text())["verdict"]
    assert said in done.out and said.split(":")[0] in ("Better", "Hardly better", "No better")


def test_of_several_processes_the_first_prints(home, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "run")
    assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.parametrize(("count", "batch", "steps"), [(10, 16, 200), (160, 16, 200), (480, 16, 600), (480, 4, 1000)])
def test_the_number_of_steps_follows_from_the_rows(count, batch, steps):
    chosen = METHODS["head-feedback"]
    found = {choice.key: choice.value for choice in choose_size(TrainConfig(batch_size=batch), count, chosen)}
    given = {choice.key: choice.value for choice in choose_size(TrainConfig(steps=7), count, chosen)}
    assert found["train.steps"] == steps and given["train.steps"] == 7


def test_flags_and_settings_are_laid_over_a_recipe(home, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {home / 'opt'}\ndata: {home / 'rows.jsonl'}\nmethod: mezo\ntrain: {{steps: 7, seed: 3}}\n"
    )
    flags = ("--method", "tezo", "--steps", 2, "--set", "method.rank=2", "--json")
    done = tezo("train", recipe, *flags, "--output", tmp_path / "run")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert (summary["method"], summary["steps"], summary["seed"], summary["result"]["rank"]) == ("tezo", 2, 3, 2)


@pytest.mark.parametrize(
    "method", [{}, {"method__name": "tezo-cadam", "method__rank": "null"}], ids=["rank 4", "layer-wise rank"]
)
def test_the_configuration_in_a_run_folder_is_the_same_run(home, tmp_path, method):
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(home / "opt", home / "rows.jsonl", first, **method).code == 0
    assert tezo("train", first / "config.yaml", "--output", second).code == 0
    assert (first / "config.yaml").read_text() == (second / "config.yaml").read_text()
    names = "adapter/adapter_model.safetensors"
    assert (first / names).read_bytes() == (second / names).read_bytes()
    ranks = {row.get("rank") for row in json.loads((first / "plan.json").read_text())} - {None}
    assert (ranks == {4}) == (not method)


@pytest.mark.parametrize(("family", "side"), [("opt", "beginning"), ("roberta", "longer side"), ("bert", "end")])
def test_cut_prompts_are_counted_and_the_run_goes_on(home, tmp_path, family, side):
    tokenizer = tokenizer_for(family)
    template = {"opt": "{} Label : good", "roberta": "{} It was <mask> .", "bert": "{}"}[family]
    over = [max(0, len(tokenizer(template.format(row["text"]))["input_ids"]) - 12) for row in label_rows(12)]
    rows, cut = sum(n > 0 for n in over), sum(over)
    assert 0 < rows < 12
    flags = ("--test", home / "test.jsonl")
    done = train(model_folder(home, family), home / "rows.jsonl", tmp_path / "run", *flags, data__max_length=12)
    own = [max(0, len(tokenizer(template.format(row["text"]))["input_ids"]) - 12) for row in label_rows(6, seed=1)]
    assert done.code == 0, done.err
    whole = f"{rows + sum(n > 0 for n in own)} text(s) are longer than 12 tokens"
    assert done.says(whole, f"{cut + sum(own)} tokens cut", side, "data.max_length", "rows.jsonl, line")
    source = ("--input", home / "rows.jsonl", "--output", tmp_path / "answers.jsonl")
    measured = tezo("eval", tmp_path / "run", "--data", home / "rows.jsonl")
    for later in (measured, tezo("predict", tmp_path / "run", *source)):
        assert later.code == 0, later.err
        assert later.says(f"{rows} text(s) are longer than 12 tokens", f"{cut} tokens cut")
    assert len(read_jsonl(tmp_path / "answers.jsonl")) == 12


def test_an_answer_that_is_too_long_is_an_error(home, tmp_path):
    rows = [*completion_rows(3), {"prompt": "question :", "completion": " good" * 30}]
    data = write_rows(tmp_path / "long.jsonl", rows)
    done = train(home / "opt", data, tmp_path / "run", data__max_length=20)
    refused(done, "long.jsonl, line 4", "answer", "data.max_length", "20", "raise it")
    assert not (tmp_path / "run").exists()


def test_label_descriptions_of_an_encoder_that_are_cut_are_said(home, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    words = {"good": "the film was quite good and not so very bad " * 3, "bad": "bad"}
    recipe.write_text(json.dumps({"data": {"train": str(home / "rows.jsonl"), "label_words": words, "max_length": 16}}))
    flags = ("--model", model_folder(home, "bert"), "--steps", 1, "--output", tmp_path / "run")
    done = tezo("train", recipe, *flags, *settings(method__rank=2))
    assert done.says("data.label_words", "the film was quite", "16")


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("rank", [4, "null"], ids=["rank 4", "layer-wise rank"])
def test_a_loss_that_is_no_number_ends_the_run_in_words(home, tmp_path, value, rank):
    folder = tmp_path / "model"
    tiny_model("opt", len(tokenizer_for("opt"))).save_pretrained(folder)
    tokenizer_for("opt").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.decoder.layers.0.fc1.weight"][0, 0] = float(value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    method = "head-feedback" if rank == 4 else "tezo-cadam"
    done = train(folder, home / "rows.jsonl", tmp_path / "run", method__name=method, method__rank=rank)
    if rank == 4:
        refused(done, "the loss of the untuned model is", "float32")
        assert not (tmp_path / "run").exists()
    else:  # the layer-wise rule meets the weight before any loss does
        refused(done, "model.decoder.layers.0.fc1.weight")


def test_a_loss_that_overflows_later_tells_the_step_and_the_last_good_loss(home, tmp_path):
    done = train(
        home / "opt", home / "rows.jsonl", tmp_path / "run", train__log_every=1, method__lr=1e30, train__guard=False
    )
    lines = [line for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "split" not in line]
    assert lines, "it failed at the first step"
    refused(done, f"step {lines[-1]['step']}", f"last good loss was {lines[-1]['loss']:.6g}", "restored")


def test_methods_and_doctor_answer_people_and_programs(home):
    listed = json.loads(tezo("methods", "--json").out)
    assert {m["name"] for m in listed if not m["in_paper"]} == {
        "mezo-norm", "tezo-cadam", "head-feedback", "gauss-newton", "mezo-sign", "mezo-conservative", "sparse-mezo",
        "fzoo", "grzo", "forward-gradient", "es", "probe", "policy-gradient",
    }  # fmt: skip
    shown = tezo("methods").out
    assert all(m["name"] in shown for m in listed)
    assert "lr=auto" in tezo("methods", "head-feedback").out and "lr=1e-06" in tezo("methods", "mezo").out
    report = json.loads(tezo("doctor", "--model", home / "opt", "--json").out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["model"]["kind"] == "causal"
    assert "causal" in tezo("doctor", "--model", home / "opt").out
    assert tezo("doctor", "--model", home / "nowhere").code == 2
    refused(tezo("doctor", "--set", "model.dtype=bfloat16"), "--set", "--model")
    for method in ("adam", "gauss-newton"):  # the one has no rho, the other no rows here
        done = tezo("doctor", "--model", home / "opt", "--set", f"method.name={method}", "--json")
        assert done.code == 0 and isinstance(json.loads(done.out)["model"]["scales"], str), done.err
    refused(tezo("eval", home / "opt", "--lm-eval", "passes", "--task", "sst2"), "--lm-eval", "--task")


@pytest.mark.parametrize("names", [{"data__template": "{words} Label:"}, {"data__text": "words"}])
def test_settings_reach_eval_and_predict(home, tmp_path, names):
    assert train(home / "opt", home / "rows.jsonl", tmp_path / "run", "--test", home / "test.jsonl").code == 0
    fields = write_rows(tmp_path / "other.jsonl", [{"words": r["text"], "mood": r["label"]} for r in label_rows(6, 1)])
    own = tezo("eval", tmp_path / "run", "--json")
    named = settings(data__label="mood", **names)
    other = tezo("eval", tmp_path / "run", "--data", fields, "--json", *named)
    assert other.code == 0, other.err
    assert json.loads(other.out) == json.loads(own.out)


def test_settings_reach_a_base_model_as_they_reach_a_run(home):
    words = ("--set", "data.label_words.good=fresh", "--set", "data.label_words.bad=stale")
    whole = settings(data__label_words="{good: fresh, bad: stale}")
    one, other, plain = (
        tezo("eval", home / "opt", "--data", home / "test.jsonl", "--json", *flags) for flags in (words, whole, [])
    )
    assert one.code == other.code == 0, one.err + other.err
    assert json.loads(one.out) == json.loads(other.out) != json.loads(plain.out)
    refused(tezo("eval", home / "opt", "--data", home / "test.jsonl", "--set", "dat.text=x"), "dat", "'data'")


@pytest.mark.parametrize("label", [None, "", "no such label"])
def test_predict_does_not_look_at_the_answers_that_rows_may_have(home, tmp_path, label):
    assert train(home / "opt", home / "rows.jsonl", tmp_path / "run", "--test", home / "test.jsonl").code == 0
    rows = [row | {"label": label} for row in label_rows(4, seed=1)]
    source = write_rows(tmp_path / "new.jsonl", rows)
    done = tezo("predict", tmp_path / "run", "--input", source, "--output", tmp_path / "answers.jsonl")
    assert done.code == 0, done.err
    assert {row["prediction"] for row in read_jsonl(tmp_path / "answers.jsonl")} <= {"good", "bad"}


def test_the_bar_is_taken_down_when_a_run_fails(home, tmp_path):
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "run", method__lr=1e30, train__guard=False)
    assert done.code == 2
    drawing = [thread for thread in threading.enumerate() if type(thread).__module__.startswith("rich.")]
    for thread in drawing:
        thread.join(30)  # rich tells it to end, and does not wait
    assert not any(thread.is_alive() for thread in drawing), "the thread that draws the bar runs on"


@pytest.mark.parametrize("family", ["opt", "bert"])
def test_label_words_that_are_alike_to_the_model_are_said(home, tmp_path, family):
    alike = "'xyzzy' and 'plugh' are the same tokens"
    words = {"data__label_words": "{good: xyzzy, bad: plugh}"}
    done = train(model_folder(home, family), home / "rows.jsonl", tmp_path / "run", **words)
    assert done.code == 0 and done.says(alike, "data.label_words"), done.err
    assert tezo("eval", tmp_path / "run", "--data", home / "rows.jsonl").says(alike)
    told_apart = train(model_folder(home, family), home / "rows.jsonl", tmp_path / "other")
    assert told_apart.code == 0 and not told_apart.says("the same tokens")


@pytest.mark.parametrize(
    ("first", "second", "spoken"),
    [
        ("good", "Good", "note: 'Good' and 'good' differ only in case"),
        ("caf\u00e9", "cafe\u0301", None),
        ("good", "go\u200bod", None),
        ("good", "goods", ""),
    ],
)
def test_labels_that_look_alike_are_said_or_refused(home, tmp_path, first, second, spoken):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a film", "label": (first, second)[i % 2]} for i in range(8)])
    model = saved(tiny_model("opt", len(bpe_tokenizer())), bpe_tokenizer(), tmp_path / "model")
    if spoken is None:
        refused(train(model, rows, tmp_path / "run"), "line 2", "not seen", "data.label_words")
        words = {"data__label_words": json.dumps({first: "good", second: "bad"})}
        assert train(model, rows, tmp_path / "run", **words).code == 0
    else:
        done = train(model, rows, tmp_path / "run", steps=1)
        assert done.code == 0 and done.says(spoken) and done.says("differ only in case") == bool(spoken), done.err


@pytest.mark.parametrize("family", ["opt", "bert"])
def test_a_row_that_would_take_all_memory_is_refused_by_its_place(home, tmp_path, family):
    long = {"text": "good " * (MOST_TEXT // 5 + 2), "label": "good"}
    rows = write_rows(tmp_path / "rows.jsonl", [*label_rows(2), long])
    model = model_folder(home, family)
    refused(train(model, rows, tmp_path / "run"), "line 3", "characters", "remove it")
    refused(tezo("eval", model, "--data", rows), "line 3", "characters", "remove it")


def test_ctrl_c_before_the_first_step_is_said_and_leaves_nothing(home, tmp_path, monkeypatch):
    def pressed(*_, **__):
        raise KeyboardInterrupt

    # by hand: workers of pytest-xdist ignore the signal
    monkeypatch.setattr("tezo.engines.load", pressed)
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "run")
    assert done.code == 130 and done.says("interrupted", "--resume")
    assert not (tmp_path / "run").exists()
