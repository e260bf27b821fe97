"""Rewards: a scorer of completions as the objective, from the first evaluation to a replay that needs no scorer."""

import functools
import itertools
import json
from dataclasses import replace

import pytest
import torch
from folders import (
    completion_rows,
    label_rows,
    model_folder,
    read_jsonl,
    refused,
    tezo,
    tiny_model,
    words_tokenizer,
    write_rows,
)
from kills import contents
from short_runs import Death, entries, killed_after, result, same, stopped

import tezo as library
from tezo.methods import METHODS
from tezo.report.charts import loss_charts
from tezo.report.tables import row_loss, step_loss
from tezo.runs.folder import LOG
from tezo.runs.reader import read_run
from tezo.runs.step_log import read_log
from tezo.runs.words import change_text, metric_text
from tezo.system.errors import RequestError
from tezo.tasks import scoring_processes as scoring
from tezo.tasks.evaluation import evaluate
from tezo.tasks.examples import Example
from tezo.tasks.generation import Sampling, completions
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.rewards import Reward, answered
from tezo.tasks.scorers import identity
from tezo.training.loop import train
from tezo.training.resume import replay
from tezo.training.settings import MethodConfig, dump_config, parse_config

SCORER = """
from pathlib import Path

with Path({marker!r}).open("a") as file:
    file.write("ran ")

def short_words(prompt, completion, row):
    words = completion.split()
    return sum(len(word) <= row["most"] for word in words) / max(1, len(words))

def other(prompt, completion, row):
    return float(len(completion))

def fails(prompt, completion, row):
    raise KeyError("no such thing")

def is_nan(prompt, completion, row):
    return float("nan")
"""


def short_words(prompt, completion, row):
    words = completion.split()
    return sum(len(word) <= row["most"] for word in words) / max(1, len(words))


@pytest.fixture
def home(tmp_path_factory):
    """A model, prompts without answers, and a scorer that leaves a mark where its file is run."""
    home = tmp_path_factory.mktemp("rewards")
    model_folder(home, "opt")
    for seed, name in enumerate(("train", "dev")):
        rows = [{"prompt": row["prompt"], "most": 4} for row in completion_rows(12, seed)]
        write_rows(home / f"{name}.jsonl", rows)
    (home / "score.py").write_text(SCORER.format(marker=str(home / "marker")))
    return home


def config(home, **more):
    named = {"reward": f"{home / 'score.py'}:short_words", "steps": 6, "batch_size": 4, "max_new_tokens": 6,
             "temperature": 1.0, "eval_every": 2, "checkpoint_every": 2} | more  # fmt: skip
    return parse_config(
        {
            "model": {"name": str(home / "opt"), "device": "cpu"},
            "data": {"train": str(home / "train.jsonl"), "dev": str(home / "dev.jsonl")},
            "method": {"name": "tezo", "rank": 4, "lr": 0.05, "rho": 0.05},
            "train": named,
        }
    )


def flags(home, *more):
    return ("--model", home / "opt", "--data", home / "train.jsonl", "--output", home / "run", *more)


def reward_of(temperature: float = 0.0) -> Reward:
    return Reward(short_words, "short_words", identity(short_words), 6, temperature, 0)


def prompts(tokenizer) -> list:
    objective = CausalObjective(tokenizer, torch.device("cpu"), 100, ())
    rows = completion_rows(6)
    return objective, [
        objective.encode(Example(row["prompt"], "", (), None, "", fields={"most": 3 + i % 3}))
        for i, row in enumerate(rows)
    ]


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["tezo", "lozo", "mezo"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_reward_under_perturbation_is_that_of_perturbed_weights(name, temperature):
    tokenizer, probes = words_tokenizer(), []
    for in_forward in (True, False):  # by hooks in each pass of the generation, and by weights written in place
        model = tiny_model("opt", len(tokenizer)).double()
        objective, encoded = prompts(tokenizer)
        optimizer = METHODS[name].build(model, lr=0.05, rho=0.05, in_forward=in_forward)
        reward = reward_of(temperature)
        for step in range(4):
            optimizer.step(
                lambda r=reward, m=model, o=objective, e=encoded, t=step: r.measure(m, o, e, 3, t)[0]["loss"]
            )
            probes.append([(probe.loss_plus, probe.loss_minus) for probe in optimizer.last_step.probes])
        optimizer.close()
    assert probes[:4] == probes[4:]
    assert any(plus != minus for ((plus, minus),) in probes)


def test_a_reward_is_the_mean_score_of_what_the_model_writes():
    tokenizer = words_tokenizer()
    model, (objective, encoded) = tiny_model("opt", len(tokenizer)), prompts(tokenizer)
    scores = []
    for e in encoded:
        ids = list(tokenizer(e.example.prompt).input_ids)
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        text = tokenizer.decode(ids[len(tokenizer(e.example.prompt).input_ids) :], skip_special_tokens=True)
        scores.append(short_words(e.example.prompt, text, e.example.fields))
    assert reward_of().measure(model, objective, encoded, 4)[0]["reward"] == pytest.approx(sum(scores) / len(scores))


def test_sampling_follows_the_softmax_and_is_a_function_of_seed_step_row_and_place():
    logits, draws, temperature = torch.tensor([1.0, 0.0, -1.0, 0.5]), 4000, 0.7
    counts = torch.zeros(4)
    for step in range(draws):
        noise = Sampling(temperature, 3, step).noise(1, 2, 4)
        counts[int((logits / temperature + noise).argmax())] += 1
    expected = (logits / temperature).softmax(0)
    assert ((counts / draws - expected).abs() < 4.5 * (expected * (1 - expected) / draws).sqrt()).all()
    own = Sampling(temperature, 3, 5).noise(1, 2, 4)
    assert torch.equal(own, Sampling(temperature, 3, 5).noise(1, 2, 4))
    keys = ((4, 5, 1, 2), (3, 6, 1, 2), (3, 5, 0, 2), (3, 5, 1, 1))
    others = [Sampling(temperature, *key[:2]).noise(*key[2:], 4) for key in keys]
    assert not any(torch.equal(own, other) for other in others)


def test_samples_do_not_depend_on_the_batches_and_change_with_the_step():
    tokenizer = words_tokenizer()
    model, (objective, encoded) = tiny_model("opt", len(tokenizer)), prompts(tokenizer)
    texts = [completions(model, objective, encoded, size, 6, Sampling(1.0, 0, 7)) for size in (1, 2, 6)]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != completions(model, objective, encoded, 6, 6, Sampling(1.0, 0, 8))
    greedy = completions(model, objective, encoded, 6, 6)
    assert texts[0] != greedy == completions(model, objective, encoded, 6, 6, Sampling(1e-6, 0, 7))


def test_a_run_raises_its_reward_and_keeps_the_best_of_it(home):
    rows = [{"prompt": row["prompt"], "most": 3} for row in completion_rows(12)]
    run = library.train(
        home / "opt", rows, dev=rows, reward=short_words, method="tezo", rank=4, steps=30, batch_size=12, lr=0.1,
        rho=0.1, max_new_tokens=6, eval_every=10, guard=False,
    )  # fmt: skip
    before, after = run.summary["before"], run.summary["after"]
    assert before["loss"] == -before["reward"] and after["reward"] > before["reward"] + 0.1
    dev = {line["step"]: line["reward"] for line in run.metrics if line.get("split") == "dev"}
    kept = run.summary["kept_step"]
    assert after["reward"] == max(dev.values()) == dev.get(kept, before["reward"])
    assert run.evaluate() == run.evaluate(rows) == run.evaluate(rows, reward=short_words) == after
    assert run.evaluate(rows, reward=lambda *_: 2)["reward"] == 2
    with pytest.warns(UserWarning, match="of 2 answers were cut at 6 new tokens"):
        assert run.predict(rows[:2]) == run.predict(rows[:2], max_new_tokens=6)
    run.close()


def test_both_signs_share_random_numbers_and_steps_do_not(home):
    rows = [{"prompt": "question : the film was answer :", "most": 3}] * 12  # batches are all alike
    run = library.train(
        home / "opt", rows, dev=rows, reward=short_words, method="tezo", rank=4, steps=4,
        batch_size=12, temperature=1.0, max_new_tokens=6, log_every=1, guard=False, lr=1e-12, rho=1e-9,
    )  # fmt: skip
    lines = [line for line in run.metrics if "projected_grads" in line]
    assert all(line["projected_grads"] == [0.0] for line in lines)
    assert len({line["loss"] for line in lines}) > 1
    run.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stopped_run_goes_on_to_the_bit_and_is_replayed_without_the_scorer(home, tmp_path, temperature):
    made = config(home, temperature=temperature)
    train(made, tmp_path / "whole")
    stopped(made, tmp_path / "run", 4)
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    (home / "score.py").unlink()
    replay(tmp_path / "whole", tmp_path / "replayed")
    assert same(result(tmp_path / "replayed"), result(tmp_path / "whole"))


@pytest.mark.slow
def test_a_run_that_was_killed_after_any_entry_of_its_log_leaves_the_same_files(home, tmp_path):
    made = config(home, steps=2, batch_size=4, eval_every=1, log_every=1, max_new_tokens=3)
    made = replace(made, method=MethodConfig(name="es", options={"rank": 4, "num_directions": 3}))
    train(made, tmp_path / "whole")
    count = len(entries((tmp_path / "whole/steps.log").read_bytes())) - 1
    assert count >= 9  # evaluations before, a file, 2 steps, each with an evaluation, those after, and the end
    for killed in range(count):
        killed_after(tmp_path / "whole", tmp_path / f"{killed}", killed)
        train(made, tmp_path / f"{killed}", resume=True)
        assert contents(tmp_path / f"{killed}") == contents(tmp_path / "whole"), killed


def test_a_run_goes_on_only_with_its_own_scorer(home, tmp_path):
    stopped(config(home), tmp_path / "run", 3)
    (home / "score.py").rename(home / "moved.py")
    moved = config(home, reward=f"{home / 'moved.py'}:short_words")
    stopped(moved, tmp_path / "run", 4)
    (home / "moved.py").write_text((home / "moved.py").read_text() + "\n# a comment\n")
    stopped(moved, tmp_path / "run", 5)
    (home / "moved.py").write_text((home / "moved.py").read_text().replace("max(1,", "max(2,"))
    with pytest.raises(RequestError, match=r"train\.reward: the scorer is not the one .*its file differs"):
        train(moved, tmp_path / "run", resume=True)


def scorer_of(weight):
    return lambda _, completion, row: weight * len(completion.split()) / row["most"]


def weighted(weight, _, completion, row):
    return weight * len(completion.split()) / row["most"]


OTHERS = {"code": short_words, "closure": scorer_of(-1.0), "partial": functools.partial(weighted, 1.0)}


@pytest.mark.parametrize("other", OTHERS)
def test_a_run_by_an_object_goes_on_only_with_one_that_computes_the_same(home, tmp_path, other):
    made, seen = config(home, reward=None, objective="reward"), []

    def by(scorer):
        def noted(prompt, completion, row):  # what it notes is no part of it
            seen.append(completion)
            return scorer(prompt, completion, row)

        return noted

    train(made, tmp_path / "whole", score=by(scorer_of(1.0)))
    with pytest.raises(KeyboardInterrupt):
        train(made, tmp_path / "run", [Death(3)], score=by(scorer_of(1.0)))
    for refused_here in (OTHERS[other], by(OTHERS[other])):
        with pytest.raises(RequestError, match="the scorer is not the one that the run began with"):
            train(made, tmp_path / "run", resume=True, score=refused_here)
    train(made, tmp_path / "run", resume=True, score=by(scorer_of(1.0)))
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert any("not compared" in text and "seen" in text for text in summary["notices"])
    assert train(made, tmp_path / "run", resume=True, score=by(scorer_of(1.0))) == summary
    with pytest.raises(RequestError, match="the scorer is not the one"):  # in place of the old figures
        train(made, tmp_path / "run", resume=True, score=by(OTHERS[other]))


def test_a_run_goes_on_only_with_its_own_function_of_a_file(home, tmp_path):
    stopped(config(home), tmp_path / "run", 4)
    other = config(home, reward=f"{home / 'score.py'}:other")
    with pytest.raises(RequestError, match="its function differs"):
        train(other, tmp_path / "run", resume=True)
    train(config(home), tmp_path / "run", resume=True)
    with pytest.raises(RequestError, match="its function differs"):
        train(other, tmp_path / "run", resume=True)  # of a run that has ended, too
    train(config(home, reward=None, objective="reward"), tmp_path / "run", resume=True)
    (tmp_path / "changed").mkdir()
    changed = tmp_path / "changed/score.py"
    changed.write_text((home / "score.py").read_text().replace("max(1,", "max(2,"))
    with pytest.raises(RequestError, match="the scorer is not the one"):
        train(config(home, reward=f"{changed}:short_words"), tmp_path / "run", resume=True)


def test_scores_that_are_missing_are_a_share_of_each_evaluation_and_in_the_verdict(home):
    rows = [{"prompt": row["prompt"], "most": i} for i, row in enumerate(completion_rows(12))]

    def without_the_first(prompt, completion, row):
        return None if row["most"] in (0, 7, 8) else float(row["most"])

    settings = {"method": "mezo", "steps": 2, "batch_size": 4, "lr": 1e-3, "max_new_tokens": 4, "progress": False}
    run = library.train(home / "opt", rows, dev=rows, reward=without_the_first, **settings)
    known = [i for i in range(12) if i not in (0, 7, 8)]
    assert run.summary["before"] == pytest.approx(
        {"reward": sum(known) / 9, "loss": -sum(known) / 9, "missing_scores": 3 / 12}
    )
    assert "Of the scores 25.0 % are missing before and 25.0 % after" in run.summary["verdict"]
    run.close()
    run = library.train(home / "opt", rows, dev=rows, reward=lambda *_: 1.0, **settings)
    assert run.summary["before"] == {"reward": 1.0, "loss": -1.0} and run.summary["idle_steps"] == 2
    assert "In 2 of 2 steps all answers scored alike" in run.summary["verdict"]
    run.close()


WANDERS = """
import os, tempfile

def wander():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)

wander()

def short_words(prompt, completion, row):
    wander()
    words = completion.split()
    return sum(len(word) <= row["most"] for word in words) / max(1, len(words))
"""


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_scorer_that_changes_the_working_folder_moves_nothing(home, tmp_path, monkeypatch, workers):
    (home / "wanders.py").write_text(WANDERS)
    few = ("--steps", 2, "--set", "train.max_new_tokens=4", "--set", f"train.reward_workers={workers}")

    def at_home(*arguments):
        monkeypatch.chdir(home)
        done = tezo(*arguments)
        assert done.code == 0, done.err
        return done

    given = (
        "--model",
        "opt",
        "--data",
        "train.jsonl",
        "--set",
        "data.dev=dev.jsonl",
        "--reward",
        "wanders.py:short_words",
    )
    assert json.loads(at_home("train", *given, *few, "--output", "dry", "--dry-run", "--json").out)["steps"]
    at_home("train", *given, *few, "--output", "run")
    (home / "run/manifest.json").unlink()
    at_home("train", *given, *few, "--output", "run", "--resume")
    whole = ("--model", home / "opt", "--data", home / "train.jsonl", "--dev", home / "dev.jsonl")
    at_home("train", *whole, *few, "--output", tmp_path / "run", "--reward", f"{home / 'score.py'}:short_words")
    assert same(result(home / "run"), result(tmp_path / "run"))
    after = json.loads(at_home("eval", "run", "--reward", "wanders.py:short_words", "--json").out)
    monkeypatch.chdir(home)
    run = library.train(
        "opt", "train.jsonl", dev="dev.jsonl", reward="wanders.py:short_words", output="python", steps=2,
        max_new_tokens=4, reward_workers=workers,
    )  # fmt: skip
    assert run.evaluate()["reward"] == after["reward"] == run.summary["after"]["reward"]
    assert run.export(tmp_path / "adapter").is_dir()
    run.close()


def plan_of(*evaluations):
    """Scores of the dev rows in each evaluation, whatever the model writes; of training rows by what it writes."""
    values = itertools.chain(*evaluations)

    def scorer(prompt, completion, row):
        return short_words(prompt, completion, {"most": 3}) if row["most"] is None else next(values)

    return scorer


def planned(home, scorer, **more):
    train, dev = ([row["prompt"] for row in completion_rows(4, seed)] for seed in (0, 1))
    return library.train(
        home / "opt", [{"prompt": text, "most": None} for text in train],
        dev=[{"prompt": text, "most": i} for i, text in enumerate(dev)], reward=scorer, method="mezo", steps=2,
        batch_size=4, lr=1e-3, max_new_tokens=4, eval_every=1, progress=False, **more,
    )  # fmt: skip


ALL, SOME, LAST = [0.0, 1.0, 2.0, 3.0], [None, None, 1.9, 2.9], [0.1, 1.1, 2.1, 3.1]


def test_states_are_compared_on_the_prompts_that_have_scores_in_both(home, tmp_path):
    run = planned(home, plan_of(ALL, SOME, LAST, LAST), output=tmp_path / "run")
    dev = {line["step"]: line["reward"] for line in run.metrics if line.get("split") == "dev"}
    assert dev[1] > dev[2] > run.summary["before"]["reward"]  # the means of what is there would keep step 1
    assert run.summary["kept_step"] == 2 and run.summary["in_common"] == {}
    assert "the dev reward was 1.5000 and is 1.6000, within the noise of 4 rows" in run.summary["verdict"]
    run.close()
    run = planned(home, plan_of(SOME, LAST, ALL, LAST))
    assert run.summary["kept_step"] == 1  # a mean of two rows is no bar for one of four
    common = {"rows": 2, "of": 4, "before": -2.4, "after": pytest.approx(-2.6)}
    assert run.summary["in_common"] == {"dev": common, "test": common}
    assert "the dev reward was 2.4000 and is 2.6000, within the noise" in run.summary["verdict"]
    assert "compares the rows that have a score in both: 2 of 4 dev rows." in run.summary["verdict"]
    run.close()


def test_a_state_without_a_prompt_in_common_with_the_best_is_no_better(home):
    first = [0.0, 1.0, None, None]
    run = planned(home, plan_of(first, [None, None, 5.0, 6.0], [None, 0.5, 9.0, 9.0], first))
    assert run.summary["kept_step"] == 0
    run.close()


def test_a_verdict_says_where_nothing_can_be_compared(home):
    run = planned(home, plan_of(ALL[:2] + [None] * 2, ALL, ALL, [None] * 2 + ALL[2:]), keep_best=False)
    assert run.summary["in_common"]["test"]["rows"] == 0
    assert run.summary["verdict"].startswith("No better: ")
    run.close()


def test_a_run_with_missing_scores_goes_on_to_the_bit(home, tmp_path):
    whole = planned(home, plan_of(ALL, SOME, LAST, LAST), output=tmp_path / "whole")
    for killed in range(len(entries((tmp_path / "whole/steps.log").read_bytes())) - 1):
        killed_after(tmp_path / "whole", tmp_path / f"{killed}", killed)
        known = len(read_log(tmp_path / f"{killed}" / LOG).row_losses)
        run = planned(home, plan_of(*[ALL, SOME, LAST, LAST][known:]), output=tmp_path / f"{killed}", resume=True)
        assert contents(run.folder) == contents(whole.folder), killed
        run.close()
    whole.close()


FAILING = """
LIMIT = {limit}
calls = 0

def short_words(prompt, completion, row):
    global calls
    calls += 1
    if calls > LIMIT:
        raise ConnectionError("the judge is gone")
    words = completion.split()
    return {factor} * sum(len(word) <= row["most"] for word in words) / max(1, len(words))
"""
NEVER = 10**9
CHECKED, EVALUATED, STEPPED = 8, 12, 8
"""Calls before a run, in an evaluation and in a step."""
FAILURES = {
    "first evaluation": CHECKED,
    "first step": CHECKED + EVALUATED,
    "third step": CHECKED + 2 * EVALUATED + 2 * STEPPED,
    "dev rows": CHECKED + EVALUATED + 2 * STEPPED,
    "after": CHECKED + 4 * EVALUATED + 6 * STEPPED,
}


def failed(home, run, limit):
    """A run that its scorer has ended; the configuration."""
    (home / "judge.py").write_text(FAILING.format(limit=limit, factor=1.0))
    made = config(home, reward=f"{home / 'judge.py'}:short_words", temperature=0.5)
    with pytest.raises(RequestError, match=r"it raised ConnectionError .*--resume --reward .*judge\.py:short_words"):
        train(made, run)
    return made


@pytest.mark.parametrize("moment", FAILURES)
def test_a_mended_scorer_that_gives_earlier_answers_the_same_scores_goes_on_by_itself(home, tmp_path, moment):
    made = failed(home, tmp_path / "run", FAILURES[moment])
    unscored = [line for line in read_jsonl(tmp_path / "run/scored.jsonl") if "failed" in line]
    assert {line["failed"] for line in unscored} == {"raised ConnectionError (the judge is gone)"}
    assert all(line["score"] is None and line["completion"] for line in unscored)
    steps = len(read_log(tmp_path / "run" / LOG).steps)
    (home / "judge.py").write_text(FAILING.format(limit=NEVER, factor=1.0))
    train(made, tmp_path / "run", resume=True)
    train(made, tmp_path / "whole")
    assert same(result(tmp_path / "run"), result(tmp_path / "whole"))
    assert (tmp_path / "run/scored.jsonl").read_bytes() == (tmp_path / "whole/scored.jsonl").read_bytes()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    ((change,), whole) = summary["scorers"], json.loads((tmp_path / "whole/summary.json").read_text())
    assert whole["scorers"] == [] and summary["after"] == whole["after"]
    evaluations = 0 if moment == "first evaluation" else 2 if moment == "third step" else 1 + 3 * (moment == "after")
    assert change == {
        "step": steps, "name": made.train.reward, "answers": evaluations * EVALUATED + steps * STEPPED,
    }  # fmt: skip
    assert train(made, tmp_path / "run", resume=True) == summary


@pytest.mark.parametrize("moment", ["first step", "third step"])
def test_a_mended_scorer_that_scores_earlier_answers_otherwise_needs_a_word(home, tmp_path, moment):
    made = failed(home, tmp_path / "run", FAILURES[moment])
    (home / "judge.py").write_text(FAILING.format(limit=NEVER, factor=2.0))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(RequestError, match=r"other scores to earlier answers, such as that to .*--accept-scorer"):
        train(made, tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    summary = train(made, tmp_path / "run", resume=True, accept_scorer=True)
    assert [change["answers"] for change in summary["scorers"]] == [None]


def test_a_run_goes_on_with_another_scorer_by_a_word_and_says_so(home):
    one, two = (f"{home / 'score.py'}:{name}" for name in ("short_words", "other"))
    stopped(config(home), home / "begun", 3)
    again = ("train", "--output", home / "begun", "--resume", "--reward")
    refused(tezo(*again, two), "its function differs", "--accept-scorer")
    refused(tezo("train", *flags(home), "--reward", one, "--accept-scorer"), "accept_scorer", "resume")
    done = tezo(*again, two, "--accept-scorer")
    assert done.code == 0, done.err
    summary = json.loads((home / "begun/summary.json").read_text())
    assert summary["scorers"] == [{"step": 4, "name": two, "answers": None}]
    told = f"after step 4 the run went on with another scorer, {two}: it was accepted by the user."
    assert f"train.reward: {told}" in summary["notices"] and done.says(told)
    assert f"A{told[1:]}" in (home / "begun/adapter/README.md").read_text()
    assert f"reward: {two}" in (home / "begun/config.yaml").read_text()
    (home / "begun/manifest.json").unlink()  # as of a run that was killed at its end
    refused(tezo(*again, one), "its function differs")
    assert tezo(*again, two).code == 0
    assert json.loads((home / "begun/summary.json").read_text())["scorers"] == summary["scorers"]
    refused(tezo(*again, one), "its function differs", "another output")
    assert tezo("export", home / "begun", "--output", home / "export").code == 0
    assert f"A{told[1:]}" in (home / "export/README.md").read_text()


def test_a_run_by_an_object_goes_on_with_another_by_a_word(home, tmp_path):
    rows = [{"prompt": row["prompt"], "most": 3} for row in completion_rows(12)]
    given = {
        "model": home / "opt",
        "data": rows,
        "dev": rows,
        "method": "mezo",
        "steps": 4,
        "eval_every": 1,
        "lr": 1e-3,
    }
    given |= {"batch_size": 4, "max_new_tokens": 4, "output": tmp_path / "run", "progress": False}
    with pytest.raises(KeyboardInterrupt):
        library.train(**given, reward=scorer_of(1.0), listeners=[Death(1)])
    with pytest.raises(RequestError, match=r"its variable weight differs.*accept_scorer=True"):
        library.train(**given, reward=scorer_of(0.01), resume=True)
    with pytest.raises(KeyboardInterrupt):
        library.train(**given, reward=scorer_of(0.01), resume=True, accept_scorer=True, listeners=[Death(2)])
    run = library.train(**given, reward=scorer_of(0.01), resume=True)
    assert [change["step"] for change in run.summary["scorers"]] == [2]
    dev = [line["reward"] for line in run.metrics if line.get("split") == "dev"]
    assert dev[0] > max(dev[1:]), "by two scorers"
    assert run.summary["kept_step"] >= 2, "states of one scorer are compared"
    assert run.summary["verdict"].startswith("No better for certain: the scorer was changed after step 2")
    run.close()
    with pytest.raises(RequestError, match=r"accept_scorer is set, and train\.objective is loss"):
        library.train(home / "opt", rows, output=tmp_path / "run", resume=True, accept_scorer=True)


def test_the_report_of_a_run_whose_scorer_has_failed_shows_its_answers(home, tmp_path):
    failed(home, tmp_path / "run", FAILURES["third step"])
    assert {answer.step for answer in read_run(tmp_path / "run").scored} == {2}


@pytest.mark.parametrize("missing", ["before", "after"])
def test_scores_that_are_missing_at_one_end_alone_are_shown(home, tmp_path, missing):
    limits = {"before": "CHECKED < calls <= CHECKED + 2", "after": "calls > CHECKED + 4 * 12 + 4 * 8"}
    (tmp_path / "part.py").write_text(
        f"CHECKED, calls = 8, 0\n\ndef some(prompt, completion, row):\n    global calls\n    calls += 1\n"
        f"    return None if {limits[missing]} and calls % 2 else float(len(completion))\n"
    )
    dump = dump_config(config(home, reward=f"{tmp_path / 'part.py'}:some"))
    (tmp_path / "recipe.yaml").write_text(dump)
    done = tezo("train", tmp_path / "recipe.yaml", "--output", tmp_path / "run", "--reward", f"{tmp_path}/part.py:some")
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [when for when in ("before", "after") if "missing_scores" in summary[when]] == [missing]
    assert any(line.strip().startswith("missing_scores") for line in done.out.splitlines())


def test_what_is_no_function_is_refused_before_anything_is_loaded():
    with pytest.raises(RequestError, match="reward is 3; give a function"):
        library.train("nowhere", [{"prompt": "a"}], reward=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_own_answers_are_the_tokens_that_were_written_and_nothing_else(temperature):
    tokenizer = words_tokenizer()
    model, (objective, encoded) = tiny_model("opt", len(tokenizer)).double(), prompts(tokenizer)
    tokens = reward_of(temperature).own_answers(model, objective, encoded, 4)
    metrics, *_ = evaluate(model, objective, answered(encoded, tokens), 4)
    losses = []
    for row, own in zip(encoded, tokens, strict=True):
        assert len(own) == 6 or own[-1] == tokenizer.eos_token_id
        logits = model(torch.tensor([[*row.prompt, *own]])).logits[0, len(row.prompt) - 1 : -1]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(own), reduction="none").tolist()
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses))
    assert (metrics["token_accuracy"] == 1.0) == (temperature == 0.0)


def test_no_command_runs_a_scorer_because_a_run_folder_says_so(home):
    stopped(config(home), home / "begun", 3)
    train(config(home), home / "run")
    assert f"reward: {home / 'score.py'}:short_words" in (home / "run/config.yaml").read_text()
    rows = write_rows(home / "answered.jsonl", [row | {"most": 4} for row in completion_rows(4)])
    (home / "marker").unlink()
    refused(tezo("train", "--output", home / "begun", "--resume"), "no scorer is given", "--reward")
    for command in (
        ["eval", home / "run", "--data", rows],
        ["predict", home / "run", "--input", rows, "--output", home / "answers.jsonl"],
        ["export", home / "run", "--output", home / "export"],
        ["replay", home / "run", "--output", home / "replayed"],
        ["replay", home / "begun", "--output", home / "replayed too"],
    ):
        assert tezo(*command).code == 0, command
    refused(tezo("eval", home / "run", "--data", home / "dev.jsonl"), "no field 'completion'", "--reward FILE.py:FUNC")
    with pytest.warns(UserWarning, match="maximised a reward"):
        assert library.open_run(home / "run").evaluate(rows)["loss"] > 0
    assert not (home / "marker").exists()
    scorer = ("--reward", f"{home / 'score.py'}:short_words")
    assert tezo("train", "--output", home / "begun", "--resume", *scorer).code == 0
    done = tezo("eval", home / "run", "--data", home / "dev.jsonl", *scorer, "--json")
    assert json.loads(done.out)["reward"] == json.loads((home / "run/summary.json").read_text())["after"]["reward"]
    assert (home / "marker").exists()


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (("--reward", "score.py"), ["train.reward", "FILE.py:FUNCTION"]),
        (("--reward", f"{__file__}:a.b"), ["train.reward", "'a.b' is no name of a function"]),
        (("--reward", "{home}/score.py:long"), ["train.reward", "no function 'long'"]),
        (
            ("--reward", "{home}/score.py:fails"),
            ["fails gave none of 8 scores", "train.jsonl, line", "raised KeyError", "Mend it"],
        ),
        (("--reward", "{home}/score.py:is_nan"), ["returned nan", "finite"]),
        (("--reward", "{home}/broken.py:score"), ["broken.py cannot be run", "SyntaxError"]),
        (("--reward", "{home}/ends.py:score"), ["ends.py cannot be run", "SystemExit"]),
        (("--reward", "{home}/score.py:short_words", "--method", "gauss-newton"), ["outputs of each row", "name=es"]),
        (
            ("--method", "es", "--set", "train.objective=accuracy", "--data", "{home}/labels.jsonl"),
            ["train.objective is accuracy", "es needs the loss of each row"],
        ),
        (("--reward", "{home}/score.py:short_words", "--set", "train.reward_seconds=0"), ["reward_seconds is 0"]),
        (("--reward", "{home}/score.py:short_words", "--set", "train.reward_seconds=5"), ["train.reward_workers"]),
        (("--set", "train.objective=reward"), ["no scorer is given", "--reward"]),
        (("--set", "train.temperature=1"), ["train.temperature", "train.reward"]),
        (("--reward", "{home}/score.py:short_words", "--set", "train.objective=accuracy"), ["leave one of them out"]),
        (("--reward", "{home}/score.py:short_words", "--lr", "auto"), ["method.lr is auto", "reward"]),
        (("--reward", "{home}/score.py:short_words", "--method", "adam"), ["no gradient"]),
        (
            ("--reward", "{home}/score.py:short_words", "--set", "method.directions=per-example", "--method", "tezo"),
            ["directions=shared"],
        ),
        (
            ("--reward", "{home}/score.py:short_words", "--set", "method.directions=per-example"),
            ["method.directions: es, the default here", "--method head-feedback"],
        ),
        (("--reward", "{home}/score.py:short_words", "--data", "{home}/labels.jsonl"), ["free text", "options"]),
        (("--data", "{home}/train.jsonl"), ["there is no field 'completion'"]),
    ],
)
def test_what_cannot_be_had(home, more, parts):
    (home / "broken.py").write_text("def score(:\n")
    (home / "ends.py").write_text("import sys\nsys.exit(1)\n")
    write_rows(home / "labels.jsonl", label_rows(8))
    given = [text.format(home=home) for text in more]
    few = ("--set", "train.max_new_tokens=4") if "--reward" in more else ()
    done = tezo("train", *flags(home, *few), *given)
    refused(done, *parts)
    assert not (home / "run").exists()


def test_the_completions_that_a_run_keeps_are_those_that_it_scored(home):
    rows = [{"prompt": row["prompt"], "most": 3} for row in completion_rows(4)]
    scored = []

    def noted(prompt, completion, row):
        scored.append((prompt, completion))
        return short_words(prompt, completion, row)

    run = library.train(
        home / "opt", rows, dev=rows, reward=noted, method="mezo", steps=2, batch_size=4, lr=1e-3, max_new_tokens=6,
        temperature=1.0,
    )  # fmt: skip
    shown = json.loads((run.folder / "answers.json").read_text())["shown"]
    for when, evaluation in (("before", scored[:4]), ("after", scored[-4:])):
        assert shown and {(one["text"], one[when]) for one in shown} <= set(evaluation)
    run.close()


def test_a_dry_run_forecasts_a_run_by_its_reward(home):
    scorer = ("--reward", f"{home / 'score.py'}:short_words", "--steps", 3, "--set", "train.max_new_tokens=4")
    forecast, summary = (json.loads(tezo("train", *flags(home, *scorer, *more), "--json").out)
                         for more in (["--dry-run"], []))  # fmt: skip
    summary["notices"] = [text for text in summary["notices"] if not text.startswith("method.rho is")]
    assert all(forecast[key] == summary[key] for key in ("num_forward_passes", "notices", "parameters"))
    assert "method.rho" in forecast["measured"]


def test_an_evaluation_ends_the_processes_that_score_for_it(home, monkeypatch):
    made, begin = [], scoring._Process.__init__
    monkeypatch.setattr(scoring._Process, "__init__", lambda self, *given: made.append(self) or begin(self, *given))
    scorer = ("--reward", f"{home / 'score.py'}:short_words", "--set", "train.reward_workers=2")
    done = tezo("eval", home / "opt", "--data", home / "dev.jsonl", *scorer, "--set", "train.max_new_tokens=4")
    assert done.code == 0, done.err
    assert made and all(own._process.returncode is not None for own in made)


def test_words_and_numbers_of_a_report_are_those_of_a_reward(home):
    train(config(home), home / "run")
    words = {"steps": "minus the mean reward", "rows": "minus the mean reward"}
    assert json.loads((home / "run/summary.json").read_text())["losses"] == words
    done = tezo("report", home / "run", "--output", home / "report.html")
    assert done.code == 0, done.err
    page = (home / "report.html").read_text()
    assert words["rows"] in page and "<dt>before</dt>" in page and "<dt>right answer</dt>" not in page
    for name in ("summary.json", "manifest.json"):  # as in a run that has not ended
        (home / "run" / name).unlink(missing_ok=True)
    run = read_run(home / "run")
    assert {"steps": step_loss(run), "rows": row_loss(run)} == words
    assert [[*axes][:2] for axes in loss_charts([run]).values()] == [["evaluations of the reward", "steps"]]
    assert (metric_text("reward", 0.5), change_text("reward", 0.25, 0.5)) == ("0.5000", "+0.2500")


def test_the_folder_of_a_run_says_what_its_evaluations_take(home):
    done = tezo("train", *flags(home), "--reward", f"{home / 'score.py'}:short_words", "--steps", 2, "--json",
                "--set", "train.max_new_tokens=4", "--set", "train.log_every=1")  # fmt: skip
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["num_forward_passes"] == 2 * 16 and any("up to 4 tokens" in notice for notice in summary["notices"])
    assert all(
        -1 <= line["loss"] <= 0 for line in read_jsonl(home / "run/metrics.jsonl") if line.get("split") != "own answers"
    )
