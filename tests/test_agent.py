"""examples/agent: an agent of two calls, whose code knows nothing of tezo, on a real server and a real small model."""

import ast
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import transformers
from cases import mostly_slow
from folders import CHAT_TEMPLATE, model_folder, read_jsonl, settings, tezo, write_rows

from tezo.newton.policy import ANSWERS

EXAMPLE = Path(__file__).parents[1] / "examples/agent"
STORIES = Path(__file__).parents[2] / "shared/models/stories260K"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None,
    reason="the server is not installed: pip install 'tezo[serve]'",
)


@pytest.fixture
def agent(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    spec = importlib.util.spec_from_file_location("agent", EXAMPLE / "agent.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "agent", module)
    spec.loader.exec_module(module)
    return module


def test_it_imports_the_standard_library_alone():
    tree = ast.parse((EXAMPLE / "agent.py").read_text())
    names = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_what_it_says_is_scored_by_its_calculation_and_its_last_number(agent, monkeypatch):
    cases = [
        (["30 + 12", "42 nuts."], 1.0),
        (["30 + 12", "Nuts."], 0.4),
        (["30 - 12", "18 nuts."], 0.1),
        (["Nuts.", ""], 0.0),
        (["42", ""], 0.0),  # it was the calculator's to say
    ]
    said: list[str] = []
    monkeypatch.setattr(agent, "chat", lambda *_: said.pop(0))
    for answers, right in cases:
        for function, value in ((agent.score, right), (agent.solved, float(right == 1.0))):
            said[:] = answers
            assert function({"question": "?", "answer": 42}) == pytest.approx(value)


def test_rows_are_what_their_script_writes_and_none_is_in_two_files(tmp_path):
    (tmp_path / "questions.py").write_text((EXAMPLE / "questions.py").read_text())
    spec = importlib.util.spec_from_file_location("questions", tmp_path / "questions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    seen: set[str] = set()
    for part in ("train", "dev", "test"):
        assert (tmp_path / f"{part}.jsonl").read_bytes() == (EXAMPLE / f"{part}.jsonl").read_bytes()
        questions = {row["question"] for row in read_jsonl(EXAMPLE / f"{part}.jsonl")}
        assert not questions & seen
        seen |= questions


@pytest.mark.parametrize("method", ["policy-gradient", "es"])
@pytest.mark.parametrize("name", mostly_slow(["stories260K", "fresh"], "fresh"))
def test_a_run_calls_the_agent_which_asks_a_real_model(tmp_path, name, method):
    if name == "fresh":
        model = model_folder(tmp_path, "llama", chat=True)
    elif STORIES.is_dir():
        model = tmp_path / name
        tokenizer = transformers.AutoTokenizer.from_pretrained(STORIES)
        tokenizer.chat_template = CHAT_TEMPLATE
        transformers.AutoModelForCausalLM.from_pretrained(STORIES).save_pretrained(model)
        tokenizer.save_pretrained(model)
    else:
        pytest.skip(f"{STORIES} is not there")
    rows = {part: write_rows(tmp_path / f"{part}.jsonl", read_jsonl(EXAMPLE / f"{part}.jsonl")[:4]) for part in PARTS}
    done = tezo(
        "train", "--model", model, "--data", rows["train"], "--test", rows["test"], "--reward",
        f"{EXAMPLE / 'agent.py'}:score", "--serve", "--steps", 2, "--output", tmp_path / "run",
        *settings(data__dev=rows["dev"], train__max_new_tokens=12, train__reward_workers=4),
        *(("--method", method, *settings(method__num_directions=2)) if method == "es" else ()),
    )  # fmt: skip
    assert done.code == 0, done.err
    lines = read_jsonl(tmp_path / "run/scored.jsonl")
    answers = 2 if method == "es" else ANSWERS
    assert len(lines) == 2 * answers * 4 and all(0 <= line["score"] <= 1 for line in lines)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert "missing_scores" not in summary["before"] | summary["after"]


PARTS = ("train", "dev", "test")
