"""The verdict's paired test: its level, its power, and the losses of rows that it compares."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from folders import completion_rows, model_and_rows, settings, tezo, write_rows
from short_runs import config, stopped

from tezo.runs.step_log import read_log
from tezo.tasks import paired
from tezo.tasks.evaluation import evaluate, evaluated_by
from tezo.tasks.paired import LEVEL, chance
from tezo.training.job import prepare
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.settings import parse_config
from tezo.training.summary import verdict

SUMMARY = {
    "method": "mezo", "steps": 40, "kept_step": 40, "state_chosen": True, "idle_steps": 0, "stopped": None,
    "rollbacks": [], "rows": {"train": 1000, "dev": 32}, "more_steps": "tezo train --output RUN --resume --steps 80",
}  # fmt: skip


def verdict_on(before, states) -> str:
    """The first word of what is said of dev rows with these losses, whose best state is kept."""
    losses = [sum(own) / len(own) for own in (before, *states)]
    kept = int(np.argmin(losses[1:]))
    p = chance(before, states, kept) if losses[kept + 1] < losses[0] else 1.0
    metrics = {"dev_loss_before": losses[0], "dev_loss": min(losses)}
    both = {when: {"loss": losses[0]} for when in ("before", "after")}
    found = SUMMARY | metrics | both | {"chance": {"rows": len(before), "states": len(states), "p": p}}
    return verdict(found, 1e-3, 40).partition(":")[0]


NOISE = {
    "normal": lambda draw, size: draw.normal(size=size),
    "heavy": lambda draw, size: draw.standard_t(2, size),
    "few": lambda draw, size: draw.normal(size=size) * (draw.random(size) < 0.3),
    "right": lambda draw, size: 1 - draw.exponential(size=size),
    "left": lambda draw, size: draw.exponential(size=size) - 1,
    "majority": lambda draw, size: np.where(draw.random(size) < 0.25, 3.0, -1.0) * np.exp(0.3 * draw.normal(size=size)),
}
"""Changes of rows' losses whose expectation is zero; those of the last three are skewed."""
REPEATS = 800


def most(rate: float) -> int:
    """The largest number of events of this rate in `REPEATS` that is seen in one of 10,000 experiments or more."""
    tail, count = 1.0, 0
    while tail > 1e-4:
        tail -= math.comb(REPEATS, count) * rate**count * (1 - rate) ** (REPEATS - count)
        count += 1
    return count


@pytest.mark.parametrize("states", [1, 8])
@pytest.mark.parametrize("rows", [9, 32, 100])
@pytest.mark.parametrize("noise", ["normal", "heavy", "few"])
def test_noise_is_called_better_at_most_at_the_level(monkeypatch, noise, rows, states):
    """States are steps of a random walk, and the one with the lowest mean is kept. A p-value holds for any `FLIPS`."""
    monkeypatch.setattr(paired, "FLIPS", 499)
    draw, better = np.random.default_rng(rows + states), 0
    for _ in range(REPEATS):
        before = draw.exponential(size=rows)
        better += verdict_on(before, before + np.cumsum(NOISE[noise](draw, (states, rows)), 0)) != "No better"
    assert better <= most(LEVEL), f"{better} of {REPEATS}"


@pytest.mark.parametrize("states", [1, 8])
@pytest.mark.parametrize("rows", [32, 100])
@pytest.mark.parametrize("noise", ["left", "right", "majority"])
def test_skewed_noise_is_called_better_at_most_in_a_twentieth(monkeypatch, noise, rows, states):
    monkeypatch.setattr(paired, "FLIPS", 499)
    draw, better = np.random.default_rng(rows + states), 0
    for _ in range(REPEATS):
        before = draw.exponential(size=rows)
        better += verdict_on(before, before + np.cumsum(NOISE[noise](draw, (states, rows)), 0)) != "No better"
    assert better <= most(0.05), f"{better} of {REPEATS}"


@pytest.mark.parametrize(("rows", "gain"), [(6, 3.0), (12, 1.5), (32, 1.0), (100, 0.6), (500, 0.25)])
def test_a_real_gain_is_said(rows, gain):
    """Of 100 runs with eight states, of which the last gains so many standard deviations of the rows' noise."""
    draw, better = np.random.default_rng(rows), 0
    for _ in range(100):
        before = 5 + draw.exponential(size=rows)
        noise = np.cumsum(draw.normal(size=(8, rows)), 0) / math.sqrt(8)
        better += verdict_on(before, before + noise - gain * np.arange(1, 9)[:, None] / 8) == "Better"
    assert better >= 90


def test_a_change_towards_the_label_of_most_rows_alone_is_no_better():
    """The verdict was "Better: 0.2411 to 0.2401" of a model that answers the majority for every row as before."""
    draw = np.random.default_rng(3)
    before = np.concatenate([draw.uniform(0.08, 0.15, 54), draw.uniform(1.8, 2.6, 6)])
    after = before + np.repeat([-0.004, 0.02], [54, 6])
    assert before.mean() - after.mean() > 4e-3 * before.mean()
    assert verdict_on(before, [after]) == "No better"


def test_the_p_value_is_the_share_of_all_signs_that_gain_as_much():
    draw = np.random.default_rng(5)
    for states in (1, 3):
        before = draw.normal(size=9)
        after = before - 0.5 - draw.normal(size=(states, 9))
        gains = before - after
        kept = int(gains.mean(1).argmax())
        signs = np.array(list(itertools.product((-1, 1), repeat=9)))
        exact = ((signs @ gains.T).max(1) >= gains[kept].sum() - 1e-9).mean()
        found = chance(before, after, kept)
        assert found == pytest.approx(exact, abs=4 * math.sqrt(exact / paired.FLIPS) + 1 / paired.FLIPS)


def test_rows_without_a_loss_are_left_out():
    nan, before = math.nan, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    after = [0.5, 1.4, 2.6, 3.5, 4.3, 5.5, 6.5]
    p = chance(before, [after], 0)
    assert p == pytest.approx(1 / 128, abs=4e-3)
    assert chance([*before, nan, 3.0], [[*after, 1.0, nan]], 0) == pytest.approx(p, abs=4e-3)
    assert chance(before, [before], 0) == chance([nan], [[1.0]], 0) == chance([1.0], [[nan]], 0) == 1.0
    assert chance(after, [before], 0) > 0.9
    assert chance([1.0] * 9, [[0.5] * 9], 0) < LEVEL, "all rows gain alike"
    assert chance(before, [after], 0) == p, "drawn with a fixed seed"
    assert chance(before[:5], [after[:5]], 0) > LEVEL, "five rows say nothing: 1 in 32"


# Losses of rows


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = model_and_rows(tmp_path_factory.mktemp("paired"), 16)
    write_rows(home / "texts.jsonl", completion_rows(16))
    (home / "score.py").write_text(
        "def length(prompt, completion, row):\n    return None if len(prompt) % 3 == 0 else float(len(completion))\n"
    )
    return home


def job_of(home, data: str, **train_settings):
    rows = str(home / data)
    made = {"model": {"name": str(home / "opt"), "device": "cpu"}, "data": {"train": rows, "dev": rows},
            "train": {"steps": 2, "guard": True} | train_settings}  # fmt: skip
    if "reward" not in train_settings:
        made["method"] = {"name": "gauss-newton"}
    return prepare(parse_config(made))


@pytest.mark.parametrize("data", ["train.jsonl", "texts.jsonl"])
@pytest.mark.parametrize("size", [3, 64])
def test_the_loss_is_the_mean_of_what_each_row_adds_to_it(home, data, size):
    job = job_of(home, data)
    found = evaluate(job.model, job.objective, job.dev, size)
    with torch.no_grad():
        outputs = job.held_out.evaluated()
    by_outputs = evaluated_by(outputs, job.dev, shared=bool(job.objective.options))
    for own in (found, by_outputs):
        assert sum(own.row_losses) / len(job.dev) == pytest.approx(own.metrics["loss"], rel=1e-6)
    assert found.row_losses == pytest.approx(by_outputs.row_losses, rel=1e-4)
    tokens = sum(row.answers[0] for row in job.dev)
    for place in (0, 7):
        alone = evaluate(job.model, job.objective, [job.dev[place]], 1).metrics["loss"]
        weight = 1 if job.objective.options else job.dev[place].answers[0] * len(job.dev) / tokens
        assert found.row_losses[place] == pytest.approx(alone * weight, rel=1e-4)


def test_the_loss_of_a_prompt_is_minus_its_score_and_missing_where_that_is(home):
    job = job_of(home, "texts.jsonl", reward=f"{home}/score.py:length", max_new_tokens=4)
    found = job.reward.measure(job.model, job.objective, job.dev, 4)
    expected = [math.nan if len(row.example.prompt) % 3 == 0 else -len(text) for row, text in
                zip(job.dev, found.answers, strict=True)]  # fmt: skip
    assert found.row_losses == pytest.approx(expected, nan_ok=True)
    assert np.nanmean(found.row_losses) == pytest.approx(found.metrics["loss"])
    assert any(map(math.isnan, expected)) and not all(map(math.isnan, expected))


class Losses(Listener):
    """Notes the losses of dev rows at every evaluation."""

    def __init__(self) -> None:
        self.found: dict[int, list[float]] = {}

    def started(self, job) -> None:
        self.job = job

    def evaluated(self, split, step, _metrics) -> None:
        if split == "dev":
            self.found[step] = evaluate(self.job.model, self.job.objective, self.job.dev, 64).row_losses


def test_a_run_compares_the_kept_state_with_the_untuned_model_on_its_dev_rows(home, tmp_path):
    noted = Losses()
    summary = train(config(home), tmp_path / "run", [noted])
    before, kept = noted.found.pop(0), summary["kept_step"]
    states = [noted.found[step] for step in sorted(noted.found)]
    assert summary["chance"]["rows"] == 16 and summary["chance"]["states"] == len(states) == 5
    expected = chance(before, states, sorted(noted.found).index(kept)) if kept else 1.0
    assert summary["chance"]["p"] == pytest.approx(expected, abs=0.01)
    log = read_log(tmp_path / "run/steps.log")
    assert sum(log.row_losses["dev", kept]) / 16 == pytest.approx(summary["dev_loss"], rel=1e-5)
    stopped(config(home), tmp_path / "again", 6)
    again = train(config(home), tmp_path / "again", resume=True)
    assert again["chance"] == summary["chance"] and again["verdict"] == summary["verdict"]


@pytest.mark.parametrize("data", ["dev", "test", "held out", "none"])
def test_every_run_has_losses_to_compare(home, tmp_path, data):
    values = {
        "dev": {"data__dev": home / "dev.jsonl"},
        "test": {"data__test": home / "test.jsonl"},
        "held out": {},
        "none": {"data__test": home / "test.jsonl", "data__hold_out": 0},
    }[data]
    done = tezo("train", "--model", home / "opt", "--data", home / "train.jsonl", "--method", "tezo", "--steps", 4,
                "--output", tmp_path / "run", "--json", *settings(**values, train__batch_size=4))  # fmt: skip
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    rows = summary["rows"]["dev"] or summary["rows"]["test"]
    assert summary["chance"]["rows"] == rows and summary["chance"]["states"] == (1 if data == "none" else 4)
    assert 0 < summary["chance"]["p"] <= 1
