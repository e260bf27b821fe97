"""A run goes on to another number of steps: as one that had it from the start, where nothing depends on the number."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ONE_OF_EACH_KIND, mostly_slow
from folders import completion_rows, label_rows, model_and_rows, refused, settings, tezo, write_rows
from forks import forked
from kills import contents
from short_runs import config, result, same, stopped
from transformers import AutoModelForCausalLM, AutoTokenizer

from tezo import train as train_in_python
from tezo.methods import METHODS
from tezo.runs.files import MANIFEST
from tezo.runs.folder import ANSWERS, LOG, SUMMARY
from tezo.runs.reader import read_run
from tezo.runs.resuming import RUN, in_folder, resume_line
from tezo.runs.step_log import End, NewTotal, StepLog, read_log
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.settings import Config, dump_config, parse_config, to_tree
from tezo.training.stopping import STAGNATED

FEW, MORE = 4, 8


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return model_and_rows(tmp_path_factory.mktemp("home"), 10)


def plain(home: Path, name: str = "tezo-cadam", **more: Any) -> Config:
    """A run of whose steps nothing depends on their number."""
    return config(home, name, **{"schedule": "constant", "eval_every": 2, "checkpoint_every": 3} | more)


def evaluations(run: Path, split: str) -> dict[int, float]:
    return {step: metrics["loss"] for (of, step), metrics in read_log(run / LOG).evaluations.items() if of == split}


def check_as_whole(run: Path, whole: Path) -> None:
    """A run that went on has the result, the steps, the dev losses and the figures of one that did not have to."""
    assert same(result(run), result(whole))
    found, wanted = read_log(run / LOG), read_log(whole / LOG)
    assert found.steps == wanted.steps and found.end == wanted.end and found.rollbacks == wanted.rollbacks
    assert evaluations(run, "dev") == evaluations(whole, "dev")
    left, right = contents(run), contents(whole)
    own = {LOG, MANIFEST, "metrics.jsonl"}
    assert {name: left[name] for name in left.keys() - own} == {name: right[name] for name in right.keys() - own}


@pytest.mark.parametrize("name", mostly_slow([*METHODS, "adam"], *ONE_OF_EACH_KIND, "adam"))
def test_a_finished_run_with_more_steps_is_that_of_all_of_them_to_the_bit(home, tmp_path, name):
    run = tmp_path / "run"
    assert train(plain(home, name, steps=FEW), run)["steps"] == FEW
    done = train(plain(home, name, steps=MORE), run, resume=True)
    train(plain(home, name, steps=MORE), tmp_path / "whole")
    check_as_whole(run, tmp_path / "whole")
    assert read_log(run / LOG).totals == [NewTotal(FEW, FEW, MORE, ended=False)]
    assert f"train.steps was {FEW} until step {FEW}, and is {MORE} from there on." in done["notices"]
    assert train(plain(home, name, steps=MORE), run, resume=True) == done, "it has ended again"


class Dies(Listener):
    """Dies where the result is written."""

    def finished(self, *_: Any) -> None:
        raise KeyboardInterrupt


def test_it_goes_on_to_more_steps_wherever_it_was_killed(home, tmp_path):
    few, more, run = plain(home, steps=FEW), plain(home, steps=MORE), tmp_path / "run"
    train(more, tmp_path / "whole")
    train(few, run)
    for name in (MANIFEST, SUMMARY):  # as if killed before the log had the change
        (run / name).unlink()
    stopped(more, run, 5)
    assert not (run / ANSWERS).exists() and len(read_run(run).records) == 6
    stopped(more, run, 6)
    train(more, run, resume=True)
    check_as_whole(run, tmp_path / "whole")
    (run / MANIFEST).unlink()
    train(more, run, resume=True)
    check_as_whole(run, tmp_path / "whole")
    assert len(read_log(run / LOG).totals) == 1


def test_a_run_that_was_killed_may_be_given_more_steps_too_and_fewer_than_planned(home, tmp_path):
    for steps in (MORE, 6):
        run, whole = tmp_path / f"run-{steps}", tmp_path / f"whole-{steps}"
        stopped(plain(home, steps=7), run, 4)
        train(plain(home, steps=steps), run, resume=True)
        train(plain(home, steps=steps), whole)
        check_as_whole(run, whole)
    stopped(plain(home, steps=7), tmp_path / "run", 5)  # from a checkpoint after the last step that it is to have
    train(plain(home, steps=6), tmp_path / "run", resume=True)
    check_as_whole(tmp_path / "run", tmp_path / "whole-6")


def test_fewer_steps_than_it_has_taken_are_refused_and_nothing_is_changed(home, tmp_path):
    run = tmp_path / "run"
    train(plain(home, steps=FEW), run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused(tezo("train", "--output", run, "--resume", "--steps", 3), "train.steps is 3", f"has taken {FEW} steps")
    refused(tezo("train", "--output", run, "--resume", "--steps", 9, "--lr", 1), "method.lr is 1")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_command_line_goes_on_with_the_folder_and_a_number(home, tmp_path):
    run = tmp_path / "a run"
    train(plain(home, steps=FEW), run)
    done = tezo("train", "--output", run, "--resume", "--steps", MORE)
    assert done.code == 0 and f"train.steps was {FEW} until step {FEW}" in done.err, done.err
    train(plain(home, steps=MORE), tmp_path / "whole")
    check_as_whole(run, tmp_path / "whole")
    assert (
        json.loads((run / SUMMARY).read_text())["more_steps"] == f"tezo train --output RUN --resume --steps {2 * MORE}"
    )
    if "More steps" in done.out:
        assert f"`tezo train --output '{run}' --resume --steps {2 * MORE}`" in done.out
    assert tezo("train", "--output", run, "--resume").code == 0
    assert tezo("replay", run, "--output", tmp_path / "again").code == 0
    assert same(result(tmp_path / "again"), result(run))


def test_the_steps_of_a_run_are_those_of_its_log(home, tmp_path):
    run = tmp_path / "run"
    stopped(plain(home, steps=FEW), run, 1)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(f"steps: {FEW}", "steps: 8"))
    assert "4 two-point" in tezo("train", "--output", run, "--resume", "--dry-run").out
    assert tezo("train", "--output", run, "--resume").code == 0
    assert len(read_log(run / LOG).steps) == FEW


def test_epochs_may_change_too(home, tmp_path):
    run = tmp_path / "run"
    train(plain(home, steps=None, epochs=2), run)
    assert json.loads((run / SUMMARY).read_text())["steps"] == 5
    assert tezo("train", "--output", run, "--resume", *settings(train__epochs=3)).code == 0
    assert len(read_log(run / LOG).steps) == 8
    assert tezo("train", "--output", run, "--resume", "--steps", 9).code == 0
    train(plain(home, steps=9), tmp_path / "whole")
    assert read_log(run / LOG).steps == read_log(tmp_path / "whole" / LOG).steps


def test_what_depends_on_the_number_is_that_of_the_new_one_from_there_on(home, tmp_path):
    """Rates of a schedule, and the spacing of evaluations; what was measured stays, and is not measured again."""
    few, more = (
        plain(home, "head-feedback", steps=steps, schedule="linear", eval_every=None, guard=False) for steps in (20, 30)
    )
    train(few, tmp_path / "run")
    before = read_log(tmp_path / "run" / LOG)
    summary = train(more, tmp_path / "run", resume=True)
    after, lr = read_log(tmp_path / "run" / LOG), before.steps[0].lr
    assert after.steps[:20] == before.steps and summary["steps"] == 30
    rates = [lr * (1 - step / (20 if step < 20 else 30)) for step in range(30)]
    assert [record.lr for record in after.steps] == pytest.approx(rates)
    assert sorted(evaluations(tmp_path / "run", "dev")) == [*range(0, 21, 2), 21, 24, 27, 30]


class Planted(Listener):
    """Moves the parameters far away after one step."""

    def started(self, job: Any) -> None:
        self.job = job

    def stepped(self, progress: Any) -> None:
        if progress.record.step == 50:
            for moving in self.job.optimizer.parameters.values():
                moving.change.coefficient.add_(30.0)


def test_returns_of_the_first_part_stay_where_they_were(tmp_path):
    """Without dev rows the best state is that of a tenth of the steps, which are other steps from there on."""
    home = model_and_rows(tmp_path / "home", 12)
    write_rows(home / "train.jsonl", completion_rows(12))  # free text: its loss can rise without bound
    write_rows(home / "test.jsonl", completion_rows(12, seed=2))
    data = {"train": str(home / "train.jsonl"), "test": str(home / "test.jsonl"), "hold_out": 0}
    made = {
        steps: parse_config({"model": {"name": str(home / "opt")}, "data": data,
                             "method": {"name": "tezo-cadam", "lr": 1e-3, "rank": 4},
                             "train": {"steps": steps, "batch_size": 4, "guard": True}})
        for steps in (96, 130)
    }  # fmt: skip
    train(made[96], tmp_path / "run", [Planted()])
    first = read_log(tmp_path / "run" / LOG).rollbacks
    assert first
    train(made[130], tmp_path / "run", resume=True)
    found = read_log(tmp_path / "run" / LOG)
    assert {step: back for step, back in found.rollbacks.items() if step in first} == first
    (tmp_path / "run" / MANIFEST).unlink()
    whole = contents(tmp_path / "run")
    train(made[130], tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == whole | {MANIFEST: contents(tmp_path / "run")[MANIFEST]}


def test_a_run_that_ended_for_want_of_a_gain_has_its_patience_again(home, tmp_path):
    still = {
        steps: plain(home, "mezo", eval_every=1, steps=steps, guard=True).with_options(lr=0.0) for steps in (80, 90)
    }
    first = train(still[80], tmp_path / "run")
    assert (first["steps"], first["stopped"]) == (48, STAGNATED)
    then = train(still[90], tmp_path / "run", resume=True)
    assert (then["steps"], then["stopped"]) == (48 + 27, STAGNATED)
    assert read_log(tmp_path / "run" / LOG).totals == [NewTotal(48, 80, 90, ended=True)]


class Ends(Listener):
    """Asks a run to end after three steps."""

    wants_stop = False

    def stepped(self, progress: Any) -> None:
        self.wants_stop = progress.record.step == 2


def test_a_run_that_was_asked_to_end_goes_on_when_it_is_asked_to(home, tmp_path):
    train(plain(home, steps=6), tmp_path / "run", [Ends()])
    assert len(read_log(tmp_path / "run" / LOG).steps) == 3
    assert train(plain(home, steps=6), tmp_path / "run", resume=True)["steps"] == 3, "as many as before: it has ended"
    assert train(plain(home, steps=MORE), tmp_path / "run", resume=True)["steps"] == MORE
    train(plain(home, steps=MORE), tmp_path / "whole")
    assert read_log(tmp_path / "run" / LOG).steps == read_log(tmp_path / "whole" / LOG).steps


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_go_on_together(home, tmp_path):
    for steps in (FEW, MORE):
        made = plain(home, steps=steps).with_options(directions="shared")
        (tmp_path / f"{steps}.yaml").write_text(dump_config(made))
    for recipe, run, more in ((FEW, "run", ()), (MORE, "run", ("--resume",)), (MORE, "whole", ())):
        done = forked("ranked", tmp_path / f"{recipe}.yaml", tmp_path / run, *more, ranks=2)
        assert done.returncode == 0, done.stderr
    assert same(result(tmp_path / "run"), result(tmp_path / "whole"))
    assert read_log(tmp_path / "run" / LOG).totals == [NewTotal(FEW, FEW, MORE, ended=False)]


def test_in_python_a_model_in_memory_goes_on_too(home, tmp_path):
    def tuned(output: Path, steps: int | None, *, resume: bool = False, model: Any = None) -> Any:
        model = model or AutoModelForCausalLM.from_pretrained(home / "opt", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(home / "opt")
        rows = {"dev": label_rows(6, seed=1), "test": label_rows(6, seed=2)}
        return train_in_python(
            model, label_rows(12), tokenizer=tokenizer, method="tezo", output=output, steps=steps, resume=resume,
            batch_size=4, rank=4, lr=1e-2, eval_every=2, progress=False, **rows,
        )  # fmt: skip

    run = tuned(tmp_path / "run", FEW)
    assert run.summary["more_steps"] == f"tezo.train(..., output=RUN, resume=True, steps={2 * FEW})"
    model = run.model
    run.close()  # which takes the change off: the base is given again
    again = tuned(tmp_path / "run", MORE, resume=True, model=model)
    assert again.summary["steps"] == MORE
    tuned(tmp_path / "whole", MORE)
    check_as_whole(tmp_path / "run", tmp_path / "whole")
    assert tuned(tmp_path / "run", None, resume=True).summary == again.summary, "left open: as many as it has"


@pytest.mark.parametrize("entry", ["step", "end", "fewer"])
def test_only_another_number_of_steps_follows_the_end_in_a_log(tmp_path, entry):
    path = tmp_path / LOG
    log = StepLog(path, {"directions": 1, "kinds": ["two-point"]})
    log.append_end(End(0, 0))
    if entry == "step":
        log.append_evaluation("dev", 0, {"loss": 1.0})
    elif entry == "end":
        log.contents.end = None
        log.append_end(End(0, 0))
    else:
        log.append_total(NewTotal(0, 1, -1, ended=False))
    log.close()
    found = read_log(path)
    assert found.end == End(0, 0) and not found.totals and not found.evaluations and found.size > found.valid


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, ""),
        ({"train.reward": "/a/score.py:f"}, " --reward FILE.py:FUNCTION"),
        ({"model.engine": "http://host:8000"}, " --engine http://HOST:PORT"),
        ({"model.engine": "llama.cpp"}, ""),
        ({"model.trust_remote_code": True}, " --set model.trust_remote_code=true"),
    ],
)
def test_the_line_that_goes_on_has_the_flags_that_a_folder_is_not_believed_in(home, changes, flags):
    tree = to_tree(plain(home, steps=FEW))
    for key, value in changes.items():
        section, name = key.split(".")
        tree[section] = tree[section] | {name: value}
    assert resume_line(Path("a run"), tree) == f"tezo train --output 'a run' --resume{flags}"
    line = resume_line(RUN, tree, 9)
    assert line == f"tezo train --output RUN --resume --steps 9{flags}"
    assert (
        in_folder(f"More: `{line}`.", Path("a run")) == f"More: `{line.replace('RUN', chr(39) + 'a run' + chr(39))}`."
    )
