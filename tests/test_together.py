"""Layers are drawn, perturbed and stepped together: to the bit what they are one at a time, for few operations."""

import copy

import pytest
import torch
from tezo_studies.bench.launches import Operations
from tiny import lm_loss, tiny_llama, tokens

import tezo
from tezo.directions.side_by_side import joined, split_like
from tezo.forward import Shift
from tezo.forward.together import Perturber
from tezo.methods import METHODS

STEPS = 7
EACH = {"directions": "per-example"}
# Ranks of no round number: ends of vectors, which a processor computes by other instructions, lie in all places.
CASES = {
    "tezo": ("tezo", {"rank": 5}),
    "tezo, several directions": ("tezo", {"rank": 5, "num_directions": 3}),
    "tezo, of examples": ("tezo", {"rank": 5, **EACH}),
    "tezo, decayed": ("tezo", {"rank": 7, "weight_decay": 0.1, "lr": 1e-2}),
    "tezo-m, refreshed": ("tezo-m", {"rank": 3, "lazy_update_interval": 3}),
    "tezo-cadam": ("tezo-cadam", {"rank": 5}),
    "tezo-cadam, refreshed": ("tezo-cadam", {"rank": 3, "lazy_update_interval": 3, "frozen_rank": 8}),
    "tezo-cadam, with vectors": ("tezo-cadam", {"rank": 5, "targets": ("all",)}),
    "tezo-adam": ("tezo-adam", {"rank": 5}),
    "subzo": ("subzo", {"rank": 3, "lazy_update_interval": 3}),
    "head-feedback": ("head-feedback", {"rank": 3, "basis": "gaussian"}),
}
of_all = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def perturb_apart(self, drawn, points, examples=range(1)):
    for name, parameter in self._parameters.items():
        parameter.set_perturbations([Shift(drawn[name][index], scale, examples) for index, scale in points])


def step_apart(update, stepped, lr):
    for parameter, estimate, state in stepped:
        update.step(parameter, estimate, state, lr)


@pytest.fixture
def apart(monkeypatch):
    def begin():
        monkeypatch.setattr(Perturber, "perturb", perturb_apart)
        monkeypatch.setattr("tezo.optim.optimizer.step_all", step_apart)

    return begin


def started(case, dtype=torch.float32):
    name, options = case
    model, ids = tiny_llama(dtype), tokens(4, 8)
    closure = tezo.closure(model, {"input_ids": ids, "labels": ids})
    return METHODS[name].build(model, seed=3, **({"lr": 1e-2} | options)), closure


def tensors(optimizer):
    return {name: value.clone() for name, value in optimizer.resumable_state().items()}


@of_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_layers_one_at_a_time(case, dtype, apart):
    found = []
    for separately in (False, True):
        if separately:
            apart()
        optimizer, closure = started(case, dtype)
        found.append(([optimizer.step(closure) for _ in range(STEPS)], tensors(optimizer)))
        optimizer.close()
    (losses, state), (others, expected) = found
    assert losses == others and len(set(losses)) == STEPS
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize("case", [CASES["tezo"], CASES["tezo-cadam, refreshed"]], ids=["tezo", "refreshed"])
def test_a_state_that_was_copied_goes_on_to_the_bit(case):
    optimizer, closure = started(case)
    for _ in range(4):
        optimizer.step(closure)
    kept = copy.deepcopy(optimizer.state_dict())
    expected = [optimizer.step(closure) for _ in range(3)], tensors(optimizer)
    optimizer.load_state_dict(kept)
    assert [optimizer.step(closure) for _ in range(3)] == expected[0]
    assert all(torch.equal(value, expected[1][name]) for name, value in tensors(optimizer).items())


def test_a_layer_costs_a_step_three_operations_beside_its_pass():
    operations = {}
    for targets in (["*layers.0.*_proj.*"], ["*_proj.*"]):
        optimizer, closure = started(("tezo-cadam", {"rank": 4, "targets": targets}))
        for _ in range(2):
            optimizer.step(closure)
        with Operations() as counted:
            optimizer.step(closure)
        operations[len(optimizer.parameters)] = counted.calls.total()
        optimizer.close()
    (few, least), (many, most) = sorted(operations.items())
    assert most - least == 3 * (many - few)


def test_numbers_are_moved_once_for_all_layers():
    optimizer, closure = started(CASES["tezo"])
    optimizer.step(closure)
    with Operations() as counted:
        optimizer.step(closure)
    assert counted.calls["_to_copy"] < len(optimizer.parameters)
    coefficients = [parameter.coefficient for parameter in optimizer.parameters.values()]
    assert len({own.untyped_storage().data_ptr() for own in coefficients}) == 1


def test_parts_that_lie_side_by_side_are_joined_without_a_copy_and_others_by_one():
    whole = torch.arange(12.0)
    parts = split_like(whole, [torch.empty(2), torch.empty(2, 3), torch.empty(4)])
    assert [part.shape for part in parts] == [(2,), (2, 3), (4,)]
    assert joined(parts).data_ptr() == whole.data_ptr() and torch.equal(joined(parts), whole)
    assert joined(parts[1:]).data_ptr() == parts[1].data_ptr() and torch.equal(joined(parts[1:]), whole[2:])
    for others in (parts[::-1], [parts[0], parts[2]], [parts[0], parts[1].T, parts[2]], [parts[0], parts[0]]):
        copied = joined(others)
        assert copied.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        assert torch.equal(copied, torch.cat([part.reshape(-1) for part in others]))


@torch.no_grad()
def test_the_loss_between_steps_is_that_of_the_changed_weights():
    optimizer, closure = started(CASES["tezo-cadam"], torch.float64)
    for _ in range(3):
        optimizer.step(closure)
    between = float(lm_loss(optimizer.model, tokens(4, 8))())
    assert between != float(lm_loss(tiny_llama(), tokens(4, 8))())
    assert float(lm_loss(optimizer.merge(), tokens(4, 8))()) == pytest.approx(between, rel=1e-12)
