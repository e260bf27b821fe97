"""Populations: the estimate as it is written, missing losses, members side by side, runs of rewards, their logs."""

import copy
import json
import math

import pytest
import torch
from folders import completion_rows, model_folder, refused, write_rows
from folders import tezo as command
from kills import contents
from reports import Page
from short_runs import result, same, stopped
from tiny import tiny_llama, tokens
from torch import Tensor

import tezo
from tezo.forward import beside_weight
from tezo.forward.beside_weight import keeping_points
from tezo.forward.blocks import block_points
from tezo.forward.perturbed_parameter import Shift
from tezo.methods.es import es
from tezo.optim.closures import RowLosses
from tezo.optim.estimators.population import kappas_of
from tezo.runs.reader import read_run
from tezo.runs.text_logs import line_of
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo.training.loop import train
from tezo.training.resume import replay
from tezo.training.settings import parse_config

RHO = 1e-2


def literal(losses: list[list[float]]) -> list[float]:
    """kappa by the formula, member by member, in Python's numbers."""

    def mean(values: list[float]) -> float:
        known = [value for value in values if not math.isnan(value)]
        return sum(known) / len(known) if known else math.nan

    columns = [mean([row[j] for row in losses]) for j in range(len(losses[0]))]
    above = [mean([value - columns[j] for j, value in enumerate(row)]) for row in losses]
    above = [0.0 if math.isnan(value) else value for value in above]
    sigma = math.sqrt(sum(value**2 for value in above) / (len(above) - 1))
    return [RHO * value / sigma for value in above]


def losses_at(optimizer, rows: RowLosses, *distances: float) -> list[list[float]]:
    """The losses of the rows at each distance along each direction of the next step, one member after another."""
    optimizer.refresh()
    draw, found = optimizer.draw(), []
    for i in range(optimizer.num_directions):
        for distance in distances:
            for name, moving in optimizer.parameters.items():
                moving.set_perturbations([Shift(draw.directions[name][i], distance)])
            with torch.no_grad():
                found.append(rows.example_losses(1)[0].tolist())
    for moving in optimizer.parameters.values():
        moving.set_perturbations([])
    return found


@pytest.mark.parametrize("missing", [0, 7])
def test_kappa_is_the_formula_as_it_is_written(missing):
    draw = torch.Generator().manual_seed(missing)
    losses = torch.randn(6, 5, generator=draw, dtype=torch.float64)
    losses.view(-1)[torch.randperm(30, generator=draw)[:missing]] = math.nan
    assert kappas_of(losses, 1e-2) == pytest.approx(literal(losses.tolist()), rel=1e-12)


def test_a_member_without_a_loss_pulls_nowhere_and_a_hard_row_counts_for_nothing():
    losses = torch.tensor([[1.0, 5.0], [2.0, 6.0], [math.nan, math.nan]], dtype=torch.float64)
    first, second, third = kappas_of(losses, 1e-2)
    assert third == 0.0 and first == pytest.approx(-second)
    harder = losses + torch.tensor([0.0, 100.0])
    assert kappas_of(harder, 1e-2) == pytest.approx([first, second, third])


def test_members_that_are_alike_take_no_step():
    assert kappas_of(torch.full((4, 3), 0.7, dtype=torch.float64), 1e-2) == [0.0] * 4


def test_a_step_is_the_sum_of_the_members_by_their_losses():
    model, ids = tiny_llama().double(), tokens(batch=4, seed=2)
    closure = tezo.closure(model, {"input_ids": ids, "labels": ids})
    optimizer = es(model, num_directions=5, rank=2, lr=5.0, rho=1e-2, basis="gaussian")
    change = torch.zeros(())
    for _ in range(2):  # the second has something to decay
        optimizer.refresh()
        draw = optimizer.draw()
        kappas, name = literal(losses_at(optimizer, closure, 1e-2)), next(iter(optimizer.parameters))
        estimate: Tensor = sum(k * dense(z) for k, z in zip(kappas, draw.directions[name], strict=True)) / 5
        change = (1 - 5.0 * 0.02) * change - 5.0 * estimate.double()
        optimizer.step(closure)
        assert optimizer.last_step.projected_grads == pytest.approx(kappas, rel=1e-6)
        ((left, right),) = optimizer.parameters[name].trained()
        torch.testing.assert_close((left @ right.T).double(), change, rtol=1e-4, atol=1e-7)


def test_a_pair_has_half_the_difference_of_its_kappas():
    model, ids = tiny_llama().double(), tokens(batch=4, seed=2)
    closure = tezo.closure(model, {"input_ids": ids, "labels": ids})
    optimizer = es(model, num_directions=3, rank=2, lr=0.1, rho=1e-2, basis="gaussian", antithetic=True)
    losses = losses_at(optimizer, closure, 1e-2, -1e-2)
    kappas = literal(losses)
    optimizer.step(closure)
    expected = [(plus - minus) / 2 for plus, minus in zip(kappas[::2], kappas[1::2], strict=True)]
    assert optimizer.last_step.projected_grads == pytest.approx(expected, rel=1e-6)
    assert optimizer.last_step.forward_passes == 6
    means = [(sum(own) / len(own)) for own in losses]
    found = [loss for probe in optimizer.last_step.probes for loss in (probe.loss_plus, probe.loss_minus)]
    assert found == pytest.approx(means)


class OnAPlateau(RowLosses):
    """The losses of some rows, all of them 0 while the plateau lasts; `measured` has those of each member."""

    examples = tokens = 4

    def __init__(self, rows: RowLosses) -> None:
        self.rows, self.measured, self.lasts = rows, [], True

    def example_passes(self):
        return self.rows.example_passes()

    def losses(self, copies: int) -> Tensor:
        return self.example_losses(copies).mean(1)

    def example_losses(self, copies: int) -> Tensor:
        found = self.rows.example_losses(copies)
        self.measured += found.tolist()
        return torch.zeros_like(found) if self.lasts else found


def test_members_go_farther_after_each_step_in_which_they_were_alike_and_a_state_keeps_that():
    def made(model):
        return es(model, num_directions=3, rank=2, lr=1.0, rho=1e-2, basis="gaussian")

    model, ids = tiny_llama().double(), tokens(batch=4, seed=2)
    rows, optimizer = tezo.closure(model, {"input_ids": ids, "labels": ids}), made(model)
    plateau, records = OnAPlateau(rows), []
    for step, times in enumerate((1, 1.5, 1.5**2, 1.5**3, 1.5**4, 1.5**5, 1.5**5)):
        plateau.lasts, plateau.measured = step < 6, []
        expected = losses_at(optimizer, rows, times * 1e-2)
        optimizer.step(plateau)
        torch.testing.assert_close(torch.tensor(plateau.measured[:3]), torch.tensor(expected), rtol=1e-9, atol=0)
        assert optimizer.last_step.is_idle == plateau.lasts
        records.append(optimizer.last_step)
    longest = 1.5**5 * 1e-2  # kappas have the unit of the distance
    assert optimizer.last_step.projected_grads == pytest.approx(
        [kappa * longest / RHO for kappa in literal(expected)], rel=1e-6
    )

    state, records = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(records)
    kept = {name: value.clone() for name, value in optimizer.resumable_state().items()}
    optimizer.step(rows)
    for restore in (lambda o: o.load_state_dict(state), lambda o: o.load_resumable_state(kept, records)):
        other = made(twin := tiny_llama().double())
        restore(other)
        other.step(tezo.closure(twin, {"input_ids": ids, "labels": ids}))
        assert other.last_step == optimizer.last_step


@pytest.mark.parametrize("antithetic", [False, True])
def test_a_loss_that_is_infinite_is_no_idle_step(antithetic):
    class Overflows(OnAPlateau):
        def example_losses(self, copies: int) -> Tensor:
            found = self.rows.example_losses(copies)
            found[0, 0] = math.inf
            return found

    model, ids = tiny_llama(), tokens(batch=4, seed=2)
    optimizer = es(model, num_directions=3, rank=2, rho=1e-2, basis="gaussian", antithetic=antithetic)
    with pytest.raises(NonFiniteLossError):
        optimizer.step(Overflows(tezo.closure(model, {"input_ids": ids, "labels": ids})))
    assert optimizer.num_steps == optimizer.num_idle_steps == 0


def test_points_that_are_kept_for_a_text_are_those_of_the_perturbations_at_hand(monkeypatch):
    model, ids, drawn = tiny_llama().double(), tokens(batch=6, seed=2), []
    optimizer = es(model, num_directions=3, rank=2, lr=5.0, rho=1e-2, basis="gaussian", weight_decay=0.0)
    optimizer.step(tezo.closure(model, {"input_ids": ids, "labels": ids}))  # a change that points start from
    optimizer.refresh()
    directions = optimizer.draw().directions
    monkeypatch.setattr(beside_weight, "block_points", lambda *given: drawn.append(1) or block_points(*given))

    def outputs(scales: list[float]) -> list[Tensor]:
        for name, moving in optimizer.parameters.items():
            moving.set_perturbations([Shift(directions[name][i], scale) for i, scale in enumerate(scales)])
        with torch.no_grad():
            return [model(input_ids=ids).logits for _ in range(3)]

    shifts = ([0.1, -0.2, 0.3], [0.3, 0.1, 0.2])
    plain, before = [outputs(scales) for scales in shifts], len(drawn)
    with keeping_points():
        kept = [outputs(scales) for scales in shifts]
    assert len(drawn) - before == before / 3 == 2 * len(optimizer.parameters)
    for own, other in zip(kept, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))
    for moving in optimizer.parameters.values():
        moving.set_perturbations([])


def dense(direction) -> Tensor:
    left, right = direction.factors()
    return left @ right.T


def test_a_closure_that_tells_one_loss_is_refused():
    optimizer = es(tiny_llama(), rank=2, basis="gaussian")
    with pytest.raises(RequestError, match="loss of each row"):
        optimizer.step(lambda: torch.tensor(1.0))
    with pytest.raises(RequestError, match="at least 2 members"):
        es(tiny_llama(), num_directions=1)


# --- runs

SCORER = """
def words(prompt, completion, row):
    return sum(len(word) <= 4 for word in completion.split()) / max(1, len(completion.split()))

def parts(prompt, completion, row):
    return {"length": float(len(completion)), "early": -0.5 * completion.count("a")}

def nothing(prompts, completions, **columns):
    return [0.0] * len(completions)

def at_times(prompts, completions, **columns):
    return [None if len(text) % 4 == 0 and len(texts) > 1 else len(text) for texts in [completions] for text in texts]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("population")
    model_folder(folder, "llama")
    write_rows(folder / "train.jsonl", [{"prompt": row["prompt"]} for row in completion_rows(12, seed=1)])
    write_rows(folder / "dev.jsonl", [{"prompt": row["prompt"]} for row in completion_rows(6, seed=2)])
    (folder / "score.py").write_text(SCORER)
    return folder


def config(home, function="words", **more):
    return parse_config(
        {
            "model": {"name": str(home / "llama"), "device": "cpu"},
            "data": {"train": str(home / "train.jsonl"), "dev": str(home / "dev.jsonl")},
            "method": {"name": "es", "num_directions": 4, "rank": 2, "rho": 0.05, "lr": 2.0},
            "train": {"reward": f"{home / 'score.py'}:{function}", "steps": 6, "batch_size": 3, "max_new_tokens": 5,
                      "temperature": 1.0, "eval_every": 2, "checkpoint_every": 2} | more,
        }
    )  # fmt: skip


def test_members_side_by_side_write_what_each_writes_alone(home, tmp_path, monkeypatch):
    together = train(config(home, steps=2), tmp_path / "together")
    monkeypatch.setattr("tezo.tasks.rewards.MOST_WRITING", 1)
    alone = train(config(home, steps=2), tmp_path / "alone")
    assert (tmp_path / "together/scored.jsonl").read_text() == (tmp_path / "alone/scored.jsonl").read_text()
    assert together["after"] == alone["after"]


def test_a_run_that_was_stopped_ends_as_a_whole_one_with_every_answer_once(home, tmp_path):
    train(config(home), tmp_path / "whole")
    stopped(config(home), tmp_path / "stopped", 3)
    with (tmp_path / "stopped/scored.jsonl").open("ab") as file:  # as if killed between this file and the log
        file.write(line_of({"step": 5, "member": 0, "row": "x", "completion": "y", "score": 1.0}) + b'{"step": 5, "mem')
    train(config(home), tmp_path / "stopped", resume=True)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "stopped/scored.jsonl").read_text().splitlines()]
    assert lines == [json.loads(line) for line in (tmp_path / "whole/scored.jsonl").read_text().splitlines()]
    assert [(line["step"], line["member"]) for line in lines[::3]] == [(s, m) for s in range(1, 7) for m in range(4)]
    replay(tmp_path / "whole", tmp_path / "again")
    assert same(result(tmp_path / "again"), result(tmp_path / "whole"))


def test_what_the_untuned_model_wrote_becomes_less_likely_and_is_in_the_verdict(home, tmp_path):
    summary = train(config(home, keep_best=False), tmp_path / "run")
    before, after = summary["own_answers"]
    assert before > 0 and after != before
    assert f"from {before:.3f} to {after:.3f}" in summary["verdict"]


def test_named_parts_are_in_the_metrics_and_the_best_and_worst_answers_in_the_report(home, tmp_path):
    train(config(home, function="parts", steps=3, log_every=3), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/scored.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "parts" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        own = [answer["parts"] for answer in lines if answer["step"] == line["step"]]
        assert line["parts"] == pytest.approx(
            {name: sum(part[name] for part in own) / len(own) for name in ("length", "early")}
        )
    last = sorted((line for line in lines if line["step"] == 3), key=lambda line: line["score"])
    run = read_run(tmp_path / "run")
    assert sorted(own.score for own in run.scored) == [line["score"] for line in last]
    done = command("report", tmp_path / "run", "--output", tmp_path / "run.html")
    assert done.code == 0, done.err
    words = "".join(Page((tmp_path / "run.html").read_text(encoding="utf-8")).words)
    best, worst = words.partition("Best answers of step 3")[2].split("Worst answers of step 3")
    assert f"score {last[-1]['score']:.4g}" in best and f"score {last[0]['score']:.4g}" in worst


@pytest.mark.parametrize("text", ["{}", '{"step": -1, "score": 1}', '{"step": 2, "member": 0, "row": 1, "score": 1}'])
def test_a_report_refuses_answers_that_no_run_writes(home, tmp_path, text):
    train(config(home, steps=2), tmp_path / "run")
    for name in ("manifest.json", "summary.json"):
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run/scored.jsonl").write_text(f"{text}\n")
    refused(command("report", tmp_path / "run", "--output", tmp_path / "run.html"), "scored.jsonl", "damaged")


def test_a_report_refuses_answers_that_were_changed_after_the_run(home, tmp_path):
    train(config(home, steps=2), tmp_path / "run")
    log = tmp_path / "run/scored.jsonl"
    log.write_text(log.read_text().replace('"score": ', '"score": 1', 1))
    refused(command("report", tmp_path / "run", "--output", tmp_path / "run.html"), "scored.jsonl")
    assert not (tmp_path / "run.html").exists()


def test_a_reward_that_all_members_share_is_said(home, tmp_path):
    summary = train(config(home, function="nothing", steps=2), tmp_path / "run")
    assert [notice for notice in summary["notices"] if "all answers to each prompt scored alike" in notice]
    assert summary["before"] == summary["after"]


def test_scores_that_are_missing_are_said_once_and_are_no_zeros(home, tmp_path):
    summary = train(config(home, function="at_times", steps=3), tmp_path / "run")
    assert len([notice for notice in summary["notices"] if "scores are missing" in notice]) == 1
    lines = [json.loads(line) for line in (tmp_path / "run/scored.jsonl").read_text().splitlines()]
    assert any(line["score"] is None for line in lines) and all(line["score"] != 0 for line in lines)
    done = command("eval", tmp_path / "run", "--reward", f"{home / 'score.py'}:at_times")
    assert "scores are missing, and left out of the means: " in done.err, done.err


@pytest.mark.parametrize(("model", "expected"), [("llama", ("policy-gradient", 7)), ("opt", ("es", 30))])
def test_a_reward_has_a_policy_gradient_by_default_and_else_a_population(home, tmp_path, model, expected):
    model_folder(tmp_path, model)
    request = {"model": {"name": str(tmp_path / model)}, "data": {"train": str(home / "train.jsonl")}}
    request["train"] = {"reward": f"{home / 'score.py'}:words", "max_new_tokens": 2}
    from tezo.training.job import prepare

    job = prepare(parse_config(request))
    assert (job.config.method.name, job.config.train.steps, job.config.train.guard) == (*expected, True)
    assert any("method.name is es, because" in notice for notice in job.notices) == (model == "opt")
    job.optimizer.close()
