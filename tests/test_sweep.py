"""A sweep over rows of free text: its steps are those of Adam on the gradient of what a pass shows."""

import math
from contextlib import ExitStack

import pytest
import torch
from folders import completion_rows, model_folder, write_rows

from tezo.directions.bases.basis import input_size
from tezo.directions.random import normal
from tezo.directions.targets import ALL_LINEAR, select_targets
from tezo.newton import sweep as sweeping
from tezo.newton.last_blocks import NotRebuiltError, last_blocks
from tezo.newton.sweep import Sweep, beside, blocks_to_sweep, sweep
from tezo.training.job import prepare
from tezo.training.settings import parse_config

RANK, STEP, U_RATE, V_RATE = 3, 1, 1.0, 0.8


@pytest.fixture
def job(tmp_path):
    model_folder(tmp_path, "llama")
    write_rows(tmp_path / "texts.jsonl", completion_rows(120, seed=3))
    job = prepare(parse_config({
        "model": {"name": str(tmp_path / "llama"), "device": "cpu"},
        "data": {"train": str(tmp_path / "texts.jsonl"), "num_dev": 8},
        "method": {"name": "gauss-newton"}, "train": {"steps": 1, "batch_size": 8},
    }), measuring=False)  # fmt: skip
    yield job
    job.optimizer.close()


def parts(job):
    """(the blocks, the last layer, rows of each batch)."""
    targets = select_targets(job.model, (ALL_LINEAR,))
    batches = [job.objective.closure(job.model, job.batches(range(i * 30, i * 30 + 30))) for i in range(3)]
    return last_blocks(targets, 16), targets[-1], batches


def writers(blocks):
    return [target for block in blocks for target in (block.attention, block.mlp)]


@torch.no_grad()
def test_a_trial_change_is_the_models_and_is_gone_when_it_ends(job):
    blocks, _, (rows, *_) = parts(job)
    torch.manual_seed(0)
    factors = {t.name: (0.3 * torch.randn(16, 3), torch.randn(input_size(t), 3)) for t in writers(blocks)}
    before = rows.outputs()
    with beside(job.model, factors):
        inside = rows.outputs(before)
        with beside(job.model, factors):
            twice = rows.outputs(before)
    assert torch.equal(rows.outputs(before).scores_TC, before.scores_TC)
    for target in writers(blocks):
        (name,) = [n for n, own in job.model.named_parameters() if own is target.parameter]
        target.parameter.add_(factors[name][0] @ factors[name][1].T)
    assert torch.allclose(rows.outputs(before).scores_TC, inside.scores_TC, atol=1e-4)
    assert not torch.allclose(inside.scores_TC, twice.scores_TC, atol=1e-2)


def literal(model, blocks, batches, size, weights=(None, None, None)):
    """Adam by autograd on the model itself, each batch's gradient with the outputs of attention cut from the graph.

    `weights`: of the losses of the examples of each batch.
    """
    factors = {}
    for target in writers(blocks):
        width = input_size(target)
        v_IR = normal((width, RANK), seed=0, step=STEP, name=target.name, role="v").float() / math.sqrt(width)
        factors[target] = torch.zeros(16, RANK, requires_grad=True), v_IR.requires_grad_()
    pairs = [*factors.values()]
    rates = [rate for _, v_IR in pairs for rate in (U_RATE * size / (len(pairs) * 4), V_RATE / math.sqrt(len(v_IR)))]
    every = [factor for pair in pairs for factor in pair]
    adam, losses = torch.optim.Adam([{"params": [factor]} for factor in every]), []

    def hook(target, cut):
        def changed(_, args, out):
            u_DR, v_IR = factors[target]
            x = args[0].detach() if cut else args[0]
            return (out.detach() if cut else out) + (x @ v_IR) @ u_DR.T

        return changed

    for s, rows in enumerate(batches):
        with ExitStack() as hooks, torch.enable_grad():
            for block in blocks:
                for target, cut in ((block.attention, True), (block.mlp, False)):
                    hooks.enter_context(target.sites[0].module.register_forward_hook(hook(target, cut)))
            of_rows = torch.as_tensor(rows()) if weights[s] is None else weights[s] * rows.example_losses(1)[0]
            loss = of_rows.mean()
        for factor, gradient in zip(every, torch.autograd.grad(loss, every), strict=True):
            factor.grad = gradient
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - s / len(batches)) / (1 + STEP)
        adam.step()
        losses.append(float(loss.detach()))
    return {target.name: pair for target, pair in factors.items()}, losses


@torch.no_grad()
def test_a_sweep_is_adam_on_the_gradient_with_attention_held(job, monkeypatch):
    """Three batches against autograd on the model, where the outputs of attention are cut from the graph."""
    for name, value in (("BATCHES", 3), ("U_RATE", U_RATE), ("V_RATE", V_RATE)):
        monkeypatch.setattr(sweeping, name, value)
    blocks, last, batches = parts(job)
    sizes = []
    real = sweeping.LastBlocks

    class Told(real):
        def __init__(self, *own):
            super().__init__(*own)
            sizes.append(self.size)

    monkeypatch.setattr(sweeping, "LastBlocks", Told)
    ranks = {target.name: RANK for target in writers(blocks)}
    found, calls = sweep(job.model, last, blocks, batches.__getitem__, ranks, STEP)
    assert calls == sum(len(rows.places()) for rows in batches)
    streams = []
    with job.model.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0])):
        batches[0]()
    assert sizes == [pytest.approx(float(streams[0].square().mean().sqrt()), rel=0.2)]  # there of all places
    expected, losses = literal(job.model, blocks, batches, sizes[0])
    for name, pair in expected.items():
        for own, other in zip(found[name], pair, strict=True):
            # Adam enlarges what little the epsilon of norms changes; with attention in the graph it is 1.0 at layer 0
            assert float(torch.linalg.vector_norm(own - other) / torch.linalg.vector_norm(other)) < 0.35, name
    assert abs(losses[2] - batches[2].outputs().loss()) > 0.05  # what was learnt was beside the layers
    before = sum(rows.outputs().loss() for rows in batches)
    with beside(job.model, found):
        assert sum(rows.outputs().loss() for rows in batches) < before - 0.1


@torch.no_grad()
def test_weighted_examples_are_weighted_in_the_gradient(job, monkeypatch):
    """The same with weights of both signs, by which answers that earn less become less likely."""
    for name, value in (("U_RATE", U_RATE), ("V_RATE", V_RATE)):
        monkeypatch.setattr(sweeping, name, value)
    blocks, last, batches = parts(job)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(30, generator=generator) for _ in batches]
    ranks = {target.name: RANK for target in writers(blocks)}
    learner = Sweep(job.model, last, blocks, ranks, STEP, lambda batch: (1 - batch / 3) / (1 + STEP))
    for rows, weight_E in zip(batches, weights, strict=True):
        learner.learn(rows, weight_E)
    streams = []
    with job.model.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0])):
        batches[0]()
    size = float(streams[0].square().mean().sqrt())
    (expected, _), (plain, _) = (literal(job.model, blocks, batches, size, w) for w in (weights, [None] * 3))
    for name, pair in expected.items():
        own, other, unweighted = learner.found[name][0], pair[0].double(), plain[name][0].double()
        assert torch.cosine_similarity(own.flatten(), other.flatten(), dim=0) > 0.9, name
        assert torch.cosine_similarity(own.flatten(), unweighted.flatten(), dim=0) < 0.6, name


@torch.no_grad()
def test_a_gradient_in_parts_is_that_of_all_places(job, monkeypatch):
    blocks, last, (rows, *_) = parts(job)
    weight_E, found = torch.randn(30, generator=torch.Generator().manual_seed(0)), []
    for at_once in (10**6, 7):
        monkeypatch.setattr(sweeping, "PLACES_AT_ONCE", at_once)
        learner = Sweep(job.model, last, blocks, {target.name: RANK for target in writers(blocks)}, STEP, lambda _: 1.0)
        learner.learn(rows, weight_E)
        found.append([factor.grad for factor in learner._every])
    assert len(rows.outputs().labels_T) % 7
    for whole, of_parts in zip(*found, strict=True):
        assert torch.allclose(whole, of_parts, atol=1e-6 + 1e-4 * float(whole.abs().max()))
    assert any(whole.any() for whole in found[0])


@torch.no_grad()
def test_a_pass_that_does_not_follow_from_the_blocks_ends_the_sweep(job):
    """Such as one of a model that was changed between two batches."""
    blocks, last, (first, second, third) = parts(job)
    learner = Sweep(job.model, last, blocks, {target.name: RANK for target in writers(blocks)}, STEP, lambda _: 1.0)
    learner.learn(first)
    learner.learn(second)
    job.model.model.norm.weight.mul_(-1)
    with pytest.raises(NotRebuiltError, match="differs"):
        learner.learn(third)


def test_blocks_take_no_more_than_their_bytes(job):
    _, last, (rows, *_) = parts(job)
    targets = select_targets(job.model, (ALL_LINEAR,))
    every = last_blocks(targets, 16)
    assert blocks_to_sweep(targets, last, rows, 1 << 40) == every[-math.ceil(sweeping.LEARNING_SHARE * len(every)) :]
    assert blocks_to_sweep(targets, last, rows, 100) == []
    assert blocks_to_sweep([t for t in targets if "mlp" in t.name], last, rows, 1 << 40) == []
