"""The vectors that raise each class at the last blocks: gradients of the model, attention held, and their effect."""

from contextlib import ExitStack

import pytest
import torch
from folders import label_rows, model_folder, write_rows
from label_scores import noise

from tezo.directions.outputs import Places
from tezo.directions.targets import ALL_LINEAR, select_targets
from tezo.forward.watching import PassPlaces
from tezo.newton import class_vectors
from tezo.newton.class_vectors import computed_vectors
from tezo.newton.look import may_change
from tezo.newton.recording import AddedVectors, raising
from tezo.training.job import prepare
from tezo.training.settings import parse_config


def job_of(folder, family: str):
    model_folder(folder, family)
    write_rows(folder / "rows.jsonl", label_rows(60))
    return prepare(parse_config({
        "model": {"name": str(folder / family), "device": "cpu"},
        "data": {"train": str(folder / "rows.jsonl"), "num_dev": 8},
        "method": {"name": "gauss-newton"}, "train": {"steps": 1, "batch_size": 8},
    }), measuring=False)  # fmt: skip


def rows_of(job, count: int):
    return job.objective.closure(job.model, job.batches(range(count)))


def real_gradients(job, count: int, names: set[str]):
    """By autograd through the model, with what attention reads held: name -> (D, C), the mean over the rows."""
    model, outs, found = job.model, {}, []
    batch = job.batches(range(count))
    closure = job.objective.closure(model, batch)
    modules = {name: model.get_submodule(name.removesuffix(".weight")) for name in names}
    with ExitStack() as hooks, torch.enable_grad():
        for name, module in modules.items():
            if name.endswith("o_proj.weight"):
                hooks.enter_context(module.register_forward_pre_hook(lambda _, args: (args[0].detach(),)))
            hooks.enter_context(module.register_forward_hook(
                lambda _, __, out, name=name: outs.setdefault(name, []).append(out.requires_grad_()) or out
            ))  # fmt: skip
        scores_TC = closure.outputs().scores_TC
        scores_TC = scores_TC - scores_TC.mean(1, keepdim=True)
        for of_class_T in scores_TC.T:
            every = [out for name in names for out in outs[name]]
            found.append(torch.autograd.grad(of_class_T.sum() / len(scores_TC), every, retain_graph=True))
    gradients, start = {}, 0
    for name in names:
        passes = len(outs[name])
        by_class = [sum(g.sum((0, 1)) for g in one[start : start + passes]) for one in found]
        gradients[name], start = torch.stack(by_class, 1).double(), start + passes
    return gradients


@torch.no_grad()
def test_vectors_are_of_the_gradient_of_the_scores_with_attention_held(tmp_path, monkeypatch):
    monkeypatch.setattr("tezo.newton.recording.KEPT_EFFECT", -1e9)  # each layer, wherever it acts
    job = job_of(tmp_path, "llama")
    layers = may_change(select_targets(job.model, (ALL_LINEAR,)))
    found = computed_vectors(job.model, rows_of(job, 16), layers, 0)
    assert found.vectors is not None and {"o_proj.weight", "down_proj.weight"} == {
        ".".join(name.split(".")[-2:]) for name in found.vectors.layers
    }
    real = real_gradients(job, 16, {*found.vectors.layers})
    for name, vectors_1MC in found.vectors.vectors.items():
        assert vectors_1MC.shape == (1, 16, 2)
        assert torch.allclose(
            vectors_1MC[0], raising(real[name]), rtol=1e-3, atol=1e-4 * float(vectors_1MC.abs().max())
        )
    job.optimizer.close()


def test_a_vector_raises_its_class_by_one_to_first_order():
    gradient_MC = noise(7, 3, seed=1)
    gradient_MC -= gradient_MC.mean(1, keepdim=True)
    raised = (gradient_MC * raising(gradient_MC)).sum(0)  # less the mean over three classes, of which it raises one
    assert torch.allclose(raised, torch.full((3,), 2 / 3, dtype=torch.float64))
    assert torch.allclose(raising(raising(gradient_MC)), gradient_MC)


@torch.no_grad()
def test_a_look_takes_few_passes_where_blocks_are_rebuilt(tmp_path):
    job = job_of(tmp_path, "llama")
    rows = rows_of(job, 16)
    found = computed_vectors(job.model, rows, may_change(select_targets(job.model, (ALL_LINEAR,))), 0)
    assert found.vectors is not None and found.passes == len(rows.places()) * (1 + 128 // 16)
    job.optimizer.close()


@torch.no_grad()
@pytest.mark.parametrize("case", ["opt", "no token of its own", "it acts otherwise"])
def test_no_vectors_are_computed_where(tmp_path, case, monkeypatch):
    job = job_of(tmp_path, "opt" if case == "opt" else "llama")  # OPT's norms are not by the root mean square
    layers, rows = may_change(select_targets(job.model, (ALL_LINEAR,))), rows_of(job, 16)
    if case == "no token of its own":
        monkeypatch.setattr(type(rows), "deciding_tokens", lambda _: torch.tensor([5, 5]))
    if case == "it acts otherwise":
        monkeypatch.setattr(class_vectors, "raising", lambda gradient_MC: -raising(gradient_MC))
    calls: list[None] = []
    job.model.register_forward_pre_hook(lambda *_: calls.append(None))
    found = computed_vectors(job.model, rows, layers, 0)
    assert found.vectors is None and found.passes == len(calls)
    assert bool(calls) == (case != "no token of its own")
    job.optimizer.close()


@torch.no_grad()
def test_the_tokens_of_classes_are_the_first_in_which_options_differ(tmp_path):
    job = job_of(tmp_path, "llama")
    tokens = rows_of(job, 8).deciding_tokens()
    assert [job.loaded.tokenizer.decode([token]).strip() for token in tokens.tolist()] == ["bad", "good"]
    job.optimizer.close()


def test_trailing_tokens_end_at_the_place_and_leave_out_a_rows_first():
    places = Places(torch.tensor([0, 2]), torch.tensor([5, 1]), torch.tensor([6, 2]), torch.tensor([7, 8]),
                    torch.tensor([0, 0, 1]))  # fmt: skip
    passes = PassPlaces([places], trail=3)
    passes.enter()
    assert passes.now.row_P.tolist() == [0, 0, 0, 2] and passes.now.position_P.tolist() == [3, 4, 5, 1]
    assert passes.now.place_P.tolist() == [7, 7, 7, 8] and passes.now.stop_P.tolist() == [6, 6, 6, 2]
    alone = PassPlaces([places])
    alone.enter()
    assert alone.now.position_P.tolist() == [5, 1]


@torch.no_grad()
def test_each_layer_is_tried_however_few_rows_there_are(tmp_path, monkeypatch):
    job = job_of(tmp_path, "llama")
    rows, layers = rows_of(job, 1), may_change(select_targets(job.model, (ALL_LINEAR,)))
    added, seen = AddedVectors(job.model, rows, rows.outputs(), 0), []
    real = added._raised
    monkeypatch.setattr(added, "_raised", lambda targets, by, tokens: seen.append(by) or real(targets, by, tokens))
    added.acting(layers, {layer.name: torch.ones(16, 2, dtype=torch.float64) for layer in layers})
    assert all(sum(bool(by[layer.name].any()) for by in seen) >= 128 // len(layers) for layer in layers)
    job.optimizer.close()
