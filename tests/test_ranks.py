"""Several processes train as one: the same steps, few bytes, and an error in bounded time where one is lost."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import mostly_slow, tuples_mostly_slow
from folders import completion_rows, label_rows, model_folder, refused, tezo, write_rows
from forks import Done, forked
from short_runs import config_of_answers, result

from tezo.runs.folder import LOG
from tezo.runs.step_log import read_log
from tezo.training.loop import train
from tezo.training.settings import dump_config, parse_config

STEPS = 6


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    for number, name in enumerate(("train", "dev", "test")):
        write_rows(root / f"{name}.jsonl", label_rows(10, seed=number))
    return root


def recipe(home: Path, folder: Path, method: str = "tezo-m", directions: int = 1, **settings: Any) -> Path:
    made = parse_config(
        {
            "model": {"name": str(home / "opt"), "device": "cpu"},
            "data": {name: str(home / f"{name}.jsonl") for name in ("train", "dev", "test")},
            "method": {"name": method, "lr": 1e-3, "num_directions": directions}
            | ({"rank": 4} if method.startswith("tezo") else {}),
            "train": {"steps": STEPS, "batch_size": 5, "eval_every": 2, "log_every": 1, "checkpoint_every": 2,
                      "keep_best": False} | settings,
        }
    )  # fmt: skip
    path = folder / f"{method}.yaml"
    path.write_text(dump_config(made))
    return path


def ranks(count: int, recipe: Path, run: Path, *flags: Any) -> Done:
    """Trains as so many processes, one of them with a fault if the flags ask for one."""
    return forked("ranked", recipe, run, *flags, ranks=count)


def started(launcher: Sequence[str], recipe: Path, run: Path, *flags: Any) -> subprocess.CompletedProcess:
    """The same, of a program that starts ranks, as a user calls it."""
    command = [sys.executable, "-m", *launcher, str(Path(__file__).parent / "ranked.py"), str(recipe), str(run)]
    return subprocess.run([*command, *map(str, flags)], capture_output=True, text=True, timeout=240)


def torchrun(count: int, recipe: Path, run: Path, *flags: Any) -> subprocess.CompletedProcess:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return started(launcher, recipe, run, *flags)


def accelerate(count: int, recipe: Path, run: Path, *flags: Any) -> subprocess.CompletedProcess:
    plain = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(count), *plain]
    return started(launcher, recipe, run, *flags)


# Each of torchrun's processes imports for seconds.
by_torchrun_too = pytest.mark.parametrize("start", [ranks, pytest.param(torchrun, marks=pytest.mark.slow)])


def records(run: Path) -> list[Any]:
    return read_log(run / LOG).steps


def assert_same_trajectory(run: Path, alone: Path) -> None:
    for one, other in zip(records(run), records(alone), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        # a difference of losses, which are float32, over 2 rho = 2e-3
        assert one.projected_grads == pytest.approx(other.projected_grads, abs=2e-3)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("method", "count"),
    tuples_mostly_slow([("tezo-m", 2), ("lozo", 2), ("mezo-adam", 2), ("tezo-cadam", 4)], ("tezo-m", 2)),
)
def test_ranks_that_share_rows_take_the_steps_of_one_process(home, tmp_path, method, count):
    made = recipe(home, tmp_path, method)
    done = ranks(count, made, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    train(parse_config(yaml_of(made)), tmp_path / "alone")
    assert_same_trajectory(tmp_path / "run", tmp_path / "alone")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["ranks"] == count
    # a step: sums and count (or one point at a time), the largest batch, three flags, a digest of each rank
    rate, own = 8, 8  # once a run, and the loss that steps are compared with
    assert 0 < summary["bytes_sent"] - rate - own < STEPS * (200 + 16 * count)


def yaml_of(path: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(path.read_text())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("method", "share"),
    tuples_mostly_slow([("tezo-cadam", "rows"), ("tezo", "directions"), ("lozo", "rows")], ("tezo", "directions")),
)
def test_a_model_in_shards_takes_the_steps_of_a_whole_one(home, tmp_path, method, share):
    # within an interval of lozo: sharded weights cannot be written
    made = recipe(home, tmp_path, method, directions=2 if share == "directions" else 1, parallel=share)
    done = ranks(2, made, tmp_path / "run", "--set", "model.placement=shards")
    assert done.returncode == 0, done.stderr[-3000:]
    train(parse_config(yaml_of(made)), tmp_path / "alone")
    assert_same_trajectory(tmp_path / "run", tmp_path / "alone")
    assert (tmp_path / "run/adapter").is_dir()
    if method != "lozo":  # which merges into a whole model
        tuned, whole = result(tmp_path / "run"), result(tmp_path / "alone")
        assert all(tuned[name].allclose(whole[name], atol=1e-4) for name in whole)


@pytest.mark.timeout(600)
def test_a_model_in_shards_learns_free_text_as_a_whole_one(tmp_path):
    """Layers are computed outside of a pass, where nothing gathers their parts by itself."""
    model_folder(tmp_path, "llama")
    config = {
        "model": {"name": str(tmp_path / "llama"), "device": "cpu"},
        "data": {"train": str(write_rows(tmp_path / "texts.jsonl", completion_rows(60))), "num_dev": 8},
        "method": {"name": "gauss-newton"},
        "train": {"steps": 1, "parallel": "directions"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_config(parse_config(config)))
    done = ranks(2, path, tmp_path / "run", "--set", "model.placement=shards")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = train(parse_config(config), tmp_path / "alone")
    assert summary["after"]["loss"] < summary["before"]["loss"] - 0.1
    shared = json.loads((tmp_path / "run/summary.json").read_text())
    assert shared["after"]["loss"] == pytest.approx(summary["after"]["loss"], abs=1e-3)


@pytest.mark.timeout(600)
def test_ranks_choose_one_learning_rate(home, tmp_path):
    # Trials on one rank may be rounded otherwise than on another: the first rank's choice counts.
    made = recipe(home, tmp_path, steps=12)
    done = ranks(2, made, tmp_path / "run", "--set", "method.lr=auto", "--rate-of", 1, 5.0)
    assert done.returncode == 0, done.stderr[-3000:]
    shared = yaml_of(tmp_path / "run/config.yaml")["method"]["lr"]
    assert 0 < shared != 5.0, "and all ranks had the same parameters after every step"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", [torchrun, accelerate])
def test_the_usual_programs_start_ranks(home, tmp_path, start):
    made = recipe(home, tmp_path)
    done = start(2, made, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    train(parse_config(yaml_of(made)), tmp_path / "alone")
    assert_same_trajectory(tmp_path / "run", tmp_path / "alone")
    assert json.loads((tmp_path / "run/summary.json").read_text())["ranks"] == 2


@pytest.mark.timeout(600)
def test_a_model_in_shards_refuses_what_writes_weights(home, tmp_path):
    done = ranks(2, recipe(home, tmp_path, "mezo"), tmp_path / "run", "--set", "model.placement=shards")
    assert "DTensor" in done.stderr and "use head-feedback" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(600)
def test_ranks_that_share_directions_step_along_all_of_them(home, tmp_path):
    made = recipe(home, tmp_path, "tezo", directions=4, parallel="directions")
    done = ranks(2, made, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    train(parse_config(yaml_of(made)), tmp_path / "alone")
    assert_same_trajectory(tmp_path / "run", tmp_path / "alone")
    assert all(len(record.probes) == 4 for record in records(tmp_path / "run"))


@pytest.mark.slow
@by_torchrun_too
@pytest.mark.timeout(600)
def test_a_rank_that_dies_ends_the_run_which_goes_on_with_another_number(home, tmp_path, start):
    made, run = recipe(home, tmp_path), tmp_path / "run"
    begin = time.monotonic()
    done = start(2, made, run, "--die", 1, 3)
    assert done.returncode != 0 and time.monotonic() - begin < 120
    assert "rank 0 of 2 lost rank 1" in done.stderr and "go on with --resume" in done.stderr
    assert len(records(run)) == 3, "what was finished is logged"
    assert start(3, made, run, "--resume").returncode == 0
    train(parse_config(yaml_of(made)), tmp_path / "alone")
    assert_same_trajectory(run, tmp_path / "alone")
    tuned, whole = result(run), result(tmp_path / "alone")
    assert all(tuned[name].allclose(whole[name], atol=1e-4) for name in whole)


@by_torchrun_too
@pytest.mark.timeout(600)
def test_a_rank_that_drifts_is_named(home, tmp_path, start):
    done = start(2, recipe(home, tmp_path, "mezo"), tmp_path / "run", "--drift", 1, 3)
    assert done.returncode == 1
    assert "rank 1 has other parameters than rank 0 after step 4" in done.stderr


@by_torchrun_too
@pytest.mark.timeout(600)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(home, tmp_path, start):
    made, run = recipe(home, tmp_path), tmp_path / "run"
    done = start(2, made, run, "--term", 1, 2)
    assert done.returncode != 0
    assert "rank 0: stopped by a signal to another rank after step 3" in done.stderr
    assert len(records(run)) == 3 and (run / "checkpoint-3").is_dir()


@pytest.mark.timeout(600)
def test_what_cannot_be_shared_is_refused(home, tmp_path):
    done = ranks(2, recipe(home, tmp_path, "tezo", directions=3, parallel="directions"), tmp_path / "run")
    assert "method.num_directions is 3, which 2 ranks cannot share evenly" in done.stderr
    done = ranks(2, recipe(home, tmp_path, "mezo", objective="accuracy"), tmp_path / "run")
    assert "train.objective is accuracy, whose rows cannot be shared out" in done.stderr
    assert not (tmp_path / "run").exists()
    refused(tezo("train", recipe(home, tmp_path), "--output", tmp_path / "run", "--set", "train.parallel=both"),
            "train.parallel", "both")  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changed",
    mostly_slow(
        [("method.lr", 0.5), ("train.seed", 9), ("train.batch_size", 3), ("train.log_every", 7),
         ("method.name", "mezo"), ("train.steps", 2), ("train.parallel", "directions"), ("data.max_length", 7)],
        ("method.lr", 0.5), ("train.log_every", 7),
    ),
)  # fmt: skip
def test_a_rank_with_another_setting_is_refused_at_the_start(home, tmp_path, changed):
    key, value = changed
    done = ranks(2, recipe(home, tmp_path, "mezo-m"), tmp_path / "run", "--set-on", 1, f"{key}={value}")
    assert done.returncode == 2
    for rank in (0, 1):
        assert re.search(rf"rank {rank}: {key} is {value} on rank 1 and \S+ on rank 0; start all", done.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(600)
def test_a_rank_with_other_rows_is_refused_at_the_start(home, tmp_path):
    for name, seed in (("here", 0), ("there", 5)):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "rows.jsonl", label_rows(20, seed=seed))
    folders = ("--folder-of", 0, tmp_path / "here", "--folder-of", 1, tmp_path / "there")
    done = ranks(2, recipe(home, tmp_path), tmp_path / "run", "--set", "data.train=rows.jsonl", *folders)
    assert done.returncode == 2
    assert re.search(r"rank 0: \w+ is \w+ on rank 1 and \w+ on rank 0; start all ranks", done.stderr), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_whose_model_is_configured_otherwise_is_refused_at_the_start(home, tmp_path):
    for name in ("here", "there"):
        shutil.copytree(home / "opt", tmp_path / name / "opt")
    path = tmp_path / "there" / "opt" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"activation_function": "gelu"}))
    folders = ("--folder-of", 0, tmp_path / "here", "--folder-of", 1, tmp_path / "there")
    done = ranks(2, recipe(home, tmp_path), tmp_path / "run", "--set", "model.name=opt", *folders)
    said = 'rank 0: model.config.activation_function is "gelu" on rank 1 and "relu" on rank 0; start all ranks'
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(600)
def test_where_one_rank_is_refused_the_others_end_and_name_it(home, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copy(home / "train.jsonl", tmp_path / "rows.jsonl")
    folders = ("--folder-of", 0, tmp_path, "--folder-of", 1, tmp_path / "empty")
    done = ranks(2, recipe(home, tmp_path), tmp_path / "run", "--set", "data.train=rows.jsonl", *folders)
    assert "rank 0: rank 1 of 2 could not prepare the run; see its error" in done.stderr
    assert "rank 1: " in done.stderr and "rows.jsonl" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_never_comes_is_named_after_a_time(home, tmp_path):
    done = ranks(3, recipe(home, tmp_path), tmp_path / "run", "--late", 1, "--patience", 6)
    assert "rank 0: rank 1 of 3 did not start within 6 s" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(600)
def test_where_one_rank_cannot_tell_rows_apart_all_ranks_take_separate_passes(home, tmp_path):
    made = recipe(home, tmp_path)
    done = ranks(2, made, tmp_path / "run", "--flat", 1, 0)
    assert done.returncode == 0, done.stderr[-3000:]
    train(parse_config(yaml_of(made)), tmp_path / "alone")
    assert_same_trajectory(tmp_path / "run", tmp_path / "alone")


@pytest.mark.timeout(600)
def test_a_rank_that_drifted_is_named_at_the_end_too(home, tmp_path):
    made = recipe(home, tmp_path, "mezo")
    done = ranks(2, made, tmp_path / "run", "--drift", 1, 3, "--compare-every", 1000)
    assert done.returncode == 1
    assert "rank 1 has other parameters than rank 0 after step" in done.stderr
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.timeout(600)
def test_answers_are_learnt_from_in_one_process_alone(home, tmp_path):
    path = tmp_path / "answers.yaml"
    path.write_text(dump_config(config_of_answers(home, "policy-gradient")))
    done = ranks(2, path, tmp_path / "run")
    assert done.returncode != 0 and "policy-gradient" in done.stderr and "one process" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", ["rows", "directions"])
def test_a_probe_is_of_one_process(home, tmp_path, share):
    """It has one direction, so that neither rows nor directions can be shared out, and no setting is a way out."""
    config = yaml_of(recipe(home, tmp_path, "head-feedback", parallel=share)) | {"method": {"name": "probe"}}
    path = tmp_path / "probe.yaml"
    path.write_text(dump_config(parse_config(config)))
    done = ranks(2, path, tmp_path / "run")
    assert done.returncode != 0 and "method.name is probe, which runs in one process" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()
