"""Runs by rewards of several forms: messages, lists of functions, parts that are missing, errors of all kinds."""

import json

import pytest
from folders import completion_rows, model_folder, refused, write_rows
from folders import tezo as command

import tezo
from tezo.runs.files import resume_line_of
from tezo.system.errors import RequestError

PROMPTS = [row["prompt"] for row in completion_rows(8)]
FEW = {"method": "mezo", "steps": 2, "batch_size": 4, "lr": 1e-3, "max_new_tokens": 4, "progress": False}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("forms")
    model_folder(home, "opt", chat=True)
    write_rows(home / "rows.jsonl", [{"prompt": text} for text in PROMPTS])
    return home


@pytest.mark.parametrize("shape", ["prompt", "messages", "answered"])
def test_a_function_of_trls_form_gets_conversations_as_messages(home, shape):
    asked = [[{"role": "user", "content": text}] for text in PROMPTS]
    answer = [{"role": "assistant", "content": "good"}]
    rows = {
        "prompt": [{"prompt": own} for own in asked],
        "messages": [{"messages": own} for own in asked],
        "answered": [{"messages": [*own, *answer]} for own in asked],
    }[shape]
    seen = []

    def words(prompts, completions, **columns):
        assert set(columns) == set(rows[0])
        seen.extend(prompts)
        return [len(own[0]["content"].split()) + 0.0 for own in completions if own[0]["role"] == "assistant"]

    run = tezo.train(home / "opt-chat", rows, dev=rows, reward=words, **FEW)
    assert all(own in asked for own in seen)
    text = tezo.train(home / "opt-chat", rows, dev=rows, reward=count, **FEW)
    assert run.summary["after"] == text.summary["after"]
    run.close()
    text.close()


def count(prompt, completion, row):
    return len(completion.split())


def short(prompt, completion, row):
    return 1.0 / len(completion.split())


def half(completions):
    return [0.5 if i % 2 else None for i, _ in enumerate(completions)]


def test_the_scores_of_a_list_of_functions_are_added(home):
    rows = [{"prompt": text} for text in PROMPTS]
    run = tezo.train(home / "opt-chat", rows, dev=rows, reward=[short, half], log_every=1, **FEW)
    alone = run.evaluate(rows, reward=short)["reward"]
    with pytest.warns(
        UserWarning, match=r"parts of scores are missing, and left out of the sums: short \+ half gave no"
    ):
        assert run.evaluate(rows)["reward"] == pytest.approx(alone + 0.25)
    assert any("parts of scores are missing" in notice for notice in run.summary["notices"])
    assert {*next(line["parts"] for line in run.metrics if "parts" in line)} == {"short", "half"}
    run.close()


@pytest.mark.parametrize("given", [[], [short, "score.py:f"], {"short": short}, [3]])
def test_a_list_of_other_things_is_refused(given):
    with pytest.raises(RequestError, match="give a function, a list of functions, whose scores are added, or FILE"):
        tezo.train("nowhere", [{"prompt": "a"}], reward=given)


RAISES = """
class Panic(BaseException):
    pass

def panics(prompt, completion, row):
    raise Panic("lost")

def closes(prompt, completion, row):
    raise GeneratorExit

def ends(prompt, completion, row):
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [("panics", "raised Panic (lost)"), ("closes", "raised GeneratorExit"), ("ends", "raised SystemExit (3)")],
)
def test_whatever_a_scorer_raises_is_a_sentence(home, tmp_path, name, why):
    (tmp_path / "raises.py").write_text(RAISES)
    (tmp_path / "loads.py").write_text(RAISES + f"{name}('', '', {{}})\n")
    few = ("--model", home / "opt-chat", "--data", home / "rows.jsonl", "--set", "train.max_new_tokens=4")
    for file, told in (("raises", f"scores; for rows.jsonl, line 1 it {why}"), ("loads", why)):
        scorer = f"{tmp_path / file}.py:{name}"
        refused(command("train", *few, "--output", tmp_path / "run", "--reward", scorer), told)
        done = command("eval", home / "opt-chat", *few[2:], "--reward", scorer)
        assert done.code == 2 and "Traceback" not in done.err and why in done.err
    assert not (tmp_path / "run").exists()


def test_the_line_that_goes_on_with_a_run_has_its_reward(home, tmp_path):
    (tmp_path / "score.py").write_text("def f(prompt, completion, row):\n    return 1.0 / len(completion.split())\n")
    scorer = ("--reward", f"{tmp_path / 'score.py'}:f", "--steps", 2, "--set", "train.max_new_tokens=4")
    run = tmp_path / "a run"
    assert (
        command("train", "--model", home / "opt-chat", "--data", home / "rows.jsonl", "--output", run, *scorer).code
        == 0
    )
    line = f"tezo train --output '{run}' --resume --reward FILE.py:FUNCTION"
    assert resume_line_of(run) == line
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "\n")
    refused(command("export", run, "--output", tmp_path / "export"), line)
    (run / "manifest.json").unlink()
    with pytest.raises(RequestError) as caught:
        tezo.open_run(run)
    assert line in str(caught.value)
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
