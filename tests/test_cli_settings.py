"""Settings that fit no rule, no rows or no base are refused in a sentence, before anything is written."""

import json
import shutil
from pathlib import Path

import pytest
from folders import completion_rows, label_rows, message_rows, model_folder, refused, tezo, train, write_rows
from forks import TEZO, forked
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    write_rows(root / "rows.jsonl", label_rows(12))
    write_rows(root / "text.jsonl", completion_rows(8))
    assert train(root / "opt", root / "rows.jsonl", root / "run").code == 0
    return root


@pytest.mark.parametrize("method", ["adam", "mezo-norm", "lozo-m", "mezo-adam", "zo-adamu"])
def test_running_means_are_checked_for_every_method(home, tmp_path, method):
    beta = ("method.betas=[0.9, 1.0]", ["method.betas", "1.0"])
    single = ("method.beta=1.0", ["method.beta", "1.0"])
    fault, parts = {"mezo-norm": single, "lozo-m": single, "zo-adamu": ("method.eps=-1", ["method.eps", "-1"])}.get(
        method, beta
    )
    rank = 4 if method == "lozo-m" else None
    done = train(
        home / "opt", home / "rows.jsonl", tmp_path / "out", "--method", method, "--set", fault, method__rank=rank
    )
    refused(done, *parts)
    assert not (tmp_path / "out").exists()


def test_a_probe_takes_no_settings_of_other_rows(home):
    for more in (("--data", home / "nowhere.jsonl"), ("--shots", 2), ("--calibrate",)):
        refused(tezo("eval", home / "run", "--probe", *more), "--probe", "data.test")


@pytest.mark.parametrize(
    ("rows", "values", "parts"),
    [
        ("text.jsonl", {"data__template": "{prompt}!"}, ("data.template", "completion rows", "data.shape=label")),
        ("text.jsonl", {"data__label_words": "{good: great}"}, ("data.label_words", "completion rows")),
        ("rows.jsonl", {"data__per_class": 2, "data__num_train": 4}, ("data.per_class", "data.num_train")),
    ],
)
def test_a_setting_that_another_makes_void(home, tmp_path, rows, values, parts):
    refused(train(home / "opt", home / rows, tmp_path / "out", **values), *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.thinned
@pytest.mark.parametrize("dev", [None, "rows.jsonl"])
@pytest.mark.parametrize(("test", "count"), [(None, None), (None, 2), ("rows.jsonl", None)])
def test_eval_of_a_run_measures_the_rows_that_its_summary_tells_of(home, tmp_path, dev, test, count):
    values = {"train__keep_best": False, "train__seed": 3, "data__hold_out": 0.4}
    values |= {f"data__{part}": home / name for part, name in (("dev", dev), ("test", test)) if name is not None}
    values |= {"data__num_dev": count} if count is not None else {}
    assert train(home / "opt", home / "rows.jsonl", tmp_path / "run", **values).code == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    done = tezo("eval", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    measured = json.loads(done.out)
    assert measured.pop("rows") == (summary["rows"]["test"] or summary["rows"]["dev"]) and not measured.pop("notices")
    assert measured == pytest.approx(summary["after"], abs=1e-6)


def test_a_chat_template_that_refuses_a_conversation(home, tmp_path):
    folder = Path(shutil.copytree(home / "opt", tmp_path / "model"))
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    (folder / "chat_template.jinja").write_text(template)
    rows = [{"messages": [{"role": "system", "content": "be kind"}, {"role": "assistant", "content": "good"}]}] * 4
    data = write_rows(tmp_path / "system.jsonl", rows)
    refused(train(folder, data, tmp_path / "out"), "system.jsonl, line 1", "system", "no system role")
    assert not (tmp_path / "out").exists()


def test_a_base_that_was_changed_under_a_run(home, tmp_path):
    base = Path(shutil.copytree(home / "opt", tmp_path / "model"))
    assert train(base, home / "rows.jsonl", tmp_path / "run").code == 0
    weights = load_file(base / "model.safetensors")
    weights["model.decoder.layers.1.fc2.weight"] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    rows, out = home / "rows.jsonl", tmp_path / "out"
    for command in (("eval", "--data", rows), ("predict", "--input", rows, "--output", out),
                    ("export", "--format", "merged", "--output", out)):  # fmt: skip
        refused(tezo(command[0], tmp_path / "run", *command[1:]), "model.name", "weights are not those")
    moved = tezo("eval", tmp_path / "run", "--data", rows, "--set", f"model.name={home / 'opt'}")
    assert moved.code == 0, moved.err
    assert not out.exists()


def test_a_base_that_has_moved_since_the_run(home, tmp_path):
    base = Path(shutil.copytree(home / "opt", tmp_path / "model"))
    assert train(base, home / "rows.jsonl", tmp_path / "run").code == 0
    for command in ("export", "replay"):
        assert tezo(command, tmp_path / "run", "--output", tmp_path / f"{command}-before").code == 0
    base.rename(tmp_path / "elsewhere")
    for command, adapter in (("export", "."), ("replay", "adapter")):
        output = tmp_path / f"{command}-after"
        refused(tezo(command, tmp_path / "run", "--output", output), "model.name", str(base))
        done = tezo(command, tmp_path / "run", "--output", output, "--model", tmp_path / "elsewhere")
        assert done.code == 0, done.err
        name = "adapter_model.safetensors"
        after, before = (load_file(tmp_path / f"{command}-{when}" / adapter / name) for when in ("after", "before"))
        assert after.keys() == before.keys() and all((after[key] == before[key]).all() for key in before)
    assert str(tmp_path / "elsewhere") in (tmp_path / "export-after/adapter_config.json").read_text()


def test_a_loss_that_is_no_number_is_no_result(home, tmp_path):
    base = Path(shutil.copytree(home / "opt", tmp_path / "model"))
    weights = load_file(base / "model.safetensors")
    weights["model.decoder.layers.1.fc2.bias"] += float("nan")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    done = tezo("eval", base, "--data", home / "rows.jsonl", "--json")
    refused(done, "the model's loss of these rows is nan in float32")
    assert done.out == ""


@pytest.mark.parametrize("form", [pytest.param("lora", marks=pytest.mark.slow), "merged"])
def test_an_export_that_does_not_fit_leaves_nothing(home, tmp_path, form):
    command = ("export", home / "run", "--output", tmp_path / "out", "--format", form)
    done = forked(TEZO, *command, largest_file=4096)
    assert done.returncode == 1 and "cannot be written: it exceeds the limit of a file" in done.stderr
    assert form == "lora" or str(tmp_path / "out") in done.stderr  # what PEFT is asked about is a temporary folder
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_sentence(home, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    done = tezo("predict", home / "run", "--input", home / "rows.jsonl", "--output", file / "new" / "answers.jsonl")
    refused(done, "output", file)
    assert "Loading" not in done.err


def test_answers_that_do_not_fit_leave_nothing_and_a_field_of_that_name_is_not_written_over(home, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [row | {"more": "x" * 4096} for row in label_rows(4)])
    command = ("predict", home / "run", "--input", rows, "--output", tmp_path / "out")
    done = forked(TEZO, *command, largest_file=4096)
    assert done.returncode == 1 and "Traceback" not in done.stderr and str(tmp_path / "out") in done.stderr
    assert list(tmp_path.iterdir()) == [rows]
    rows = write_rows(tmp_path / "rows.jsonl", [row | {"prediction": "mine"} for row in label_rows(4)])
    refused(tezo("predict", home / "run", "--input", rows, "--output", tmp_path / "out"), "'prediction'", "line 1")
    assert list(tmp_path.iterdir()) == [rows]


def test_answers_in_a_format_that_is_not_written_and_a_folder_for_rows_are_refused(home, tmp_path):
    out = tmp_path / "answers.csv"
    refused(tezo("predict", home / "run", "--input", home / "rows.jsonl", "--output", out), "answers.csv", "JSONL")
    assert not out.exists()
    refused(train(home / "opt", tmp_path, tmp_path / "run"), "data.train", str(tmp_path), "is a folder", "give a file")


@pytest.mark.parametrize(
    ("label", "parts"), [("", ("empty",)), (" ", ("empty",)), ("go\u200bod", ("'go\\u200bod'", "'good'"))]
)
def test_labels_that_are_missing_or_mistyped_are_no_labels_of_their_own(home, tmp_path, label, parts):
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"{r['text']},{r['label']}\n" for r in label_rows(8)) + f"x,{label}\n")
    refused(train(home / "opt", rows, tmp_path / "out"), "rows.csv, line 10", *parts)
    words = "{good: good, bad: bad, '" + label + "': odd}"  # meant so
    assert train(home / "opt", rows, tmp_path / "out", data__label_words=words).code == 0


def test_conversations_are_not_shown_in_a_prompt(home, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", message_rows(8))
    model = model_folder(tmp_path, "opt", chat=True)
    refused(tezo("eval", model, "--data", rows, "--shots", "2"), "shots is 2", "conversations")


def test_shots_and_a_probe_of_a_base_model_need_training_rows(home):
    shots, rows = ("eval", home / "opt", "--data", home / "rows.jsonl", "--shots", 2), home / "rows.jsonl"
    refused(tezo(*shots), "data.train is not set", "--shots", "--set data.train=")
    assert tezo(*shots, "--set", f"data.train={rows}").code == 0
    probe = ("eval", home / "opt", "--probe", "--set", f"data.test={rows}")
    refused(tezo(*probe), "data.train is not set", "--probe", "--set data.train=")
    assert tezo(*probe, "--set", f"data.train={rows}").code == 0


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (("--method", "lozo", "--set", "method.name=tezo"), ("method.name is given twice, as lozo and as tezo",)),
        (("--method", "lozo", "--set", "method=tezo"), ("method.name is given twice",)),
        (("--seed", 1, "--set", "train.seed=2"), ("train.seed is given twice, as 1 and as 2", "leave one of them out")),
        (("--set", "train.log_every=3", "--set", "train.log_every=4"), ("train.log_every is given twice",)),
    ],
)
def test_a_setting_with_two_values_is_refused_and_one_that_is_given_twice_alike_is_not(home, tmp_path, more, parts):
    refused(train(home / "opt", home / "rows.jsonl", tmp_path / "out", *more), *parts)
    assert not (tmp_path / "out").exists()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: lozo\ntrain: {seed: 3, log_every: 2}\n")
    asked = ("--model", home / "opt", "--data", home / "rows.jsonl", "--seed", 1, "--set", "train.seed=1")
    assert tezo("train", recipe, *asked, "--set", "method.lr=0.01", "--dry-run").code == 0
