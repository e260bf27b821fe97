"""The outputs of rows: their mean loss, their places, tokens, a fitted bias."""

import math

import pytest
import torch
from folders import completion_rows, label_rows, model_folder, write_rows
from label_scores import noise
from tiny import tiny_llama, tokens
from torch.nn import functional

import tezo
from tezo.directions.outputs import Outputs, errors, fitted_bias, joined, of_tokens
from tezo.optim.closures import RowOutputs
from tezo.training.job import prepare
from tezo.training.settings import parse_config


def objective_closures(tmp_path) -> dict[str, RowOutputs]:
    """A closure of a run for each kind of objective, and tensors with labels."""
    found: dict[str, RowOutputs] = {}
    write_rows(tmp_path / "labels.jsonl", label_rows(12))
    write_rows(tmp_path / "texts.jsonl", completion_rows(12))
    for name, family, file in (("options", "opt", "labels"), ("text", "opt", "texts"), ("masked", "roberta", "labels"),
                               ("encoder", "bert", "labels")):  # fmt: skip
        model_folder(tmp_path / name, family)
        config = parse_config({"model": {"name": str(tmp_path / name / family)},
                               "data": {"train": str(tmp_path / f"{file}.jsonl"), "hold_out": 0.25},
                               "method": {"name": "tezo", "rank": 2},
                               "train": {"steps": 1, "batch_size": 8}})  # fmt: skip
        job = prepare(config)
        job.optimizer.close()
        found[name] = job.objective.closure(job.model, job.batches(range(8)))
    model, ids = tiny_llama(torch.float32), tokens(batch=3, length=9)
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 4:6] = -100
    found["tensors"] = tezo.closure(model, {"input_ids": ids, "labels": labels})
    return found


@pytest.fixture(scope="module")
def closures(tmp_path_factory):
    return objective_closures(tmp_path_factory.mktemp("closures"))


KINDS = ("options", "text", "masked", "encoder", "tensors")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_mean_loss_of_the_outputs_is_the_objective(closures, kind):
    own = closures[kind].outputs()
    assert own.loss() == pytest.approx(float(closures[kind]()), rel=2e-6)
    again = closures[kind].outputs(own)
    assert torch.equal(again.scores_TC, own.scores_TC) and len(own.example_T.unique()) == closures[kind].examples


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_place_of_the_outputs_is_found_once_in_the_passes(closures, kind):
    places = closures[kind].places()
    calls = []
    handle = closures[kind].model.register_forward_pre_hook(
        lambda _, __, kwargs: calls.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    own = closures[kind].outputs()
    handle.remove()
    assert [None if p is None else len(p.example_R) for p in places] == [
        None if p is None else calls[i] for i, p in enumerate(places)
    ]
    assert len(places) == len(calls)
    numbers = torch.cat([p.place_P for p in places if p is not None])
    assert sorted(numbers.tolist()) == list(range(len(own.labels_T)))


def test_scores_of_tokens_keep_the_right_one_and_sum_to_one():
    log_probs = noise(5, 30, seed=0).log_softmax(1)
    right = torch.tensor([0, 3, 29, 7, 7])
    scores, named = of_tokens(log_probs, right, None)
    assert torch.equal(named[:, 0], right) and bool((named[:, -1] == -1).all())
    assert all(len(set(row)) == len(row) for row in named.tolist())
    assert torch.allclose(scores.exp().sum(1), torch.ones(5, dtype=torch.float64))
    assert torch.equal(functional.cross_entropy(scores, torch.zeros(5, dtype=torch.long), reduction="none").argsort(),
                       (-log_probs.gather(1, right[:, None])[:, 0]).argsort())  # fmt: skip
    likely = log_probs.scatter(1, right[:, None], -math.inf).topk(8).indices
    assert torch.equal(named[:, 1:-1], likely)


def test_a_fitted_bias_gives_each_class_its_frequency():
    labels = torch.tensor([0] * 20 + [1] * 7 + [2] * 3)
    own = Outputs(noise(30, 3, seed=1) * 2 + torch.tensor([0.0, 3.0, -2.0]), labels, torch.arange(30), shared=True)
    said = (own.scores_TC + fitted_bias(own)).softmax(1).mean(0)
    assert torch.allclose(said, torch.tensor([20, 7, 3]).double() / 30, atol=1e-7)
    assert torch.allclose(errors(own).mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-7)
    assert not bool(fitted_bias(Outputs(own.scores_TC, labels, own.example_T)).any()), "classes of their own have none"


def test_outputs_are_joined_in_order():
    first = Outputs(noise(2, 3, seed=0), torch.tensor([0, 1]), torch.tensor([5, 6]), shared=True)
    second = Outputs(noise(1, 2, seed=1), torch.tensor([1]), torch.tensor([2]), shared=True)
    both = joined([first, second])
    assert both.scores_TC.shape == (3, 3) and both.scores_TC[2, 2] == -math.inf
    assert both.example_T.tolist() == [5, 6, 2] and both.shared
