"""`tezo bench`: what it refuses, what it prints and writes; the scripts that draw on it."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from folders import model_folder, refused, tezo
from forks import Done, forked

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QUICK = ("--model", "tiny", "--rank", 4, "--rounds", 1, "--warmup", 1, "--device", "cpu")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--methods", "tezzo"), ("tezzo", "Did you mean 'tezo'")),
        (("--methods", ","), ("methods is empty", "tezo")),
        (("--methods", "published:tezo-cadam"), ("tezo-cadam", "no published form")),
        (("--model", "opt-125"), ("opt-125", "Did you mean 'opt-125m'")),
        (("--length", "long"), ("length is 'long'", "rte")),
        (("--length", "0"), ("length is '0'", "1")),
        (("--length", "4000"), ("length is 4000", "512 positions")),
        (("--batch", "0"), ("batch is 0", "at least 1")),
        (("--rank", "0"), ("rank is 0", "at least 1")),
        (("--rounds", "0"), ("rounds is 0", "at least 1")),
        (("--warmup", "-1"), ("warmup is -1", "at least 0")),
        (("--seconds", "0"), ("seconds is 0", "positive")),
        (("--dtype", "int8"), ("dtype is 'int8'", "bfloat16")),
        (("--device", "abacus"), ("abacus", "cpu")),
        (("--targets", "some"), ("targets is 'some'", "all-linear")),
        (("--json", "/nowhere/at/all.json"), ("json", "/nowhere/at/all.json")),
    ],
)
def test_a_wrong_request_is_refused_in_words(options, parts):
    refused(tezo("bench", "step", *QUICK, *options), *parts)


def test_a_model_that_does_not_continue_text_is_refused(tmp_path):
    folder = model_folder(tmp_path, "roberta")
    refused(tezo("bench", "step", *QUICK, "--model", folder, "--length", 8), folder, "masked", "causal")


def test_step_prints_a_table_and_writes_json(tmp_path):
    path = tmp_path / "step.json"
    done = tezo("bench", "step", *QUICK, "--methods", "tezo,mezo", "--json", path)
    assert done.code == 0, done.err
    head, *lines = [line.split() for line in done.out.splitlines()[1:]]
    labels = ["F2", "N2", "J2", "tezo", "published:tezo", "mezo", "published:mezo"]
    assert [line[0] for line in lines[: len(labels)]] == labels
    assert head == ["seconds", "min", "quartiles", "/F2", "/N2", "/J2", "/shared", "published/ours"]
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [row["label"] for row in written["rows"]] == labels
    assert {"settings", "versions", "hardware", "commit", "command", "model", "rounds", "tokens"} <= written.keys()


def test_a_dash_prints_json_and_nothing_else():
    done = tezo("bench", "step", *QUICK, "--methods", "tezo", "--no-published", "--json", "-")
    assert [row["label"] for row in json.loads(done.out)["rows"]] == ["F2", "N2", "J2", "tezo"]


def test_a_folder_is_measured_as_a_shape_is(tmp_path):
    folder = model_folder(tmp_path, "llama")
    done = tezo("bench", "step", *QUICK, "--model", folder, "--length", 8, "--methods", "tezo", "--json", "-")
    assert done.code == 0, done.err
    assert json.loads(done.out)["settings"]["model"] == str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forked", "as it is"])
def test_memory_is_measured_in_fresh_processes(tmp_path, monkeypatch, start):
    if start == "forked":  # each of its own imports for seconds

        def run(command: list[str], **_: object) -> Done:
            assert command[:2] == [sys.executable, "-m"]
            return forked(*command[2:])

        monkeypatch.setattr("tezo_studies.bench.peak_memory.subprocess", SimpleNamespace(run=run))
    path = tmp_path / "memory.json"
    options = ("--model", "tiny", "--rank", 4, "--rounds", 1, "--device", "cpu", "--methods", "lozo")
    done = tezo("bench", "memory", *options, "--no-published", "--json", path)
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()[2:5]] == ["F", "N", "lozo"]
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["kind"] == "memory" and written["model"]["bytes"] == 4 * written["model"]["parameters"]
    inference, _, lozo = written["rows"]
    assert lozo["held"] > inference["held"] == 0
    for row in written["rows"]:
        assert row["peak"]["median"] > 50 * 2**20 and len(row["rounds"]) == 1
        assert row["over_F"]["bytes"] == row["peak"]["median"] - inference["peak"]["median"]


@pytest.mark.parametrize("command", ["step", "memory"])
def test_help_comes_without_torch(command):
    code = (
        "import sys\nfrom tezo.cli.main import main\n"
        f"try: main(['bench', '{command}', '--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--methods" in done.stdout and "--json" in done.stdout


@pytest.mark.slow
def test_the_script_of_feedback_steps_memory_writes_a_row_with_every_kind(tmp_path):
    command = [sys.executable, BENCHMARKS / "feedback_memory.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "feedback_memory.json").read_text(encoding="utf-8"))["rows"]
    assert all(row[kind]["peak"] > row[kind]["model"] > 0 for kind in ("inference", "two-point", "feedback"))


@pytest.mark.slow
def test_the_script_of_example_directions_writes_both_files(tmp_path):
    # a process of its own, which finds benchmarks/cpu.py beside it
    command = [sys.executable, BENCHMARKS / "per_example.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "step_per_example.json").read_text(encoding="utf-8"))
    memories = json.loads((tmp_path / "memory_per_example.json").read_text(encoding="utf-8"))
    for result in (*steps, *memories):
        assert [row["label"] for row in result["rows"]][-2:] == ["head-feedback", "per-example:head-feedback"]
    assert all(row["to_shared"] > 0 for result in steps for row in result["rows"] if "per-" in row["label"])
