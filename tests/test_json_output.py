"""What a program or a shell reads: `--json` prints one document and says the same as the text; completion is quick."""

import json
import os
import subprocess
import sys

import pytest
from folders import label_rows, model_folder, refused, tezo, train, write_rows
from tezo_studies.analysis import ANALYSES

import tezo as package


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("json")
    rows = write_rows(home / "rows.jsonl", label_rows(24))
    done = train(model_folder(home, "opt"), rows, home / "run", steps=2)
    assert done.code == 0, done.err
    return home


def test_export_and_predict(home, tmp_path):
    done = json.loads(tezo("export", home / "run", "--output", tmp_path / "out", "--json").out)
    assert done == {"format": "lora", "folder": str(tmp_path / "out"), "rank": 8}
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["r"] == done["rank"]
    file = tmp_path / "answers.jsonl"
    done = json.loads(tezo("predict", home / "run", "--input", home / "rows.jsonl", "--output", file, "--json").out)
    assert (done["rows"], done["file"]) == (24, str(file)) and len(file.read_text().splitlines()) == 24


def test_the_list_of_analyses():
    listed = json.loads(tezo("analyze", "--json").out)
    assert [entry["name"] for entry in listed] == list(ANALYSES)


def test_a_plan_of_runs(tmp_path):
    command = ("reproduce", "llama-7b", "--output", tmp_path / "out", "--only", "mezo,rte")
    plan = json.loads(tezo(*command, "--plan", "--json").out)
    said = tezo(*command, "--plan").out.splitlines()
    assert [run["folder"] for run in plan["runs"]] == said[: len(plan["runs"])]
    assert said[len(plan["runs"])] == f"{len(plan['runs'])} runs, {plan['steps']} steps"
    refused(tezo(*command, "--json"), "--plan")


def test_the_version_is_that_of_the_package():
    done = tezo("--version")
    assert done.code == 0 and done.out == f"tezo {package.__version__}\n"


COMPLETING = """
import sys
from tezo.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(("typed", "offered"), [("tezo ex", "export"), ("tezo train --dry", "--dry-run")])
def test_the_shell_completes_commands_and_options_without_torch(typed, offered):
    own = {"_TEZO_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    command = [sys.executable, "-c", COMPLETING]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [offered]), done.stderr
