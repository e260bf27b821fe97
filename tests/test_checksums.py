"""A bit that flips in a file of an unfinished run changes no figure without a word."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import completion_rows, model_folder, refused, tezo, write_rows
from kills import contents
from short_runs import stopped

from tezo.runs.folder import CONFIG, LOG, METRICS, PLAN, SCORED
from tezo.runs.reader import read_run
from tezo.runs.step_log import read_log
from tezo.runs.text_logs import MetricsLog, ScoredLog, line_of, value_of
from tezo.system.errors import RequestError
from tezo.training.api import open_run
from tezo.training.loop import train
from tezo.training.settings import Config, parse_config

SCORER = "def length(prompt, completion, row):\n    return float(len(completion))\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run by a reward, which has all of these files, that was killed in its third step."""
    folder = tmp_path_factory.mktemp("home")
    model_folder(folder, "llama")
    for number, part in enumerate(("train", "dev")):
        write_rows(folder / f"{part}.jsonl", [{"prompt": row["prompt"]} for row in completion_rows(3, seed=number)])
    (folder / "score.py").write_text(SCORER)
    stopped(config(folder), folder / "run", 2)
    return folder


def config(home: Path) -> Config:
    return parse_config(
        {
            "model": {"name": str(home / "llama"), "device": "cpu"},
            "data": {"train": str(home / "train.jsonl"), "dev": str(home / "dev.jsonl")},
            "method": {"name": "es", "num_directions": 2, "rank": 2, "rho": 0.05, "lr": 2.0},
            "train": {"reward": f"{home / 'score.py'}:length", "steps": 4, "batch_size": 2, "max_new_tokens": 2,
                      "eval_every": 2, "checkpoint_every": 0, "log_every": 1},
        }
    )  # fmt: skip


STRIDES = [7, pytest.param(1, marks=pytest.mark.slow)]


def flipped(path: Path, stride: int) -> Iterator[int]:
    """Flips a bit of one byte in `stride` of a file, and of its last, one after another; and yields their places."""
    whole = path.read_bytes()
    for place in {*range(0, len(whole), stride), len(whole) - 1}:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        yield place
    path.write_bytes(whole)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", [PLAN, METRICS, SCORED, CONFIG])
def test_a_report_of_an_unfinished_run_has_its_figures_or_says_what_it_left_out(home, name, stride):
    run, found = home / "run", 0
    whole = read_run(run)
    assert not whole.notices and len(whole.times) == 3 and whole.scored and whole.plan
    for place in flipped(run / name, stride):
        try:
            read = read_run(run)
        except RequestError as error:
            assert name in str(error), place
            found += 1
            continue
        assert read == whole or any(name in notice for notice in read.notices), place
    assert found > 50


FIGURES: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    METRICS: lambda run: _state(MetricsLog(run / METRICS, read_log(run / LOG)), "seconds", "elapsed", "passes"),
    SCORED: lambda run: _state(ScoredLog(run / SCORED, read_log(run / LOG))),
}
"""What a run that goes on takes from a file."""


def _state(log: Any, *names: str) -> tuple[Any, ...]:
    return log.unfinished, log.size, *(getattr(log, name) for name in names)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", FIGURES)
def test_a_run_goes_on_with_the_figures_that_it_had_or_says_what_it_cut(home, name, stride):
    run = home / "run"
    whole = FIGURES[name](run)
    for place in flipped(run / name, stride):
        try:
            read = FIGURES[name](run)
        except RequestError as error:
            assert name in str(error), place
            continue
        assert read == whole or read[0], place  # else the run says how many bytes it cut


def test_seconds_that_were_changed_are_neither_reported_nor_taken_on(home, tmp_path):
    made, run = config(home), tmp_path / "run"
    stopped(made, run, 2)
    path = run / METRICS
    lines = path.read_bytes().splitlines()
    place = next(i for i, line in enumerate(lines) if b'"seconds"' in line)
    changed = json.loads(lines[place]) | {"seconds": 5000}
    path.write_text("\n".join([*map(bytes.decode, lines[:place]), json.dumps(changed), ""]))
    refused(tezo("report", run, "--output", tmp_path / "page.html"), f"{METRICS} is damaged at line {place + 1}")
    with pytest.raises(RequestError, match=f"damaged at line {place + 1}"):
        train(made, run, resume=True)
    path.unlink()
    summary = train(made, run, resume=True)
    assert summary["seconds_stepping"] < 5000
    train(made, tmp_path / "whole")
    left, right = (contents(tmp_path / name) for name in ("run", "whole"))
    assert (
        left.keys() == right.keys() and left["summary.json"] == right["summary.json"] and left[SCORED] == right[SCORED]
    )


@pytest.mark.parametrize("name", [METRICS, SCORED])
def test_a_line_without_its_end_is_cut_with_a_word(home, tmp_path, name):
    made, run = config(home), tmp_path / "run"
    stopped(made, run, 2)
    lost = len((run / name).read_bytes().splitlines()[-1])
    (run / name).write_bytes((run / name).read_bytes()[:-1])
    page = tmp_path / "page.html"
    assert tezo("report", run, "--output", page).code == 0
    assert f"{lost} bytes at the end of {name} are unfinished, and left out." in page.read_text()
    summary = train(made, run, resume=True)
    assert f"an unfinished line of {lost} bytes was cut from {name}." in summary["notices"]


@pytest.mark.parametrize(
    "value", [{"step": 1, "loss": 0.1, "text": '\ud800 ü " \\ \u2028', "of": [1, None, {"a": True}]}]
)
def test_a_line_comes_back_as_it_was_and_not_without_its_checksum(value):
    line = line_of(value)
    assert line.count(b"\n") == 1 and value_of(line, checked=True) == value
    bare = json.dumps(value).encode()
    assert value_of(bare, checked=False) == value, "of an earlier version"
    with pytest.raises(ValueError):
        value_of(bare, checked=True)
    for checked in (False, True):
        with pytest.raises(ValueError):
            value_of(line.replace(b"0.1", b"0.2"), checked=checked)


def test_the_metrics_of_a_finished_run_are_without_checksums(home, tmp_path):
    train(config(home), tmp_path / "run")
    assert all("crc" not in line for line in open_run(tmp_path / "run").metrics)
