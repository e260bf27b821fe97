"""The policy gradient: advantages, whose answers they are of, and runs that learn from them, end and go on."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from folders import completion_rows, model_folder, refused, tezo, write_rows
from kills import contents
from short_runs import entries, killed_after, result, same

import tezo as library
from tezo.newton import policy
from tezo.newton.policy import ANSWERS, advantages
from tezo.newton.sweep import U_RATE
from tezo.optim.closures import Answers
from tezo.tasks.rewards import RewardRows
from tezo.training.job import prepare
from tezo.training.loop import train
from tezo.training.resume import replay
from tezo.training.settings import parse_config

STORIES = Path(__file__).parents[2] / "shared/models/stories260K"
EXAMPLE = Path(__file__).parents[1] / "examples/reward"
SCORER = """
def short_words(prompt, completion, row):
    words = completion.split()
    return sum(len(word) <= row["most"] for word in words) / max(1, len(words))

def some(prompt, completion, row):
    return None if len(completion) % 3 == 0 else float(len(completion))
"""


@pytest.fixture
def home(tmp_path):
    """A decoder, prompts without answers, and scorers."""
    model_folder(tmp_path, "llama")
    for seed, name in enumerate(("train", "dev")):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": r["prompt"], "most": 4} for r in completion_rows(24, seed)])
    (tmp_path / "score.py").write_text(SCORER)
    return tmp_path


def config(home, scorer="short_words", **train_settings):
    return parse_config(
        {
            "model": {"name": str(home / "llama"), "device": "cpu"},
            "data": {"train": str(home / "train.jsonl"), "dev": str(home / "dev.jsonl")},
            "method": {"name": "policy-gradient", "rank": 4},
            "train": {"reward": f"{home / 'score.py'}:{scorer}", "steps": 3, "batch_size": 12, "max_new_tokens": 5,
                      "eval_every": 1, "checkpoint_every": 1, "log_every": 1} | train_settings,
        }
    )  # fmt: skip


def answers(scores, prompts):
    one_each = torch.arange(len(scores))
    return Answers(None, one_each, torch.tensor(prompts), torch.tensor(scores, dtype=torch.float64))


def test_advantages_are_over_the_other_answers_in_units_of_the_spread():
    found = advantages(answers([1.0, 0.0, 0.0, 0.0, 5.0, 5.0, 9.0, math.nan], [0, 0, 0, 0, 1, 1, 2, 2]))
    above = torch.tensor([0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0], dtype=torch.float64)
    assert torch.allclose(found, above / above.square().mean().sqrt())
    assert not advantages(answers([3.0, 3.0, 7.0, 7.0], [4, 4, 5, 5])).any()
    shifted = advantages(answers([10.0, 8.0, 1.0, 3.0], [0, 0, 1, 1]))  # neither unit nor difficulty of a prompt counts
    assert torch.allclose(shifted, torch.tensor([1.0, -1.0, -1.0, 1.0]).double())


def test_equal_scores_teach_nothing_however_they_are_rounded():
    for value in torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist():
        scores = [value, value, value, math.nan, *[2 * value] * 4]
        assert not advantages(answers(scores, [0, 0, 0, 0, 1, 1, 1, 1])).any(), value


def written(job, step=0):
    """The closure of a step on the first twelve prompts."""
    return RewardRows(job.reward, job.model, job.objective, job.train[:12], step)


@torch.no_grad()
def test_answers_are_drawn_by_the_models_probabilities_and_known_in_its_tokens(home):
    job = prepare(config(home, max_new_tokens=1), measuring=False)
    closure, count = written(job), 400
    found = closure.write([3], count)
    (prompt,) = {tuple(row.prompt) for row in job.train[3:4]}
    p_V = job.model(torch.tensor([prompt])).logits[0, -1].double().softmax(0)
    assert found.prompt_E.tolist() == [3] * count and found.answer_X.tolist() == [*range(count)]
    # each answer is one token, whose probability its row has: frequencies agree with them
    drawn = found.rows.outputs()
    p_E = drawn.scores_TC[:, 0].double().exp()
    tokens_E = drawn.tokens_TC[:, 0]
    assert torch.allclose(p_E, p_V[tokens_E], rtol=1e-4)
    likely = p_V.argsort(descending=True)[:8]
    often = torch.stack([(tokens_E == token).double().mean() for token in likely])
    assert ((often - p_V[likely]).abs() < 4.5 * (p_V[likely] * (1 - p_V[likely]) / count).sqrt()).all()
    again = written(job).write([3], count).rows.outputs()
    assert torch.equal(again.tokens_TC[:, 0], tokens_E)
    others = [written(job, 1).write([3], count), written(job).write([4], count)]
    assert not any(torch.equal(other.rows.outputs().tokens_TC[:, 0], tokens_E) for other in others)
    job.optimizer.close()


@torch.no_grad()
def test_later_answers_of_a_step_are_of_what_was_learnt_from_earlier_ones(home, monkeypatch):
    job = prepare(config(home), measuring=False)
    first, later = (written(job).write(part, ANSWERS) for part in (range(8), range(8, 12)))
    texts = {}
    for rate in (policy.RATE_FACTOR, 20.0 / U_RATE):
        monkeypatch.setattr(policy, "RATE_FACTOR", rate)
        closure = written(job)
        job.optimizer.refresh(closure)
        texts[rate] = [own for own, _ in closure.written]
        job.optimizer.close()
        job = prepare(config(home), measuring=False)
    untuned = written(job)
    untuned.write(range(8), ANSWERS), untuned.write(range(8, 12), ANSWERS)
    plain = [own for own, _ in untuned.written]
    assert len(first.prompt_E) == 8 * ANSWERS and len(later.prompt_E) == 4 * ANSWERS
    for found in texts.values():
        assert [own[:8] for own in found] == [own[:8] for own in plain]
    assert [own[8:] for own in texts[20.0 / U_RATE]] != [own[8:] for own in plain]
    job.optimizer.close()


def test_a_step_takes_a_part_of_what_its_refresh_has_learnt_and_counts_its_answers(home):
    job = prepare(config(home, steps=1), measuring=False)
    optimizer, closure = job.optimizer, written(job)
    optimizer.param_groups[0]["lr"] = 0.5
    with torch.no_grad():
        loss = optimizer.step(closure)
    scores = [one.value for _, of_turn in closure.written for one in of_turn]
    assert len(scores) == 12 * ANSWERS and loss == pytest.approx(-sum(scores) / len(scores))
    look, changes = optimizer.basis.at(0), {change.target.name: change.parts for change in optimizer.low_rank_changes()}
    assert changes.keys() == look.outputs.keys() != set()
    for name, parts in changes.items():
        change = sum(left @ right.T for left, right in parts)
        learnt = look.outputs[name] @ look.inputs[name].T
        assert learnt.any() and torch.allclose(change.double(), 0.5 * learnt, atol=1e-6), name
    assert optimizer.num_forward_passes == ANSWERS and optimizer.num_idle_steps == 0
    optimizer.close()


@torch.no_grad()
def test_what_earned_more_becomes_more_likely(home):
    """At the rate of the library, after one batch of eight prompts."""
    job = prepare(config(home), measuring=False)
    found = written(job).write(range(8), ANSWERS)
    weight_E, before = advantages(found)[found.answer_X], found.rows.example_losses(1)[0]
    ranks = dict.fromkeys([target.name for target in job.optimizer.targets], 4)
    learner = policy._learner(job.model, ranks, found.rows, 0)
    learner.learn(found.rows, weight_E)
    with learner.beside():
        once = found.rows.example_losses(1)[0]
    learner.learn(found.rows, weight_E)  # the second step moves along the gradient, the first by its signs
    with learner.beside():
        twice = found.rows.example_losses(1)[0]
    losses = [float((weight_E * of_rows.double()).mean()) for of_rows in (before, once, twice)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[2]
    job.optimizer.close()


@torch.no_grad()
@pytest.mark.skipif(not STORIES.is_dir(), reason="the pretrained decoder of 260K parameters is not at hand")
def test_an_answer_of_one_line_ends_with_it_whatever_others_write(home):
    """A batch is padded until its longest answer ends; what stands behind a line break was not written."""
    made = replace(config(home, max_new_tokens=60), model=replace(config(home).model, name=str(STORIES)))
    job = prepare(made, measuring=False)
    rows = [replace(row, example=replace(row.example, ends=False)) for row in job.train[:8]]
    found = RewardRows(job.reward, job.model, job.objective, rows, 0).write(range(8), ANSWERS)
    outputs, tokenizer, lengths = found.rows.outputs(), job.objective.tokenizer, []
    for x in range(len(found.answer_X)):
        tokens = outputs.tokens_TC[outputs.example_T == x, 0].tolist()
        assert "\n" not in tokenizer.decode(tokens[:-1]), tokens
        lengths.append(len(tokens))
    assert min(lengths) < max(lengths)
    job.optimizer.close()


def test_what_is_asked_for_beside_the_blocks_stays_as_it_is(home):
    made = replace(config(home), method=replace(config(home).method, options={"targets": ["*norm*", "*down_proj*"]}))
    job = prepare(made, measuring=False)
    assert {target.name.split(".")[-2] for target in job.optimizer.targets} == {"down_proj"}
    job.optimizer.close()
    everything = replace(made, method=replace(made.method, options={"targets": ["all"]}))
    job = prepare(everything, measuring=False)
    assert {target.name.split(".")[-2] for target in job.optimizer.targets} == {"down_proj", "o_proj"}
    job.optimizer.close()
    with pytest.raises(library.RequestError, match=r"method\.targets is .*such as model\.layers"):
        prepare(replace(made, method=replace(made.method, options={"targets": ["*q_proj*"]})), measuring=False)


def test_a_prompt_without_a_score_is_left_out_and_a_step_without_any_ends_the_run(home, tmp_path):
    """Nine prompts are a batch of eight and one alone, whose answers have no score."""
    made, seen = config(home, steps=1, batch_size=9, max_new_tokens=3, reward="memory", objective="reward"), []

    def all_but_one(prompt, completion, row):
        seen.append(prompt)
        return None if prompt == alone else float(len(completion))

    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    job = prepare(config(home, steps=1, batch_size=9), measuring=False)
    alone = job.train[job.sampler().rows(0)[8]].example.prompt
    job.optimizer.close()
    assert alone in {row["prompt"] for row in rows}
    train(made, tmp_path / "run", score=all_but_one)
    lines = [json.loads(line) for line in (tmp_path / "run/scored.jsonl").read_text().splitlines()]
    assert sum(line["score"] is None for line in lines) == ANSWERS
    learnt = {row["prompt"] for row in rows}

    def none_of_a_step(prompt, completion, row):
        seen.append(prompt)
        return None if prompt in learnt and sum(each in learnt for each in seen) > 8 else 1.0

    seen.clear()  # the check before a run scores eight training prompts
    with pytest.raises(library.RequestError, match="gave none of 36 scores"):
        train(made, tmp_path / "none", score=none_of_a_step)


def test_answers_that_all_earn_the_same_teach_nothing(home):
    run = library.train(str(home / "llama"), str(home / "train.jsonl"), dev=str(home / "dev.jsonl"), steps=2,
                        reward=lambda *_: 1.0, method="policy-gradient", max_new_tokens=3, progress=False)  # fmt: skip
    assert run.summary["idle_steps"] == 2 and "steps all answers scored alike" in run.summary["verdict"]
    assert run.summary["after"] == run.summary["before"]
    run.close()


def test_scores_that_are_missing_are_left_out(home, tmp_path):
    summary = train(config(home, "some"), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/scored.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 12 * ANSWERS and {line["score"] is None for line in lines} == {True, False}
    assert {(line["step"], line["member"]) for line in lines} == {(s, m) for s in (1, 2, 3) for m in range(ANSWERS)}
    assert math.isfinite(summary["after"]["reward"])


def test_a_run_that_was_killed_after_any_entry_of_its_log_leaves_the_same_files(home, tmp_path):
    made = config(home, steps=2)
    train(made, tmp_path / "whole")
    count = len(entries((tmp_path / "whole/steps.log").read_bytes())) - 1
    assert count >= 7
    for killed in range(count):
        killed_after(tmp_path / "whole", tmp_path / f"{killed}", killed)
        train(made, tmp_path / f"{killed}", resume=True)
        assert contents(tmp_path / f"{killed}") == contents(tmp_path / "whole"), killed
    (home / "score.py").unlink()
    replay(tmp_path / "whole", tmp_path / "replayed")
    assert same(result(tmp_path / "replayed"), result(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.skipif(not STORIES.is_dir(), reason="the pretrained decoder of 260K parameters is not at hand")
def test_a_pretrained_model_learns_a_reward(tmp_path):
    """Happy words in stories, by half of the answers that docs/rewards.md gives a population."""
    made = {part: EXAMPLE / f"{name}.jsonl" for part, name in (("data", "train"), ("dev", "dev"), ("test", "test"))}
    run = library.train(STORIES, **made, reward=f"{EXAMPLE / 'score.py'}:happy", method="policy-gradient", steps=4,
                        max_new_tokens=24, progress=False)  # fmt: skip
    before, after = run.summary["before"]["reward"], run.summary["after"]["reward"]
    assert after > 1.8 * before, (before, after)
    run.close()


REFUSED = {
    "no reward": ((), ("method.name is policy-gradient, which learns from answers", "train.objective is loss")),
    "an adapter of PEFT": (("--reward", "score.py:short_words", "--set", "model.peft=lora"), ("model.peft is lora",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_writes_no_answers_is_refused(home, monkeypatch, case):
    more, message = REFUSED[case]
    monkeypatch.chdir(home)
    write_rows(home / "texts.jsonl", completion_rows(12))
    rows = "train.jsonl" if more else "texts.jsonl"
    refused(
        tezo("train", "--model", "llama", "--data", rows, "--method", "policy-gradient", "--output", "run", *more),
        *message,
    )


def test_a_model_whose_last_blocks_cannot_be_computed_anew_is_refused(home, tmp_path):
    model_folder(home, "opt")
    made = replace(config(home), model=replace(config(home).model, name=str(home / "opt")))
    with pytest.raises(library.RequestError, match=r"policy-gradient computes the last blocks .*--method es"):
        train(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_few_tokens_to_compute_blocks_by_are_said(home, tmp_path):
    with pytest.raises(library.RequestError, match=r"the first 1 prompts have too few; raise train\.batch_size"):
        train(config(home, steps=1, batch_size=1, max_new_tokens=1), tmp_path / "run")


def test_a_run_without_a_gain_has_advice_that_the_method_takes(home):
    run = library.train(str(home / "llama"), str(home / "train.jsonl"), dev=str(home / "dev.jsonl"), steps=1, lr=0.0,
                        reward=lambda _, text, __: float(len(text)), method="policy-gradient", max_new_tokens=3,
                        progress=False)  # fmt: skip
    assert "Try more steps than 1, or give partial credit" in run.summary["verdict"]
    assert "rho" not in run.summary["verdict"]
    run.close()


def test_a_closure_that_writes_nothing_is_refused(home):
    job = prepare(config(home), measuring=False)
    with pytest.raises(library.RequestError, match=r"this closure writes none; use tezo\.train"):
        job.optimizer.step(lambda: 0.0)
    first = written(job)
    job.optimizer.refresh(first)
    with pytest.raises(library.RequestError, match="has written no answers for this closure"):
        job.optimizer.step(written(job))
    job.optimizer.close()
