"""Code that comes with a model runs where the user says so, and never because a run folder says so."""

import json
import shutil
from pathlib import Path

import pytest
from folders import completion_rows, model_folder, refused, tezo, write_rows

import tezo as library
from tezo.system.errors import RequestError

CODE = """
from pathlib import Path
from transformers import OPTConfig, OPTForCausalLM

def ran():
    with Path({marker!r}).open("a") as file:
        file.write("ran\\n")

ran()

class Config(OPTConfig):
    model_type = "stranger"

    def __init__(self, **settings):
        ran()  # a process that has imported this file does not import it again
        super().__init__(**settings)

class Model(OPTForCausalLM):
    config_class = Config
"""
TRUST = ("--set", "model.trust_remote_code=true")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model that needs code of its own, a run of it that the user trusted, and what the code leaves when it runs."""
    home = tmp_path_factory.mktemp("stranger")
    folder = model_folder(home, "opt")
    (folder / "stranger.py").write_text(CODE.format(marker=str(home / "marker")))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "stranger", "architectures": ["Model"]}
    config["auto_map"] = {"AutoConfig": "stranger.Config", "AutoModelForCausalLM": "stranger.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    rows = write_rows(home / "rows.jsonl", completion_rows(8))
    for method, options in (("tezo", ["--set", "method.rank=2"]), ("mezo", [])):
        done = tezo(
            *("train", "--model", folder, "--data", rows, "--test", rows, "--method", method, "--steps", 2, *TRUST),
            *("--set", "model.kind=causal", "--output", home / method, *options),
        )
        assert done.code == 0, done.stderr
    assert (home / "marker").read_text()
    (home / "marker").unlink()
    return home


def commands(run: Path, home: Path, out: Path) -> dict[str, list]:
    log = out / "log"
    log.mkdir(parents=True)
    shutil.copy(run / "steps.log", log)
    return {
        "eval": ["eval", run, "--data", home / "rows.jsonl"],
        "predict": ["predict", run, "--input", home / "rows.jsonl", "--output", out / "answers.jsonl"],
        "export": ["export", run, "--format", "merged", "--output", out / "export"],
        "replay": ["replay", run, "--output", out / "replay"],
        "replay of the log alone": ["replay", log, "--output", out / "again"],
    }


@pytest.mark.parametrize("method", ["tezo", "mezo"])
def test_no_command_runs_the_code_because_a_run_folder_says_so(home, tmp_path, method):
    run = home / method
    assert "trust_remote_code: true" in (run / "config.yaml").read_text()
    for name, command in commands(run, home, tmp_path).items():
        refused(tezo(*command), "comes with Python code", "model.trust_remote_code=true", "--trust-remote-code")
        assert not (home / "marker").exists(), name
    with pytest.raises(RequestError, match="comes with Python code"):
        library.open_run(run).model  # noqa: B018
    assert not (home / "marker").exists()


def test_a_run_is_not_resumed_with_the_code_because_it_says_so(home, tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    for name in ("config.yaml", "steps.log"):
        shutil.copy(home / "tezo" / name, begun)
    refused(tezo("train", "--output", begun, "--resume"), "comes with Python code")
    assert not (home / "marker").exists()
    assert tezo("train", "--output", begun, "--resume", *TRUST).code == 0
    assert (home / "marker").exists()
    (home / "marker").unlink()


@pytest.mark.parametrize("method", ["tezo", "mezo"])
def test_every_command_runs_it_where_the_user_says_so(home, tmp_path, method):
    for name, command in commands(home / method, home, tmp_path).items():
        trust = TRUST if command[0] in ("eval", "predict") else ("--trust-remote-code",)
        done = tezo(*command, *trust)
        assert done.code == 0, (name, done.stderr)
        assert (home / "marker").exists()
        (home / "marker").unlink()
    assert library.open_run(home / method, trust_remote_code=True).evaluate(str(home / "rows.jsonl"))["loss"] > 0
    (home / "marker").unlink()
