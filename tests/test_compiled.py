"""A model that torch.compile has compiled steps as it does uncompiled: nothing of a direction is compiled with it."""

import pytest
import torch
from cases import CASES
from tiny import lm_loss, tiny_llama, tiny_opt, tokens
from torch import nn

MANY = 10
"""Steps: of a function that changed at each, torch.compile makes no more than eight versions."""


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


WITH_NORMS = pytest.param(CASES["tezo"], tiny_llama, id="tezo-llama")


@pytest.mark.parametrize(
    ("case", "build"),
    [
        *(pytest.param(case, tiny_opt, id=name, marks=pytest.mark.slow) for name, case in CASES.items()),
        WITH_NORMS,
    ],
)
def test_steps_of_a_compiled_model_are_those_of_the_model_and_it_is_compiled_once(case, build):
    losses = {}
    for way in (compiled, lambda model: model):
        optimizer = case.build(build(), targets=["all"], lr=1e-3)
        called = way(optimizer.model)
        losses[way] = [optimizer.step(lm_loss(called, tokens(seed=step))) for step in range(3)]
        made = graphs()
        losses[way] += [optimizer.step(lm_loss(called, tokens(seed=step))) for step in range(3, MANY)]
        assert graphs() == made > 0
    assert len(set(map(tuple, losses.values()))) == 1


@pytest.mark.slow
def test_a_compiled_model_is_looked_at_for_a_basis_and_looked_at_anew():
    losses = {}
    for way in (compiled, lambda model: model):
        optimizer = CASES["head-feedback"].build(tiny_opt(), basis="activation", lazy_update_interval=3)
        called = way(optimizer.model)
        optimizer.set_passes(lambda _, called=called: called(tokens(seed=100)))
        losses[way] = [optimizer.step(lm_loss(called, tokens(seed=step))) for step in range(3)]
        made = graphs()
        losses[way] += [optimizer.step(lm_loss(called, tokens(seed=step))) for step in range(3, MANY)]
        assert graphs() == made > 0
    assert len(set(map(tuple, losses.values()))) == 1
