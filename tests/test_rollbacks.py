"""Runs that return to their best state: when they do, and to the bit through replays, ends, kills and ranks."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import effective_weights, every_method_fast_for_kinds, mostly_slow, run
from folders import BAD, GOOD, completion_rows, model_and_rows, settings, tezo, write_rows
from forks import forked
from kills import contents
from short_runs import result, same, stopped
from tiny import lm_loss, tiny_opt, tokens

from tezo.optim.estimators.estimate import StepRecord
from tezo.runs.folder import ResumeState
from tezo.runs.step_log import NewTotal, Rollback, StepLog, read_log
from tezo.runs.words import BETTER, NO_BETTER
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.settings import Config, TrainConfig, dump_config, parse_config
from tezo.training.stopping import (
    CONTINUE,
    DEV_ROSE,
    FEEDBACK_ROSE,
    IDLE,
    LOWERED,
    MOST_ROLLBACKS,
    NOT_FINITE,
    PATIENT_STEPS,
    REASONS,
    STAGNATED,
    STEPS_ROSE,
    BestState,
    History,
    Stop,
    decide,
    decide_after_failure,
    in_words,
)
from tezo.training.summary import verdict

STEPS = 48
FIRST, THEN = 7, 13  # of a run that returns after THEN steps to where it was after FIRST


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = model_and_rows(tmp_path_factory.mktemp("home"), 12)
    for number, part in enumerate(("train", "dev", "test")):  # free text: its loss can rise without bound
        write_rows(root / f"{part}.jsonl", completion_rows(12, seed=number))
    return root


def config(home: Path, method: str = "tezo-cadam", lr: float = 0.03, **train_settings: Any) -> Config:
    """A run whose rate is so high that it returns to earlier states."""
    options = {"rank": 4} if method != "mezo" else {}
    options |= {"lazy_update_interval": 7, "scale": "unit"} if method == "lozo" else {}
    options |= {"directions": "per-example"} if method == "tezo-cadam" and "parallel" not in train_settings else {}
    return parse_config(
        {
            "model": {"name": str(home / "opt"), "device": "cpu"},
            "data": {name: str(home / f"{name}.jsonl") for name in ("train", "dev", "test")},
            "method": {"name": method, "lr": lr, **options},
            "train": {"steps": STEPS, "batch_size": 4, "eval_every": 4, "log_every": 4, "checkpoint_every": 5,
                      "feedback_first": 0, "feedback_last": 0, "guard": True} | train_settings,
        }
    )  # fmt: skip


RATES = {"tezo-cadam": 0.03, "lozo": 0.05, "mezo": 0.05, "adam": 0.03}
"""Method -> a rate at which its run of tiny models returns, with steps after it."""


# The optimizer


@every_method_fast_for_kinds
def test_a_return_is_the_earlier_state_with_the_directions_of_the_later_step(case):
    # Another optimizer has the earlier parameters, no moments, and the number of the later step: nothing else of the
    # steps between may be left.
    went, jumped = (case.build(tiny_opt(), targets=("all",)) for _ in range(2))
    run(went, 0, FIRST)
    tuned = went.tuned_state()
    run(went, FIRST, THEN)
    went.roll_back(tuned, FIRST)
    run(jumped, 0, FIRST)
    jumped.drop_moments()
    jumped.num_steps = THEN
    for name, weight in effective_weights(jumped).items():
        assert torch.equal(effective_weights(went)[name], weight), name
    assert run(went, THEN, THEN + 6) == run(jumped, THEN, THEN + 6)
    for name, weight in effective_weights(jumped).items():
        assert torch.equal(effective_weights(went)[name], weight), name


@every_method_fast_for_kinds
def test_the_state_after_a_return_is_saved_and_restored(case):
    went, again = (case.build(tiny_opt()) for _ in range(2))
    records: list[StepRecord] = []

    def steps(start: int, stop: int) -> None:
        for step in range(start, stop):
            went.step(lm_loss(went.model, tokens(seed=step)))
            records.append(went.last_step)

    steps(0, FIRST)
    tuned = went.tuned_state()
    steps(FIRST, THEN)
    went.roll_back(tuned, FIRST)
    steps(THEN, THEN + 3)
    saved = {name: tensor.detach().clone() for name, tensor in went.resumable_state().items()}
    again.load_resumable_state(saved, records, moments_since=THEN)
    assert run(went, THEN + 3, THEN + 8) == run(again, THEN + 3, THEN + 8)


# The decision


NOISE = [3 + 0.1 * math.sin(k * k) for k in range(400)]
BEST = (10, 2.9)


def history(losses: list[float], steps: int = 100, every: int = 10, *, dev_rows: int = 4, **settings: Any) -> History:
    """The events of a run whose steps had these losses, and whose lowest dev loss was that of `BEST`."""
    found = History(TrainConfig(steps=steps, batch_size=1, eval_every=every, guard=True, **settings), dev_rows)
    return added(found, losses)


def added(events: History, losses: list[float]) -> History:
    for loss in losses:
        events.add_step(StepRecord(events.steps, loss, 1e-3))
    return events


def decided(events: History, best: tuple[int, float] = BEST, dev_loss: float | None = None) -> str | None:
    """The reason for which a run goes back or ends; None: it goes on."""
    events.best, events.dev_loss = best, dev_loss
    events.rise = math.nan if dev_loss is None else dev_loss - best[1]
    decision = decide(events)
    assert decide(events) == decision, "a function of the events alone"
    return None if decision == CONTINUE else decision.reason


def test_each_reason_and_none():
    assert decided(history(NOISE[:40]), dev_loss=2.95) == STAGNATED
    assert decided(history(NOISE[:30]), dev_loss=2.95) is None, "not for long enough"
    assert decided(history(NOISE[:35])) is None, "between evaluations"
    assert decided(history(NOISE[:40] + [9.0] * 8)) == STEPS_ROSE
    assert decided(history(NOISE[:20]), dev_loss=4.0) == DEV_ROSE
    assert decided(history(NOISE[:20]), dev_loss=math.nan) == NOT_FINITE
    assert decided(history(NOISE[:40] + [9.0] * 8), (48, 2.8), 2.8) is None, "the best state"
    assert REASONS.keys() == {STAGNATED, STEPS_ROSE, DEV_ROSE, NOT_FINITE, FEEDBACK_ROSE}
    unguarded = history(NOISE[:20])
    unguarded.settings = replace(unguarded.settings, guard=False)
    assert decided(unguarded, dev_loss=4.0) is None


def test_feedback_steps_that_raised_the_dev_loss_are_undone_at_the_same_rate():
    fed, losses = partial(history, feedback_first=20), NOISE[:20]
    assert decided(fed(losses), dev_loss=2.91) == decided(fed(losses), dev_loss=4.0) == FEEDBACK_ROSE, "however little"
    assert decided(fed(losses), (20, 2.8), 2.8) is None, "they lowered it"
    assert decided(fed(losses), dev_loss=math.nan) == NOT_FINITE, "the rate is too high for any step"
    assert decided(fed(losses[:19]), dev_loss=2.91) is None
    assert decided(fed(NOISE[:21]), dev_loss=4.0) == DEV_ROSE
    events = fed(losses)
    events.best, events.dev_loss = BEST, 2.91
    assert decide(events) == Rollback(20, BEST[0], 1.0, FEEDBACK_ROSE)
    assert in_words(decide(events)).endswith("back to step 10, with the first learning rate")


def test_patience_is_of_steps_as_well_as_of_evaluations():
    often = partial(history, every=1)
    assert decided(often(NOISE[: BEST[0] + PATIENT_STEPS]), dev_loss=2.95) is None
    assert decided(often(NOISE[: BEST[0] + 30]), dev_loss=2.95) == STAGNATED, "0.3 of 100 steps"
    seldom = partial(history, every=25)
    assert decided(seldom(NOISE[:75]), dev_loss=2.95) == STAGNATED
    assert decided(seldom(NOISE[:50]), dev_loss=2.95) is None


def test_the_rate_falls_by_a_third_each_time_and_a_run_ends_where_that_did_not_help():
    events = history(NOISE[:10])
    for count in range(1, MOST_ROLLBACKS + 1):
        added(events, NOISE[:2])
        events.best, events.dev_loss = BEST, math.nan
        made = decide(events)
        assert made == Rollback(events.steps, BEST[0], pytest.approx(LOWERED**count), NOT_FINITE)
        events.add_rollback(made)
    assert events.lr_scale == pytest.approx(LOWERED**MOST_ROLLBACKS)
    assert decide(added(events, NOISE[:1])) == CONTINUE
    events.dev_loss = math.nan
    assert decide(events) == Stop(NOT_FINITE), "as many as there may be"


def test_a_run_ends_that_stagnates_again_at_a_lower_rate():
    once = history(NOISE[:40])
    once.best, once.dev_loss = BEST, 2.95
    once.add_rollback(decide(once))
    added(once, NOISE[40:70])
    once.dev_loss = 2.95
    assert decide(once) == Stop(STAGNATED), "a lower rate did not help"
    once.totals = [NewTotal(70, 70, 100, ended=True)]
    assert decide(once) == CONTINUE, "the user asked it to go on from there"
    once.totals, once.dev_loss = [], math.nan
    assert decide(once) == Rollback(70, BEST[0], pytest.approx(LOWERED**2), NOT_FINITE)
    added(once, NOISE[70:80])
    once.best, once.dev_loss = (50, 2.8), 2.95
    assert decide(once) == Rollback(80, 50, pytest.approx(LOWERED**2), STAGNATED), "it helped"


def test_a_failed_step_goes_back_once_and_ends_the_run_where_it_is_the_stopping_that_fails():
    events = history(NOISE[:20])
    events.best = BEST
    made = decide_after_failure(events)
    assert made == Rollback(20, BEST[0], LOWERED, NOT_FINITE)
    events.add_rollback(made)
    assert decide_after_failure(events) == Stop(NOT_FINITE)
    events = history(NOISE[: BEST[0]])
    events.best = BEST
    assert decide_after_failure(events) == Stop(NOT_FINITE)


def test_a_state_that_dev_rows_chose_is_not_compared_with_losses_of_rows_learnt_by_heart():
    by_heart = [loss - 2 for loss in NOISE[:32]]
    for dev_rows in (0, 4):
        events = history(by_heart, 200, dev_rows=dev_rows)
        events.add_rollback(Rollback(32, 0, LOWERED, STAGNATED))
        reasons = [decided(added(events, [loss])) for loss in NOISE[32:96]]
        assert set(reasons) == {None} if dev_rows else STEPS_ROSE in reasons
    assert decided(added(events, [9.0] * 16)) == STEPS_ROSE, "a rise since the return is seen"


def control(steps: int, dev_rows: int) -> BestState:
    """The decisions of a run whose states are not tensors."""
    settings = TrainConfig(steps=steps, batch_size=1, eval_every=10, guard=True)
    optimizer: Any = SimpleNamespace(roll_back=lambda *_: None, idle_steps=None)
    config = SimpleNamespace(train=settings)
    job: Any = SimpleNamespace(config=config, dev=[None] * dev_rows, optimizer=optimizer, held_out=None)
    folder: Any = SimpleNamespace(append_rollback=lambda _: None)
    nothing: Any = None
    made = BestState(job, folder, nothing, [], nothing)
    made.tensors = {}
    return made


@pytest.mark.parametrize("dev_rows", [0, 4])
def test_the_decisions_after_a_restart_are_those_without_one(dev_rows):
    losses = NOISE[:40] + [9.0] * 8 + NOISE[40:90] + [9.0] * 16
    records = [StepRecord(step, loss, 1e-3) for step, loss in enumerate(losses)]
    for cut in range(len(losses)):
        whole, restored = (control(200, dev_rows) for _ in range(2))
        for step, loss in enumerate(losses):
            if step == cut:
                made = {done.step: done for done in whole.history.rollbacks}
                restored.begin(ResumeState(steps=records[:cut], rollbacks=made))
                restored.load({}, whole.saved()[1], cut)
            running = [state.history for state in ((whole, restored) if step >= cut else (whole,))]
            found = {decided(added(events, [loss])) for events in running}
            assert len(found) == 1
            if (why := found.pop()) is not None:
                for events in running:
                    events.add_rollback(Rollback(step + 1, BEST[0], 0.5, why))
        assert restored.history.rollbacks == whole.history.rollbacks and len(whole.history.rollbacks) >= 2


# Runs


class Told(Listener):
    def __init__(self) -> None:
        self.rollbacks: list[Rollback] = []

    def rolled_back(self, rollback: Rollback) -> None:
        self.rollbacks.append(rollback)


@pytest.mark.parametrize("method", mostly_slow(RATES, "tezo-cadam", "lozo"))
def test_a_run_at_a_far_too_high_rate_returns_and_says_so(home, tmp_path, method):
    told = Told()
    made = config(home, method, RATES[method]) if method != "adam" else adam(home)
    summary = train(made, tmp_path / "run", [told])
    log = read_log(tmp_path / "run/steps.log")
    assert told.rollbacks == list(log.rollbacks.values()) and told.rollbacks
    assert [rollback["reason"] for rollback in summary["rollbacks"]] == [r.reason for r in told.rollbacks]
    dev = {step: metrics["loss"] for (split, step), metrics in log.evaluations.items() if split == "dev"}
    first = float(made.method.options["lr"])
    for step, record in enumerate(log.steps):
        scale = [r.lr_scale for r in told.rollbacks if r.step <= step]
        assert record.lr == pytest.approx(first * (scale[-1] if scale else 1))
    for rollback in told.rollbacks:
        earlier = {step: loss for step, loss in dev.items() if step <= rollback.step}
        assert rollback.to == min(earlier, key=earlier.get) and rollback.to != rollback.step
    assert summary["dev_loss"] <= summary["dev_loss_before"]


def adam(home: Path) -> Config:
    return parse_config(
        {
            "model": {"name": str(home / "opt"), "device": "cpu"},
            "data": {name: str(home / f"{name}.jsonl") for name in ("train", "dev", "test")},
            "method": {"name": "adam", "lr": RATES["adam"]},
            "train": {
                "steps": STEPS,
                "batch_size": 4,
                "eval_every": 4,
                "checkpoint_every": 5,
                "log_every": 4,
                "guard": True,
            },
        }
    )


def rolled_back(home: Path, folder: Path, method: str, **train_settings: Any) -> tuple[Config, list[int]]:
    """A run with returns, and the steps after which it returned."""
    made = config(home, method, RATES[method], **train_settings) if method != "adam" else adam(home)
    train(made, folder)
    steps = sorted(read_log(folder / "steps.log").rollbacks)
    assert steps and steps[0] < STEPS - 4, "the tests below would test nothing"
    return made, steps


@pytest.mark.parametrize("method", mostly_slow(RATES, "tezo-cadam", "lozo"))
def test_a_run_that_stops_around_a_return_goes_on_to_the_bit(home, tmp_path, method):
    made, steps = rolled_back(home, tmp_path / "whole", method)
    for step in sorted({step + offset for step in steps[:2] for offset in (-1, 0, 4)}):
        stopped(made, tmp_path / "run", step)
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.mark.parametrize("method", mostly_slow(["tezo-cadam", "lozo", "mezo"], "tezo-cadam"))
def test_it_goes_on_from_the_log_alone_and_is_replayed_from_it(home, tmp_path, method):
    made, steps = rolled_back(home, tmp_path / "whole", method, checkpoint_every=0)
    stopped(made, tmp_path / "run", steps[0] + 2)
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    done = tezo("replay", tmp_path / "whole", "--output", tmp_path / "again")
    assert done.code == 0, done.err
    assert same(result(tmp_path / "again"), result(tmp_path / "whole"))
    last = len(read_log(tmp_path / "whole/steps.log").steps)
    later = tezo("replay", tmp_path / "whole", "--step", last, "--output", tmp_path / "last")
    assert later.code == 0, later.err
    at_end = config(home, method, RATES[method], checkpoint_every=0, keep_best=False)
    train(at_end, tmp_path / "end")
    assert same(result(tmp_path / "last"), result(tmp_path / "end")), "the state after the returns"


def test_a_return_that_was_decided_and_not_yet_written_is_decided_again(home, tmp_path):
    # A process that dies after it has logged the step, and before it has logged what follows from it.
    made, steps = rolled_back(home, tmp_path / "whole", "tezo-cadam", checkpoint_every=0)
    log = tmp_path / "run/steps.log"
    stopped(made, tmp_path / "run", steps[0] + 1)
    whole = log.read_bytes()
    at = whole.rindex(b"back", 0, whole.rindex(b"step"))
    log.write_bytes(whole[:at])
    assert not read_log(log).rollbacks and len(read_log(log).steps) == steps[0]
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.fixture(scope="module")
def opposed(tmp_path_factory, home):
    """Train and dev rows of the same prompts, with completions of nothing in common: what helps one harms the other."""
    root = tmp_path_factory.mktemp("opposed")
    (root / "opt").symlink_to(home / "opt")
    for part, words in (("train", GOOD), ("dev", BAD), ("test", BAD)):
        rows = [row | {"completion": " ".join(["", *words[:3]])} for row in completion_rows(12)]
        write_rows(root / f"{part}.jsonl", rows)
    return root


def after_feedback(home: Path, **train_settings: Any) -> Config:
    """A run with three feedback steps at the start, after which no evaluation is due by `eval_every`."""
    made = config(home, "head-feedback", 3e-4, feedback_first=3, steps=8, **train_settings)
    return made.with_options(feedback_scale=300.0)


def test_a_run_whose_feedback_steps_raised_the_dev_loss_begins_again_without_them(opposed, tmp_path):
    made = after_feedback(opposed)
    train(made, tmp_path / "whole")
    log = read_log(tmp_path / "whole/steps.log")
    assert log.rollbacks == {3: Rollback(3, 0, 1.0, FEEDBACK_ROSE)}
    dev = {step: metrics["loss"] for (split, step), metrics in log.evaluations.items() if split == "dev"}
    assert sorted(dev) == [0, 3, 4, 8] and dev[3] > dev[0] + 0.05
    assert dev[4] == pytest.approx(dev[0], abs=0.02), "one step from the start"
    assert [step.lr for step in log.steps[3:]] == pytest.approx([3e-4] * 5)
    for step in (2, 3, 4):
        stopped(made, tmp_path / "run", step)
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.mark.parametrize(("rows", "settings"), [("home", {}), ("opposed", {"guard": False}),
                                                ("opposed", {"eval_every": 0})])  # fmt: skip
def test_feedback_steps_stay_that_lowered_it_or_are_not_judged(request, tmp_path, rows, settings):
    train(after_feedback(request.getfixturevalue(rows), **settings), tmp_path / "run")
    log = read_log(tmp_path / "run/steps.log")
    assert not any(rollback.reason == FEEDBACK_ROSE for rollback in log.rollbacks.values())
    assert (("dev", 3) in log.evaluations) is not bool(settings), "the state before is in memory where it is judged"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_leave_the_run_as_it_was(tmp_path):
    done = forked("kills", "--kills", 8, "--seed", 5, "--methods", "tezo-cadam", "--lr", RATES["tezo-cadam"])
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["kills"] >= 8 and found["rollbacks"] > 0


@pytest.mark.parametrize("share", ["rows", pytest.param("directions", marks=pytest.mark.slow)])
def test_ranks_return_together(home, tmp_path, share):
    directions = {"num_directions": 2, "directions": "shared"}
    made = config(home, "tezo-cadam", 0.1, parallel=share)
    made = made.with_options(**directions)
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_config(made))
    done = forked("ranked", path, tmp_path / "run", ranks=2)
    assert done.returncode == 0, done.stderr
    assert read_log(tmp_path / "run/steps.log").rollbacks, "and all ranks had the same parameters after every step"


def test_a_loss_that_is_not_finite_is_a_reason_to_return(home, tmp_path):
    class Once(Listener):
        """Makes the parameters of one step infinite, as an overflow does."""

        def started(self, job: Any) -> None:
            self.job = job

        def stepped(self, progress: Any) -> None:
            if progress.record.step == 18:
                moving = next(iter(self.job.optimizer.parameters.values()))
                moving.change.coefficient.fill_(math.inf)

    summary = train(config(home, lr=1e-3), tmp_path / "run", [Once()])
    assert [rollback["reason"] for rollback in summary["rollbacks"]] == [NOT_FINITE]
    assert summary["steps"] == STEPS and math.isfinite(summary["after"]["loss"])


def test_a_loss_that_is_never_finite_is_an_error_after_all(home, tmp_path):
    with pytest.raises(NonFiniteLossError, match=r"Lower method\.lr"):
        train(config(home, lr=1e30), tmp_path / "run")
    assert len(read_log(tmp_path / "run/steps.log").rollbacks) == MOST_ROLLBACKS


def _reward(before: float, after: float) -> dict[str, Any]:
    """What a summary has of the dev and the test rows of a run by a reward."""
    return {"dev_loss_before": -before, "dev_loss": -after, "before": {"loss": -before, "reward": before},
            "after": {"loss": -after, "reward": after}}  # fmt: skip


AS_NOISE = {"chance": {"rows": 9, "states": 4, "p": 0.31}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Better: the dev loss fell from 3.0000 to 2.0000. It was falling to the end"),
        ({}, "to the end. More steps: `tezo train --output RUN --resume --steps 80`."),
        ({"state_chosen": False}, "kept, not the best of several. More steps: `tezo train --output RUN --resume --ste"),
        ({"steps": 30, "kept_step": 30}, "It was ended after 30 of 40 steps."),
        ({"kept_step": 20}, "It was lowest after step 20: more rows"),
        ({"stopped": STAGNATED}, "It ended after 40 of 50 steps: the dev loss was no lower for long"),
        ({"stopped": IDLE}, "It ended after 40 of 50 steps: the last ones hardly lowered the loss"),
        ({"after": {"loss": 4.0}}, "No better: the dev loss fell from 3.0000 to 2.0000, but the test loss rose"),
        ({"dev_loss": 3.0}, "No better: the dev loss was 3.0000 and is 3.0000. Try another rate (it was 1.0e-03), s"),
        ({"dev_loss": 2.9984}, "Hardly better: the dev loss fell from 3.0000 to 2.9984, by less than 0.1 %. Try"),
        ({"dev_loss": 3.01}, "No better: the dev loss was 3.0000 and is 3.0100."),
        (AS_NOISE, "No better: the dev loss was 3.0000 and is 2.0000, within the noise of 9 rows (p = 0.31 in a"),
        (AS_NOISE, "paired test, above 0.02). Try another rate (it was 1.0e-03), such as --lr auto, or more steps"),
        (AS_NOISE | {"dev_loss": 2.9984}, "No better: the dev loss was 3.0000 and is 2.9984, within the noise of 9"),
        (AS_NOISE | {"dev_loss": 3.0}, "No better: the dev loss was 3.0000 and is 3.0000. Try another"),
        (AS_NOISE | {"stopped": IDLE}, "in a paired test, above 0.02). It ended after 40 of 50 steps: the last ones"),
        (AS_NOISE | _reward(0.1, 0.3), "No better: the dev reward was 0.1000 and is 0.3000, within the noise of 9"),
        ({"chance": None}, "Better: the dev loss fell from 3.0000 to 2.0000."),
        ({"dev_loss": None, "rows": {"train": 1000, "dev": 9, "test": 0}}, "Better: the dev loss fell from 3.5000"),
        ({"dev_loss": 3.0, "rows": {"train": 9}}, "or more steps than 40. 9 training rows may be too few, too."),
        ({"dev_loss": 3.0, "method": "gauss-newton"}, "is 3.0000. Give more rows than 1000, or try method.name=head-"),
        ({"dev_loss": 3.0, "rollbacks": [{"lr_scale": 0.1}]}, "to 1.0e-04, still too high: try --lr 3.3e-05."),
        ({"dev_loss": None}, "Better: the test loss fell from 3.5000 to 2.5000."),
        (_reward(0.1, 0.3), "Better: the dev reward rose from 0.1000 to 0.3000. It was rising to the end"),
        (_reward(0.1, 0.1), "is 0.1000. Try another rate (it was 1.0e-03), a larger method.rho, or more steps"),
        (_reward(0.1, 0.3) | {"after": {"loss": 4.0, "reward": -4.0}}, "the test reward fell from 0.1000 to -4.0000."),
        (_reward(0.1, 0.1) | {"idle_steps": 30}, "In 30 of 40 steps all answers scored alike: give partial credit"),
    ],
)  # fmt: skip
def test_a_verdict_says_what_to_try(changes, said):
    summary = {"method": "mezo", "dev_loss": 2.0,
               "dev_loss_before": 3.0, "before": {"loss": 3.5}, "after": {"loss": 2.5}, "steps": 40,
               "kept_step": 40, "state_chosen": True, "idle_steps": 0, "stopped": None, "rollbacks": [],
               "chance": {"rows": 64, "states": 9, "p": 0.001}, "rows": {"train": 1000},
               "more_steps": "tezo train --output RUN --resume --steps 80"}  # fmt: skip
    assert said in verdict(summary | changes, 1e-3, 50 if "stopped" in changes else 40)


def test_without_a_guard_nothing_returns(home, tmp_path):
    summary = train(config(home, lr=RATES["tezo-cadam"], guard=False), tmp_path / "run")
    assert summary["rollbacks"] == [] and summary["stopped"] is None and summary["steps"] == STEPS
    assert not read_log(tmp_path / "run/steps.log").rollbacks


def test_without_dev_rows_it_returns_to_the_lowest_mean_of_a_tenth_of_the_steps(home, tmp_path):
    class Planted(Listener):
        """Moves the parameters far away after one step."""

        def started(self, job: Any) -> None:
            self.job = job

        def stepped(self, progress: Any) -> None:
            if progress.record.step == 50:
                for moving in self.job.optimizer.parameters.values():
                    moving.change.coefficient.add_(30.0)

    data = {"train": str(home / "train.jsonl"), "test": str(home / "test.jsonl"), "hold_out": 0}
    made = parse_config({"model": {"name": str(home / "opt")}, "data": data,
                         "method": {"name": "tezo-cadam", "lr": 1e-3, "rank": 4},
                         "train": {"steps": 96, "batch_size": 4, "guard": True}})  # fmt: skip
    summary = train(made, tmp_path / "run", [Planted()])
    log, every = read_log(tmp_path / "run/steps.log"), 9
    (rollback,) = summary["rollbacks"]
    assert 50 < rollback["step"] <= 72 and rollback["reason"] == STEPS_ROSE
    losses = [record.loss for record in log.steps[: rollback["step"]]]
    means = {end: sum(losses[end - every : end]) / every for end in range(every, rollback["step"] + 1, every)}
    assert rollback["to"] == min(means, key=means.get)
    assert summary["kept_step"] == summary["steps"], "there is no best by dev rows to keep"


def test_a_run_whose_dev_loss_falls_no_further_ends_early(home, tmp_path):
    flags = ("--model", home / "opt", "--data", home / "train.jsonl", "--steps", 200, "--method", "mezo", "--json")
    named = {
        "data__dev": home / "dev.jsonl",
        "method__lr": 1e-30,
        "train__batch_size": 1,
        "train__guard": True,
    }  # nothing changes
    done = tezo("train", *flags, "--output", tmp_path / "run", *settings(**named))
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["steps"] == 120 and summary["stopped"] == STAGNATED
    assert [(r["step"], r["reason"]) for r in summary["rollbacks"]] == [(60, STAGNATED)]
    assert summary["verdict"].startswith("No better")


def test_a_report_tells_of_returns(home, tmp_path):
    rolled_back(home, tmp_path / "run", "tezo-cadam")
    done = tezo("report", tmp_path / "run", "--output", tmp_path / "page.html")
    assert done.code == 0, done.err
    text = (tmp_path / "page.html").read_text()
    for rollback in read_log(tmp_path / "run/steps.log").rollbacks.values():
        assert f"After step {rollback.step} {in_words(rollback)}." in text
    state, _, advice = json.loads((tmp_path / "run/summary.json").read_text())["verdict"].partition(": ")
    assert state in (BETTER, NO_BETTER) and advice[:1].upper() + advice[1:] in text


# The log


def test_rollbacks_are_entries_in_their_place(tmp_path):
    path, header = tmp_path / "steps.log", {"directions": 0, "kinds": ["gradient"]}
    log = StepLog(path, header)
    for step in range(3):
        log.append(StepRecord(step, 1.0, 1e-3, rule="gradient"))
    made = Rollback(3, 1, 0.25, STEPS_ROSE)
    log.append_rollback(made)
    log.append_rollback(made)
    log.append(StepRecord(3, 1.0, 1e-3, rule="gradient"))
    log.close()
    assert read_log(path).rollbacks == {3: made} and len(read_log(path).steps) == 4
    data = path.read_bytes()
    assert data.count(b"back") == 1
    for torn in range(data.index(b"back"), data.index(b"back") + 8):
        path.write_bytes(data[:torn])
        assert read_log(path).rollbacks == {} and len(read_log(path).steps) == 3


@pytest.mark.parametrize(
    "forged", [Rollback(2, 1, 0.5, "x"), Rollback(3, 4, 0.5, "x"), Rollback(3, -1, 0.5, "x"), Rollback(3, 1, 0.0, "x"),
               Rollback(3, 1, 2.0, "x")]
)  # fmt: skip
def test_a_forged_rollback_is_no_entry(tmp_path, forged):
    path = tmp_path / "steps.log"
    log = StepLog(path, {"directions": 0, "kinds": ["gradient"]})
    for step in range(3):
        log.append(StepRecord(step, 1.0, 1e-3, rule="gradient"))
    log.append_rollback(forged)
    log.append(StepRecord(3, 1.0, 1e-3, rule="gradient"))
    log.close()
    with pytest.raises(RequestError, match="damaged after step 3"):
        read_log(path)
