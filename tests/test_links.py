"""A run folder may come from a stranger: no link in it is followed, in reading, writing or push."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders import model_and_rows, refused, tezo
from short_runs import config, stopped

from tezo.runs.files import MANIFEST, check_manifest, write_manifest
from tezo.runs.folder import FILES, LOG, METRICS
from tezo.system import files
from tezo.system.errors import RequestError
from tezo.system.files import UntrustedError, append, new_folder, read_bytes, write_file
from tezo.training.loop import train
from tezo.training.settings import parse_config, to_tree


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run with factors computed from data and feedback steps: "ended", and "begun" with checkpoints."""
    root = model_and_rows(tmp_path_factory.mktemp("home"), 8)
    tree = to_tree(config(root, "head-feedback", feedback_first=2))
    made = parse_config(tree | {"method": tree["method"] | {"basis": "activation"}})
    train(made, root / "ended")
    stopped(made, root / "begun", 6)
    return root


def names(run: Path) -> list[str]:
    """Every file and folder of a run, relative to it."""
    return sorted(path.relative_to(run).as_posix() for path in run.rglob("*"))


def temporary(name: str) -> Iterator[str]:
    """Where a file or folder is while it is written or replaced."""
    path = Path(name)
    for ending in ("partial", "old"):
        yield (path.parent / f".{path.name}.{ending}").as_posix()


def outside(root: Path) -> dict[str, bytes | None]:
    return {name: (root / name).read_bytes() if (root / name).is_file() else None for name in names(root)}


def plant(run: Path, name: str, elsewhere: Path, *, dangling: bool) -> None:
    """Puts a link in the place of a file or folder, which is intact at the end of the link, or missing."""
    place, target = run / name, elsewhere / Path(name).name
    elsewhere.mkdir(exist_ok=True)
    if place.exists() and not dangling:
        shutil.move(place, target)
    elif not dangling:
        target.write_text("not yours")
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(target)


def commands(home: Path, run: Path, output: Path) -> dict[str, tuple[object, ...]]:
    return {
        "resume": ("train", "--output", run, "--resume"),
        "replay": ("replay", run, "--output", output),
        "report": ("report", run, "--output", output.with_suffix(".html")),
        "eval": ("eval", run, "--data", home / "test.jsonl"),
        "export": ("export", run, "--output", output),
        "push": ("push", run, "me/it"),
    }


def test_links_at_all_temporary_names_at_once_lead_nowhere(home, tmp_path):
    run, elsewhere = Path(shutil.copytree(home / "begun", tmp_path / "run")), tmp_path / "elsewhere"
    written = {name for name in names(home / "ended") + names(run) if "/" not in name}
    places = {".writable"} | {place for name in written for place in temporary(name)}
    for number, place in enumerate(sorted(places)):
        plant(run, place, elsewhere, dangling=bool(number % 2))
    before = outside(elsewhere)
    done = tezo("train", "--output", run, "--resume")
    assert done.code == 0, done.err
    assert outside(elsewhere) == before
    check_manifest(run, FILES, required=True)


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("name", [LOG, METRICS, "config.yaml", "plan.json", "basis-0.safetensors"])
def test_a_run_that_goes_on_writes_and_reads_through_no_link(home, tmp_path, name, dangling):
    run, elsewhere = Path(shutil.copytree(home / "begun", tmp_path / "run")), tmp_path / "elsewhere"
    plant(run, name, elsewhere, dangling=dangling)
    before = outside(elsewhere)
    done = tezo("train", home / "begun" / "config.yaml", "--output", run, "--resume")
    assert outside(elsewhere) == before
    if name in ("config.yaml", "plan.json"):  # these are written anew
        assert done.code == 0 and not (run / name).is_symlink(), done.err
    else:
        refused(done, name)
        assert (run / name).is_symlink()


def test_a_checkpoint_that_is_a_link_is_passed_over(home, tmp_path):
    run, elsewhere = Path(shutil.copytree(home / "begun", tmp_path / "run")), tmp_path / "elsewhere"
    last = sorted(path.name for path in run.glob("checkpoint-*"))[-1]
    plant(run, last, elsewhere, dangling=False)
    before = outside(elsewhere)
    done = tezo("train", "--output", run, "--resume", "--json")
    assert done.code == 0 and f"{last} was skipped: it is a link" in done.out, done.err
    assert outside(elsewhere) == before


@pytest.mark.slow
def test_at_every_name_of_a_run_a_link_is_as_good_as_nothing_for_every_command(home, tmp_path):
    tried = 0
    for kind in ("ended", "begun"):
        for name in names(home / kind):
            for command in commands(home, tmp_path, tmp_path):
                if kind == "begun" and command not in ("resume", "replay", "report"):
                    continue
                codes, elsewhere = {}, tmp_path / "elsewhere"
                for way in ("missing", "link", "dangling"):
                    run, output = tmp_path / "run", tmp_path / "out"
                    for path in (run, output, elsewhere):
                        shutil.rmtree(path, ignore_errors=True)
                    shutil.copytree(home / kind, run)
                    plant(run, name, elsewhere, dangling=way == "dangling")
                    if way == "missing":
                        (run / name).unlink()
                    before = outside(elsewhere)
                    codes[way] = tezo(*commands(home, run, output)[command]).code
                    assert outside(elsewhere) == before, f"{command} {kind}/{name} {way}"
                    tried += 1
                assert codes["link"] != 0 or codes["missing"] == 0, f"{command} followed {kind}/{name}"
    assert tried > 200


def test_push_uploads_nothing_through_a_link_whatever_the_manifest_says(home, tmp_path):
    run = Path(shutil.copytree(home / "ended", tmp_path / "run"))
    (run / "adapter" / "more.txt").symlink_to("/etc/hostname")
    for way in ("not listed", "no manifest", "listed"):
        if way == "no manifest":
            (run / MANIFEST).unlink()
        if way == "listed":
            with pytest.raises(RequestError, match=r"more\.txt is a link"):
                write_manifest(run, FILES)
        done = tezo("push", run, "me/it")
        refused(done, "more.txt" if way == "not listed" else MANIFEST)


@pytest.mark.parametrize("system_refuses", [True, False])
def test_the_helpers_follow_no_link_and_write_no_file_that_has_a_second_name(tmp_path, monkeypatch, system_refuses):
    if not system_refuses:  # as on Windows
        monkeypatch.setattr(files, "_PLAIN", files._PLAIN & ~os.O_NOFOLLOW)
        monkeypatch.setattr(files, "_NO_FOLLOW", 0)
    yours = tmp_path / "yours"
    yours.write_bytes(b"yours")
    folder = tmp_path / "run"
    folder.mkdir()
    for number, target in enumerate((yours, tmp_path / "nothing")):
        link = folder / f"link-{number}"
        link.symlink_to(target)
        with pytest.raises(RequestError, match="is a link"):
            append(link, b"more")
        with pytest.raises(UntrustedError, match="is a link"):
            read_bytes(link, 100)
        write_file(link, b"ours")
        assert link.read_bytes() == b"ours" and not link.is_symlink()
    second = folder / "second"
    os.link(yours, second)
    with pytest.raises(RequestError, match="second name"):
        append(second, b"more")
    write_file(second, b"ours")
    (folder / "made").symlink_to(tmp_path, target_is_directory=True)
    with new_folder(folder / "made") as made:
        (made / "file").write_bytes(b"ours")
    os.mkfifo(folder / "pipe")
    with pytest.raises(UntrustedError, match="plain file"):
        read_bytes(folder / "pipe", 100)
    assert yours.read_bytes() == b"yours" and sorted(path.name for path in tmp_path.iterdir()) == ["run", "yours"]


def test_the_folder_that_the_user_names_may_be_reached_through_a_link(home, tmp_path):
    shutil.copytree(home / "ended", tmp_path / "real" / "run")
    (tmp_path / "way").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "latest").symlink_to(tmp_path / "real" / "run", target_is_directory=True)
    for run in (tmp_path / "way" / "run", tmp_path / "latest"):
        assert tezo("train", "--output", run, "--resume").code == 0
        assert tezo("eval", run, "--data", home / "test.jsonl").code == 0
