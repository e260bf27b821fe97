"""A disk that fails leaves what was saved whole and is named; a checkpoint that was changed is passed over."""

import errno
import json
import os
import re
import shutil
from typing import Any

import pytest
from cases import mostly_slow
from folders import model_and_rows, tokenizer_for
from forks import TEZO, forked
from kills import contents
from safetensors import SafetensorError
from short_runs import config, stopped

from tezo.models import lora as export
from tezo.runs import checkpoints as checkpoint
from tezo.runs import step_log as steplog
from tezo.runs.checkpoints import checkpoints, load_checkpoint, newest
from tezo.runs.folder import LOG
from tezo.runs.step_log import read_log
from tezo.system import files
from tezo.system.errors import RunError, TezoError
from tezo.system.files import UntrustedError, storing
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.resume import replay
from tezo.training.settings import dump_config

pytestmark = pytest.mark.disk


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return model_and_rows(tmp_path_factory.mktemp("home"), 10)


NATURAL = {"open": errno.EROFS, "write": errno.ENOSPC, "fsync": errno.EIO, "replace": errno.EIO, "save": errno.ENOSPC}


class Faulty:
    """`os`, whose operation number `at` of those that change the disk fails."""

    def __init__(self, at: int | None) -> None:
        self.at, self.failed = at, None
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return self.faulty(name, getattr(os, name)) if name in NATURAL else getattr(os, name)

    def faulty(self, name: str, call: Any) -> Any:
        def operation(*arguments: Any, **named: Any) -> Any:
            self.done.append(name)
            if len(self.done) == self.at:
                self.failed = name
                raise OSError(NATURAL[name], os.strerror(NATURAL[name]))
            return call(*arguments, **named)

        return operation


def faulty(patch: Any, at: int | None) -> Faulty:
    disk = Faulty(at)
    patch.setattr(files, "os", disk)
    patch.setattr(steplog, "os", disk)
    patch.setattr(steplog, "SYNC_EVERY", 2)
    patch.setattr(checkpoint, "save_file", disk.faulty("save", checkpoint.save_file))
    patch.setattr(export, "save_file", disk.faulty("save", export.save_file))
    return disk


def first_and_last(done: list[str]) -> list[int]:
    """The numbers, from 1 on, of the first and the last operation of each kind."""
    last = len(done) - 1
    return sorted({n for kind in set(done) for n in (done.index(kind) + 1, last - done[::-1].index(kind) + 1)})


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
def test_a_disk_that_fails_at_any_write_is_named_and_nothing_saved_is_lost(home, tmp_path, every):
    made = config(home, steps=4, checkpoint_every=2, eval_every=2)
    with pytest.MonkeyPatch.context() as patch:
        done = faulty(patch, None).done
        train(made, tmp_path / "whole")
    whole, failed = contents(tmp_path / "whole"), set()
    assert len(done) > 40
    for at in range(1, len(done) + 1) if every else first_and_last(done):
        run = tmp_path / f"run-{at}"
        with pytest.MonkeyPatch.context() as patch:
            disk = faulty(patch, at)
            with pytest.raises(TezoError) as caught:
                train(made, run)
            failed.add(disk.failed)
        message = str(caught.value)
        assert message.count(". ") <= 1 and ("cannot be written" in message or "Errno" not in message), message
        if (run / LOG).exists():
            read_log(run / LOG) if (run / LOG).stat().st_size > 2000 else None
        train(made, run, resume=True)
        assert contents(run) == whole, (at, disk.failed)
    assert failed == set(NATURAL)


@pytest.mark.parametrize("name", mostly_slow(["tezo-cadam", "mezo"], "mezo"))
def test_a_replay_beyond_the_limit_of_a_file_is_a_sentence_and_leaves_nothing(home, tmp_path, name):
    train(config(home, name), tmp_path / "run")
    whole = tmp_path / "whole"
    replay(tmp_path / "run", whole)
    sizes = sorted({path.stat().st_size for path in whole.rglob("*") if path.is_file()})
    for largest in (size - 1 for size in sizes if size > 500):
        done = forked(TEZO, "replay", tmp_path / "run", "--output", tmp_path / "out", largest_file=largest)
        assert done.returncode == 1, (largest, done.stderr)
        last = done.stderr.splitlines()[-1]
        assert last.startswith(
            f"error: {tmp_path / 'out'} cannot be written: it exceeds the limit of a file (ulimit -f)"
        ), last
        assert {path.name for path in tmp_path.iterdir()} == {"run", "whole"}


def test_an_error_of_the_system_that_a_library_words_is_named_by_its_number(tmp_path):
    tokenizer = tokenizer_for("opt").backend_tokenizer
    with (
        pytest.raises(RunError, match=r"out cannot be written: its folder is gone; restore it"),
        storing(tmp_path / "out"),
    ):
        tokenizer.save(str(tmp_path / "gone" / "tokenizer.json"))
    full = Exception("No space left on device (os error 28)")
    with pytest.raises(RunError, match="the disk is full"), storing(tmp_path / "out"):
        raise full
    with pytest.raises(RunError, match=os.strerror(errno.EIO)), storing(tmp_path / "out"):
        raise SafetensorError(f"Error while serializing: I/O error: it broke (os error {errno.EIO})")
    with pytest.raises(ZeroDivisionError), storing(tmp_path / "out"):
        1 / 0  # noqa: B018


def test_a_folder_that_vanishes_is_named(home, tmp_path):
    class Remover(Listener):
        def stepped(self, progress: Any) -> None:
            if progress.record.step == 2:
                shutil.rmtree(tmp_path / "run")

    with pytest.raises(RunError, match=r"run/\S+ cannot be written: its folder is gone"):
        train(config(home), tmp_path / "run", [Remover()])


def test_a_checkpoint_that_was_changed_anywhere_is_passed_over(home, tmp_path):
    run = tmp_path / "run"
    stopped(config(home, "mezo-m"), run, 7)
    older, newer = run / "checkpoint-3", run / "checkpoint-6"
    assert [path.name for path in checkpoints(run)] == ["checkpoint-6", "checkpoint-3"]
    for name in ("manifest.json", "state.json", "tensors.safetensors"):
        whole = (newer / name).read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 60)):
            (newer / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(UntrustedError):
                load_checkpoint(newer)
            (newer / name).write_bytes(whole[:place])
            with pytest.raises(UntrustedError):
                load_checkpoint(newer)
        found, skipped = newest(run, 8)
        assert found.step == 3 and len(skipped) == 1 and "checkpoint-6 was skipped" in skipped[0]
        (newer / name).write_bytes(whole)
    assert newest(run, 8)[0].step == 6 and newest(run, 5)[0].step == 3
    (newer / "state.json").write_text("{}")
    shutil.rmtree(older)
    train(config(home, "mezo-m"), run, resume=True)  # from the log alone
    train(config(home, "mezo-m"), tmp_path / "whole")
    assert contents(run) == contents(tmp_path / "whole")


def test_a_forged_checkpoint_reads_nothing_outside_its_folder(home, tmp_path):
    run = tmp_path / "run"
    stopped(config(home), run, 7)
    folder, outside = run / "checkpoint-6", tmp_path / "outside.safetensors"
    shutil.move(folder / "tensors.safetensors", outside)
    (folder / "tensors.safetensors").symlink_to(outside)
    with pytest.raises(UntrustedError, match="is a link"):
        load_checkpoint(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["../outside.safetensors"] = manifest.pop("tensors.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UntrustedError, match="names other files"):
        load_checkpoint(folder)
    (folder / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(UntrustedError):
        load_checkpoint(folder)


def test_a_checkpoint_that_is_a_link_to_another_folder_is_passed_over(home, tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    stopped(config(home), run, 7)
    shutil.move(run / "checkpoint-6", elsewhere)
    (run / "checkpoint-6").symlink_to(elsewhere)
    found, skipped = newest(run, 8)
    assert found.step == 3 and skipped == ["checkpoint-6 was skipped: it is a link to another folder."]


def test_a_file_system_that_takes_no_more_is_named_by_the_command_line(home, tmp_path):
    made, run = config(home, "mezo"), tmp_path / "run"
    train(made, tmp_path / "whole")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(made))
    # a limit of the operating system on the size of a file: the model's weights don't fit, its log does
    done = forked(TEZO, "train", recipe, "--output", run, "--json", largest_file=9000)
    assert done.returncode == 1, done.stderr
    assert re.search(r"error: \S+run/checkpoint-3 cannot be written: .*\. Files saved earlier are intact", done.stderr)
    assert "Traceback" not in done.stderr and not list(run.rglob("*.partial"))
    train(made, run, resume=True)
    assert contents(run) == contents(tmp_path / "whole")
