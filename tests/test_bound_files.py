"""A byte changed in any file of a run is found by every command that reads it, or changes no figure."""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from folders import Result, model_and_rows, refused, tezo
from kills import contents
from short_runs import STEPS, config, result, same, stopped

from tezo.runs.files import MANIFEST, check_manifest
from tezo.runs.folder import FILES, LOG, METRICS
from tezo.system.errors import RequestError
from tezo.training.api import open_run
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.resume import replay
from tezo.training.settings import Config, parse_config, to_tree

KINDS = {"activation": "head-feedback", "whole model": "mezo"}


def run_of(home: Path, kind: str = "activation", refresh: int | None = None, **settings: Any) -> Config:
    """A run with factors computed from data and feedback steps, or one that saves a whole model."""
    if kind != "activation":
        return config(home, KINDS[kind], **settings)
    tree = to_tree(config(home, KINDS[kind], feedback_first=2, **settings))
    return parse_config(tree | {"method": tree["method"] | {"basis": "activation", "lazy_update_interval": refresh}})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = model_and_rows(tmp_path_factory.mktemp("home"), 10)
    for kind in KINDS:
        train(run_of(root, kind), root / kind)
    return root


def positions(path: Path, count: int) -> list[int]:
    """`count` bytes of a file at equal distances."""
    size = path.stat().st_size
    return sorted({int((i + 0.5) * size / count) for i in range(count)}) if size else []


def flip(path: Path, place: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


def commands(home: Path, run: Path, output: Path) -> dict[str, list[object]]:
    """Every command that reads a run that has ended."""
    rows = home / "test.jsonl"
    return {
        "eval": ["eval", run, "--data", rows],
        "predict": ["predict", run, "--input", rows, "--output", output / "answers.jsonl"],
        "export": ["export", run, "--format", "merged", "--output", output],
        "replay": ["replay", run, "--output", output],
        "report": ["report", run, "--output", output.with_suffix(".html")],
        "resume": ["train", "--output", run, "--resume"],
    }


def figures(done: Result, output: Path) -> object:
    """What a command said and wrote, but for times and its own paths."""
    written = {path.relative_to(output).as_posix(): path.read_bytes() for path in output.rglob("*") if path.is_file()}
    page = output.with_suffix(".html")
    shutil.rmtree(output, ignore_errors=True)
    text = page.read_text() if page.exists() else ""
    page.unlink(missing_ok=True)
    return re.sub(r'"seconds[a-z_]*": [0-9.e-]+', "", done.out), written, text


def check(home: Path, tmp_path: Path, kind: str, per_file: int, *only: str) -> None:
    whole, run, output = home / kind, tmp_path / "run", tmp_path / "out"
    shutil.copytree(whole, run)
    expected = {}
    tried = {name: line for name, line in commands(home, run, output).items() if name in only or not only}
    for name, line in tried.items():
        done = tezo(*line)
        assert done.code == 0, done.err
        expected[name] = figures(done, output)
    found = dict.fromkeys(expected, 0)
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        for place in positions(path, per_file):
            for name, line in tried.items():
                flip(path, place)
                done = tezo(*line)
                if done.code == 0:
                    assert figures(done, output) == expected[name], f"{name}, byte {place} of {path.name}"
                else:
                    refused(done)
                    assert not output.exists() and not output.with_suffix(".html").exists()
                    found[name] += 1
                shutil.copy(whole / path.relative_to(run), path)
    assert min(found.values()) > 0


@pytest.mark.slow
def test_a_flipped_byte_is_found_or_changes_nothing(home, tmp_path):
    check(home, tmp_path, "activation", 1, "resume", "report")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bytes_all_over_are_found_by_each_command_or_change_nothing(home, tmp_path, kind):
    check(home, tmp_path, kind, 6)


@pytest.mark.parametrize("most", [60, pytest.param(10**9, marks=pytest.mark.slow)])
def test_flipped_bytes_of_every_file_are_found_by_the_manifest(home, tmp_path, most):
    run = Path(shutil.copytree(home / "activation", tmp_path / "run"))
    check_manifest(run, FILES)
    for path in sorted(path for path in run.rglob("*") if path.is_file() and path.name != MANIFEST):
        if path.suffix == ".safetensors" and path.parent == run:
            continue  # bound by the log, below
        whole, name = path.read_bytes(), path.relative_to(run).as_posix()
        for place in range(0, len(whole), max(1, len(whole) // most)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
            with pytest.raises(RequestError, match=re.escape(name)):
                check_manifest(run, [name])
        path.write_bytes(whole)


def test_an_added_a_removed_and_a_linked_file_are_found(home, tmp_path):
    run = Path(shutil.copytree(home / "activation", tmp_path / "run"))
    added = run / "adapter" / "adapter_model.bin"
    added.write_bytes(b"x")
    evaluate = ("eval", run, "--data", home / "test.jsonl")
    refused(tezo(*evaluate), "adapter/adapter_model.bin is not a file of the run")
    added.unlink()
    config_file = run / "adapter" / "adapter_config.json"
    config_file.rename(run / "elsewhere.json")
    refused(tezo(*evaluate), "adapter/adapter_config.json is missing")
    config_file.symlink_to(run / "elsewhere.json")
    refused(tezo(*evaluate), "adapter_config.json is a link")


def test_a_changed_dev_loss_in_metrics_does_not_choose_the_step(home, tmp_path):
    made = config(home, "tezo-cadam")
    train(made, tmp_path / "whole")
    stopped(made, tmp_path / "run", 6)
    path = tmp_path / "run" / METRICS
    lines = path.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"split": "dev"' in line and '"step": 4' in line)
    changed = json.loads(lines[place]) | {"loss": 1e-3}
    path.write_text("\n".join([*lines[:place], json.dumps(changed), *lines[place + 1 :], ""]))
    with pytest.raises(RequestError, match=rf"damaged at line {place + 1}, or differs there from the step log"):
        train(made, tmp_path / "run", resume=True)
    path.unlink()
    train(made, tmp_path / "run", resume=True)
    assert same(result(tmp_path / "run"), result(tmp_path / "whole"))
    left, right = (contents(tmp_path / name) for name in ("run", "whole"))
    assert left["summary.json"] == right["summary.json"] and left[LOG] == right[LOG]


def test_metrics_ahead_of_a_log_that_lost_its_end_are_cut_and_written_again(home, tmp_path):
    made = config(home, "tezo-cadam", checkpoint_every=0)
    train(made, tmp_path / "whole")
    stopped(made, tmp_path / "run", 6)
    log = tmp_path / "run" / LOG
    log.write_bytes(log.read_bytes()[:-300])
    assert tezo("report", tmp_path / "run", "--output", tmp_path / "report.html").code == 0
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["basis-0.safetensors", "feedback-1.safetensors"])
@pytest.mark.parametrize("how", ["seed", "step", "missing", "damaged"])
def test_a_factor_file_of_another_seed_or_step_is_not_taken(home, tmp_path, name, how):
    made = run_of(home, refresh=4)
    stopped(made, tmp_path / "run", 6)
    path = tmp_path / "run" / name
    if how == "seed":
        train(run_of(home, refresh=4, seed=5, steps=3), tmp_path / "other")
        shutil.copy(tmp_path / "other" / name, path)
    elif how == "step":
        shutil.copy(tmp_path / "run" / ("basis-4.safetensors" if "basis" in name else "feedback-0.safetensors"), path)
    elif how == "missing":
        path.unlink()
    else:
        flip(path, path.stat().st_size // 2)
    for again in (lambda: train(made, tmp_path / "run", resume=True), lambda: replay(tmp_path / "run", tmp_path / "o")):
        with pytest.raises(RequestError, match=rf"{name} is (missing|not the file that this run wrote)"):
            again()
    assert not (tmp_path / "o").exists() and STEPS > 6


def test_without_its_manifest_a_run_is_refused_and_made_again_from_its_log(home, tmp_path):
    run, rows = Path(shutil.copytree(home / "activation", tmp_path / "run")), home / "test.jsonl"
    (run / MANIFEST).unlink()
    flip(run / "adapter" / "adapter_model.safetensors", -20, 64)
    for line in (
        ("eval", run, "--data", rows),
        ("predict", run, "--input", rows, "--output", tmp_path / "answers.jsonl"),
        ("export", run, "--output", tmp_path / "out"),
        ("report", run, "--output", tmp_path / "page.html"),
        ("push", run, "me/it"),
    ):
        refused(tezo(*line), f"{run} has no manifest.json", "--resume")
    with pytest.raises(RequestError, match=r"no manifest\.json"):
        open_run(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert tezo("train", "--output", run, "--resume").code == 0
    assert contents(run) == contents(home / "activation")


def test_a_damaged_manifest_is_not_taken_for_damage_of_another_file(home, tmp_path):
    run = Path(shutil.copytree(home / "activation", tmp_path / "run"))
    whole = (run / MANIFEST).read_bytes()
    for place in positions(run / MANIFEST, 60):
        flip(run / MANIFEST, place)
        try:
            check_manifest(run, FILES)
        except RequestError as error:
            said = str(error).partition(";")[0]
            assert "manifest.json" in said and not [name for name in FILES if name in said], said
        (run / MANIFEST).write_bytes(whole)


def test_a_changed_basis_of_a_run_that_has_ended_is_found_by_resume(home, tmp_path):
    run = Path(shutil.copytree(home / "activation", tmp_path / "run"))
    for path in (next(run.glob("basis-*")), next(run.glob("feedback-*"))):
        flip(path, -3)
        refused(tezo("train", "--output", run, "--resume"), path.name, "not the file that this run wrote")
        flip(path, -3)
    assert tezo("train", "--output", run, "--resume").code == 0


@pytest.mark.parametrize("name", ["config.yaml", LOG])
@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_has_lost_a_file_is_told_which(home, tmp_path, name, ended):
    run = tmp_path / "run"
    if ended:
        shutil.copytree(home / "activation", run)
    else:
        stopped(run_of(home), run, 3)
    (run / name).unlink()
    refused(tezo("train", "--output", run, "--resume"), f"has lost its {name}", "put it back")
    if ended or name != LOG:
        refused(tezo("eval", run, "--data", home / "test.jsonl"), name)


def test_a_run_needs_no_room_in_the_temporary_folder_of_the_system(home, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    train(run_of(home), tmp_path / "run")
    assert contents(tmp_path / "run") == contents(home / "activation")
    assert tezo("export", tmp_path / "run", "--output", tmp_path / "out").code == 0
    assert not list((tmp_path / "run").rglob(".*")) and not list((tmp_path / "out").rglob(".*"))


class Asks(Listener):
    """Asks the run to stop after three steps, and dies where its result is written."""

    wants_stop = False

    def stepped(self, progress: Any) -> None:
        self.wants_stop = progress.record.step == 2

    def finished(self, *_: Any) -> None:
        raise KeyboardInterrupt


def test_a_run_that_was_asked_to_end_ends_there_again(home, tmp_path):
    made, run = config(home, "tezo-cadam"), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(made, run, [Asks()])
    whole = contents(run)
    (run / MANIFEST).unlink()
    assert train(made, run, resume=True)["steps"] == 3 < STEPS
    assert contents(run) == whole


def test_replay_says_what_it_leaves_out_of_a_torn_log(home, tmp_path):
    run = tmp_path / "run"
    stopped(config(home, "tezo-cadam"), run, 4)
    with (run / LOG).open("ab") as file:
        file.write(b"step torn")
    assert replay(run, tmp_path / "out")["notices"] == [f"9 bytes at the end of {LOG} are unfinished, and left out."]
