"""A file of the base that is changed while a run goes on ends it in words, and with the file put back it goes on."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from changed_base import WAYS, Change, nans, touched, zeros
from folders import model_and_rows, refused, tezo, tokenizer_for
from forks import forked
from kills import contents
from short_runs import config

from tezo.models import stored
from tezo.models.loading import from_objects, load_model
from tezo.models.stored import files_of
from tezo.runs.folder import LOG, SUMMARY
from tezo.runs.step_log import read_log
from tezo.system.errors import ChangedBaseError, RequestError
from tezo.training import exporting, opening
from tezo.training.api import open_run
from tezo.training.loop import train

METHODS = ("tezo-cadam", "mezo", "gauss-newton", "head-feedback")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A base, rows, and runs on it that nobody disturbed."""
    home = model_and_rows(tmp_path_factory.mktemp("home"), 10)
    for name in METHODS:
        train(config(home, name), home / name)
    shutil.copytree(home / "opt", home / "sound")
    return home


@pytest.fixture
def home(kept):
    yield kept
    put_back(kept)


def put_back(home: Path) -> None:
    shutil.copyfile(home / "sound/model.safetensors", home / "opt/model.safetensors")


@pytest.mark.parametrize(("name", "step"), [(METHODS[0], 0), (METHODS[0], 5), *((name, 4) for name in METHODS[1:])])
def test_a_run_ends_before_a_changed_base_is_in_its_log_and_goes_on_with_the_first_one(home, tmp_path, name, step):
    run, weights = tmp_path / "run", home / "opt/model.safetensors"
    with pytest.raises(ChangedBaseError, match=rf"{weights} is not the file .* \(its content is another\)\. Put"):
        train(config(home, name), run, [Change(weights, step, zeros)])
    assert len(read_log(run / LOG).steps) == step and not (run / SUMMARY).exists()
    refused(tezo("train", "--output", run, "--resume"), "its weights are not those that the run began with")
    put_back(home)
    train(config(home, name), run, resume=True)
    assert contents(run) == contents(home / name)


@pytest.mark.parametrize("way", WAYS)
def test_every_change_is_named_and_one_of_the_times_alone_is_none(home, tmp_path, way):
    done = forked("changed_base", home, tmp_path / "run", way, 3)
    if way == "touched":
        assert done.returncode == 0 and contents(tmp_path / "run") == contents(home / METHODS[0]), done.stderr
        return
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ChangedBaseError: model.name: {home / 'opt/model.safetensors'} is not the file"), last
    said = {"shorter": "bytes, and had", "gone": "it is gone"}.get(way, "its content is another")
    assert said in last and len(read_log(tmp_path / "run" / LOG).steps) == 3


def test_a_change_before_the_first_step_leaves_no_run(home, tmp_path):
    class AtOnce(stored.BaseFiles):
        def digest(self):
            found = super().digest()
            zeros(home / "opt/model.safetensors")
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "BaseFiles", AtOnce)
        with pytest.raises(ChangedBaseError):
            train(config(home, "tezo").with_options(lr="auto"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_change_that_times_do_not_show_is_found_at_the_end(home, tmp_path, monkeypatch):
    real, weights = stored._state, home / "opt/model.safetensors"

    def coarse(path):  # of a file system whose clock ticks once a day
        found = real(path)
        return None if found is None else stored._State(found.size, (found.rest[-1],), is_recent=True)

    monkeypatch.setattr(stored, "_state", coarse)
    with pytest.raises(ChangedBaseError, match="its content is another"):
        train(config(home), tmp_path / "run", [Change(weights, 7, zeros)])
    log = read_log(tmp_path / "run" / LOG)
    assert len(log.steps) == 9 and log.end is None and not (tmp_path / "run" / SUMMARY).exists()


def test_a_base_in_memory_is_watched_by_its_name(home, tmp_path):
    base = home / "opt"
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(ChangedBaseError):
        train(
            config(home), tmp_path / "run", [Change(base / "model.safetensors", 4, nans)],
            loaded=from_objects(model, tokenizer_for("opt")),
        )  # fmt: skip
    for source in ("", "in memory", "no/such", str(home / "train.jsonl.gone")):
        assert files_of(source).paths == []


def test_no_figure_and_no_file_is_made_of_a_changed_base(home, tmp_path, monkeypatch):
    weights, run = home / "opt/model.safetensors", open_run(home / METHODS[0])
    touched(weights)
    run.evaluate()
    for module, name, call in (
        (opening, "measure", run.evaluate),
        (opening, "checked_scores", lambda: run.predict([{"text": "good film"}])),
        (exporting, "save_model", lambda: run.export(tmp_path / "out", "merged")),
    ):
        real = getattr(module, name)
        with monkeypatch.context() as patch, pytest.raises(ChangedBaseError):
            patch.setattr(module, name, lambda *given, real=real, **named: (zeros(weights), real(*given, **named))[1])
            call()
        put_back(home)
    assert not (tmp_path / "out").exists()


def test_a_file_that_changes_while_it_is_loaded_is_named(home):
    files = files_of(str(home / "opt"))
    zeros(home / "opt/model.safetensors")
    with pytest.raises(RequestError, match="was changed while the model was loaded"):
        files.digest()


def test_the_files_of_a_folder_are_those_that_are_read(home, tmp_path):
    model = load_model(str(home / "opt")).model
    tokenizer_for("opt").save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    whole = files_of(str(tmp_path))
    (tmp_path / "consolidated.safetensors").write_bytes(b"other")
    assert whole.paths == files_of(str(tmp_path)).paths and len(whole.paths) > 1
    assert torch.equal(load_model(str(tmp_path)).model.lm_head.weight, model.lm_head.weight)
