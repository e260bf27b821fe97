"""A sweep over rows of free text: its steps are those of Adam on the gradient of what a pass shows."""

import pytest
import torch
from folders import completion_rows, model_folder, write_rows

from tezo.directions.targets import ALL_LINEAR, select_targets
from tezo.newton import last_blocks as rebuilding
from tezo.newton import sweep as sweeping
from tezo.newton.last_blocks import last_blocks, name_of
from tezo.newton.sweep import beside, sweep
from tezo.newton.text import readout
from tezo.training.job import prepare
from tezo.training.settings import parse_config


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
    """(the blocks, the last layer, their ranks, rows of each batch)."""
    targets = select_targets(job.model, (ALL_LINEAR,))
    blocks = last_blocks(targets, 16)[1:]
    writers = [target for block in blocks for target in (block.attention, block.mlp)]
    batches = [job.objective.closure(job.model, job.batches(range(i * 30, i * 30 + 30))) for i in range(3)]
    return blocks, targets[-1], {target.name: 3 for target in writers}, batches


@torch.no_grad()
def test_a_trial_change_is_the_models_and_is_gone_when_it_ends(job):
    blocks, _, ranks, (rows, *_) = parts(job)
    torch.manual_seed(0)
    factors = {name: (0.3 * torch.randn(16, 3), torch.randn(24 if "mlp" in name else 16, 3)) for name in ranks}
    before = rows.outputs()
    with beside(job.model, factors):
        inside = rows.outputs(before)
        with beside(job.model, factors):
            twice = rows.outputs(before)
    assert torch.equal(rows.outputs(before).scores_TC, before.scores_TC)
    for parameter in [block.attention.parameter for block in blocks] + [block.mlp.parameter for block in blocks]:
        (name,) = [n for n, own in job.model.named_parameters() if own is parameter]
        parameter.add_(factors[name][0] @ factors[name][1].T)
    assert torch.allclose(rows.outputs(before).scores_TC, inside.scores_TC, atol=1e-4)
    assert not torch.allclose(inside.scores_TC, twice.scores_TC, atol=1e-2)


@torch.no_grad()
def test_a_sweep_is_adam_on_the_gradient_with_attention_held(job, monkeypatch):
    """Three batches against a literal loop that has each batch's own weights written into the model."""
    monkeypatch.setattr(rebuilding, "WEIGHTS", torch.float32)
    monkeypatch.setattr(sweeping, "WEIGHTS", torch.float32)
    monkeypatch.setattr(sweeping, "BATCHES", 3)
    monkeypatch.setattr(sweeping, "RATE", 0.1)
    blocks, last, ranks, batches = parts(job)
    losses, real = [], []

    def told(model, target, seen):
        text = readout(model, target, seen)
        real.append(seen[0].outputs.loss())
        monkeypatch.setattr(text, "loss", lambda *own, loss=text.loss: losses.append(loss(*own)) or losses[-1])
        return text

    monkeypatch.setattr(sweeping, "readout", told)
    found, calls = sweep(job.model, last, blocks, batches.__getitem__, ranks)
    assert calls == sum(len(rows.places()) for rows in batches) and len(losses) == 3
    assert float(losses[0]) == pytest.approx(batches[0].outputs().loss(), abs=1e-3)
    assert [float(loss) for loss in losses] == pytest.approx(real, abs=1e-3)
    assert abs(real[2] - batches[2].outputs().loss()) > 0.05
    # the change so far is part of what the next batch shows
    with beside(job.model, found):
        after = [rows.outputs().loss() for rows in batches]
    assert sum(after) < sum(rows.outputs().loss() for rows in batches)

    # the first step of Adam has the size of its rate, in the direction of minus the sign of the gradient
    monkeypatch.setattr(sweeping, "BATCHES", 1)
    one, _ = sweep(job.model, last, blocks, batches.__getitem__, ranks)
    block = blocks[-1]
    u_DR, v_IR = one[name_of(block.mlp) + ".weight"]
    sizes = u_DR.abs()
    assert float(sizes.max() / sizes.min()) == pytest.approx(1, abs=0.05)  # all entries of U moved by one rate
    with torch.enable_grad():
        weight = block.mlp.parameter.requires_grad_()
        gradient_DI = torch.autograd.grad(torch.as_tensor(batches[0]()), weight)[0]
    assert float(((gradient_DI @ v_IR.float()) * u_DR.float()).sum()) < 0
    agree = ((gradient_DI @ v_IR.float()).sign() == -u_DR.float().sign()).float().mean()
    assert float(agree) > 0.97  # nothing but the last norm and the head is behind it
