"""Losses of several copies in one pass are those of one pass each."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from folders import tiny_model, tokenizer_for
from questions import OPTIONS, free_text, labelled, masked_examples
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tezo.models.loading import LoadedModel
from tezo.tasks.objectives import objective_for

CASES = [
    *((family, shape) for family in ("opt", "llama", "gpt2", "gemma2") for shape in ("plain", "packed", "text")),
    ("roberta", "plain"),
    ("bert", "plain"),
]


def objective_case(family: str, shape: str):
    """(model, objective, parts of a batch): float64, so that blocks of rows add no rounding of note."""
    tokenizer = tokenizer_for(family)
    model = tiny_model(family, len(tokenizer)).double()
    examples = masked_examples() if family == "roberta" else free_text(7) if shape == "text" else labelled()
    kind = {"roberta": "masked", "bert": "encoder"}.get(family, "causal")
    objective = objective_for(LoadedModel(model, tokenizer, kind), examples[0].options)
    encoded = [objective.encode(example) for example in examples]
    if shape == "packed":
        objective.adapt(model, encoded)
    assert bool(objective.packs) == (shape == "packed")
    return model, objective, [objective.collate(part) for part in (encoded[:3], encoded[3:4], encoded[4:])]


@contextlib.contextmanager
def shifted(model: nn.Module, constants: Sequence[float]) -> Iterator[None]:
    """Every linear layer's and embedding's output, block by block of its rows, has a vector times a constant added."""
    draw, handles = torch.Generator().manual_seed(5), []

    def add(direction: Tensor):
        def hook(module, args, output):
            del module, args
            blocks = output.unflatten(0, (len(constants), -1))
            scales = torch.tensor(constants, dtype=output.dtype).reshape(-1, *[1] * (blocks.ndim - 1))
            return (blocks + scales * direction).flatten(0, 1)

        return hook

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
            width = module.nf if isinstance(module, Conv1D) else module.weight.shape[isinstance(module, nn.Embedding)]
            handles.append(module.register_forward_hook(add(torch.randn(width, generator=draw).double())))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(("family", "shape"), CASES)
@torch.no_grad()
def test_each_copy_has_the_loss_of_a_pass_of_its_own(family, shape):
    model, objective, parts = objective_case(family, shape)
    constants = (0.3, -0.2, 0.0)
    alone = []
    for constant in constants:
        with shifted(model, [constant]):
            alone.append(objective.closure(model, parts)())
    with shifted(model, constants):
        together = objective.closure(model, parts).losses(3)
    assert together.shape == (3,)
    assert len({round(float(loss), 4) for loss in alone}) == 3, "the constants change nothing"
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("family", "shape"), CASES)
@torch.no_grad()
def test_copies_of_one_model_have_its_loss(family, shape):
    model, objective, parts = objective_case(family, shape)
    loss = objective.closure(model, parts)()
    assert loss.shape == ()
    torch.testing.assert_close(objective.closure(model, parts).losses(3), loss.expand(3), rtol=1e-9, atol=0)
    assert not any(module._forward_pre_hooks for module in model.modules()), "something stays behind on the model"


@pytest.mark.parametrize(("family", "shape"), CASES)
@torch.no_grad()
def test_a_closure_is_the_loss_and_knows_its_widest_pass(family, shape):
    model, objective, parts = objective_case(family, shape)
    closure = objective.closure(model, parts)
    assert torch.equal(closure(), objective.closure(model, parts)())
    assert torch.equal(closure.losses(2), objective.closure(model, parts).losses(2))
    seen = []
    model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"].numel()), with_kwargs=True)
    closure()
    assert closure.tokens == max(seen)
    seen.clear()
    closure.losses(3)
    assert 3 * closure.tokens == max(seen)
    seen.clear()
    narrow = objective.closure(model, parts[1:2])  # one row: for an encoder, the descriptions are more
    narrow()
    assert narrow.tokens == max(seen)


@torch.no_grad()
def test_what_the_losses_are_of_is_what_is_scored():
    model, objective, parts = objective_case("bert", "plain")
    scores = objective.evaluator.option_scores(model, parts[0], 2)
    assert scores.shape == (2, 3, len(OPTIONS))
    torch.testing.assert_close(scores[:1], objective.evaluator.option_scores(model, parts[0]), rtol=1e-9, atol=0)
