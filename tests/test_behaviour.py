"""What every method does, from one table."""

import copy
import math

import pytest
import safetensors.torch
import torch
from cases import (
    CASES,
    INTERVAL,
    OF_A_LOSS,
    ONE_OF_EACH_KIND,
    RANK,
    Case,
    choose,
    effective_weights,
    every_method_fast_for_kinds,
    mostly_slow,
    run,
)
from tiny import VOCAB, Regression, lm_loss, tiny_llama, tiny_opt, tokens
from torch import Tensor, nn

from tezo.methods import METHODS
from tezo.optim.optimizer import ZerothOrderOptimizer

MIDDLE = INTERVAL + 2  # of a refresh period
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)


def stored(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def test_the_table_enrols_every_method():
    assert CASES.keys() == OF_A_LOSS
    assert {name for name, case in CASES.items() if case.base_untouched} == {
        name for name, method in METHODS.items() if method.exports_adapter and name in CASES
    }


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        [case for name, case in CASES.items() if name != "sparse-mezo"], *(CASES[name] for name in ONE_OF_EACH_KIND)
    ),
    ids=[name for name in CASES if name != "sparse-mezo"],
)  # it stops where an entry has grown: test_baselines.py
def test_it_minimises_a_quadratic(case):
    # Over all weights, for the methods whose directions span them.
    model = Regression()
    optimizer = case.build(model)
    losses = [optimizer.step(model.loss) for _ in range(400)]
    assert sum(losses[-10:]) / 10 < (0.1 if case.spans else 0.8) * losses[0]


@choose("tezo", "tezo-m", "tezo-cadam")
def test_it_minimises_a_quadratic_over_the_span_of_its_factors(case):
    # The least squares in c of W_0 + U diag(c) V^T, solved without any of the library but the factors.
    model = Regression()
    weight, x = model.layer.weight.detach(), model.x
    residual = (model.y - x @ weight.T - model.layer.bias.detach()).flatten()
    optimizer = case.build(model)
    for _ in range(500):
        optimizer.step(model.loss)
    (moving,) = optimizer.parameters.values()
    terms = torch.stack([(x @ v)[:, None] * u for u, v in zip(moving.change.u_MR.T, moving.change.v_NR.T, strict=True)])
    assert len(terms) == RANK
    design = terms.flatten(1).T
    best = (residual - design @ torch.linalg.lstsq(design, residual[:, None]).solution[:, 0]).square().mean()
    assert best < 0.8 * residual.square().mean()
    assert model.loss().item() == pytest.approx(best.item(), rel=1e-3)


@every_method_fast_for_kinds
def test_a_step_of_size_zero_changes_nothing(case):
    model = tiny_opt(torch.float32)
    optimizer = case.build(model, lr=0.0, targets=("all",), weight_decay=0.1)
    before, weights = stored(model), effective_weights(optimizer)
    run(optimizer, 0, MIDDLE)
    assert_equal(
        {name: w for name, w in stored(model).items() if _exact(case, optimizer, name)},
        {name: w for name, w in before.items() if _exact(case, optimizer, name)},
    )
    torch.testing.assert_close(effective_weights(optimizer), weights, rtol=1e-6, atol=1e-7)


def _exact(case: Case, optimizer: ZerothOrderOptimizer, name: str) -> bool:
    """In the forward pass and from a copy, the parameter comes back to the bit; in place, to rounding."""
    moving = optimizer.parameters.get(name)
    return moving is None or moving.weight.ndim == 1 or (case.low_rank and "positions" not in name)


def through_bytes(state: dict) -> dict:
    """The state with every tensor written to a safetensors file's bytes and read back."""
    tensors = {key: value.contiguous() for key, value in state["tensors"].items()}
    others = copy.deepcopy({key: value for key, value in state.items() if key != "tensors"})
    return others | {"tensors": safetensors.torch.load(safetensors.torch.save(tensors))}


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("stop", "dtype"),
    [(MIDDLE, torch.float64), (INTERVAL, torch.float64), (MIDDLE, torch.bfloat16)],
    ids=["mid-period", "at-refresh", "mid-period-bf16"],
)
@every_method_fast_for_kinds
def test_a_run_taken_up_from_its_state_is_the_uninterrupted_run_to_the_bit(case, stop, dtype):
    model = tiny_opt(dtype)
    optimizer = case.build(model, targets=("all",), seed=3)
    run(optimizer, 0, stop)
    weights, state = stored(model), through_bytes(optimizer.state_dict())
    losses = run(optimizer, stop, 2 * INTERVAL + 1)

    fresh = tiny_opt(dtype)
    fresh.load_state_dict(weights)
    resumed = case.build(fresh, targets=("all",), seed=3)
    resumed.load_state_dict(state)
    assert run(resumed, stop, 2 * INTERVAL + 1) == losses
    assert_equal(effective_weights(resumed), effective_weights(optimizer))
    assert_equal(stored(fresh), stored(model))


@every_method_fast_for_kinds
def test_a_state_brings_its_seed_along(case):
    model = tiny_opt()
    optimizer = case.build(model, seed=3)
    run(optimizer, 0, MIDDLE)
    weights, state = stored(model), copy.deepcopy(optimizer.state_dict())
    losses = run(optimizer, MIDDLE, MIDDLE + 5)
    fresh = tiny_opt()
    fresh.load_state_dict(weights)
    resumed = case.build(fresh, seed=4)
    resumed.load_state_dict(state)
    assert run(resumed, MIDDLE, MIDDLE + 5) == losses


@every_method_fast_for_kinds
def test_an_optimizer_that_has_run_goes_back_to_a_state_whole(case):
    model = tiny_opt()
    optimizer = case.build(model)
    weights, state = stored(model), copy.deepcopy(optimizer.state_dict())
    losses = run(optimizer, 0, MIDDLE)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert run(optimizer, 0, MIDDLE) == losses


@pytest.mark.thinned
@DTYPES
@every_method_fast_for_kinds
def test_the_tuned_state_of_a_run_gives_its_weights_back_to_the_bit(case, dtype):
    model = tiny_opt(dtype)
    optimizer = case.build(model, targets=("all",))
    run(optimizer, 0, MIDDLE)
    tuned, weights = optimizer.tuned_state(), effective_weights(optimizer)
    loss = lm_loss(model, tokens())().item()
    kept = copy.deepcopy(tuned)
    run(optimizer, MIDDLE, MIDDLE + INTERVAL)
    assert_equal(tuned, kept)  # it is a copy
    assert lm_loss(model, tokens())().item() != loss

    optimizer.load_tuned_state(tuned, MIDDLE)  # back in the run itself, past a refresh
    assert_equal(effective_weights(optimizer), weights)
    assert lm_loss(model, tokens())().item() == loss

    fresh = case.build(tiny_opt(dtype), targets=("all",))
    fresh.load_tuned_state(tuned, MIDDLE)  # and on the base
    assert_equal(effective_weights(fresh), weights)
    assert lm_loss(fresh.model, tokens())().item() == loss


@every_method_fast_for_kinds
def test_frozen_parameters_are_not_touched(case):
    model = tiny_opt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.1" not in name
    optimizer = case.build(model, targets=("all",))
    before = stored(model)
    run(optimizer, 0, MIDDLE)
    optimizer.merge()
    changed = {name for name, weight in stored(model).items() if not torch.equal(weight, before[name])}
    assert changed and not any("layers.1" in name for name in changed)


@every_method_fast_for_kinds
def test_tied_weights_are_one_parameter_and_move_once(case):
    model = tiny_llama(tied=True)
    optimizer = case.build(model, targets=("all",))
    (shared,) = [name for name, moving in optimizer.parameters.items() if moving.weight.shape == (VOCAB, 16)]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding.weight is head.weight
    before = effective_weights(optimizer)[shared]
    run(optimizer, 0, MIDDLE)
    after = effective_weights(optimizer)[shared]
    assert not torch.equal(after, before)
    with torch.no_grad():
        torch.testing.assert_close(embedding(torch.arange(VOCAB)), after, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(head(torch.eye(16, dtype=torch.float64)).T, after, rtol=1e-10, atol=1e-10)


@every_method_fast_for_kinds
def test_state_is_float32_beside_a_bfloat16_model_and_after_a_round_trip_too(case):
    model = tiny_opt(torch.bfloat16)
    optimizer = case.build(model, lr=1e-3, targets=("all",))
    assert all(math.isfinite(loss) for loss in run(optimizer, 0, MIDDLE))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    state = optimizer.state_dict()
    tensors = [value for key, value in state["tensors"].items() if not key.startswith(("weight/", "basis/"))]
    assert bool(tensors) == case.has_state
    assert {x.dtype for x in tensors if x.is_floating_point()} <= {torch.float32}
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@every_method_fast_for_kinds
def test_both_evaluations_see_one_function_and_training_mode_comes_back(case):
    def losses(train: bool) -> list[float]:
        model = tiny_opt(dropout=0.5).train(train)
        model.model.decoder.layers[0].eval()  # a part that the user has frozen stays as it is
        modes = {name: module.training for name, module in model.named_modules()}
        optimizer = case.build(model, lr=1e-3)
        found = []
        for step in range(3):
            optimizer.step(lm_loss(model, tokens(seed=step)))
            found += [optimizer.last_step.probes[0].loss_plus, optimizer.last_step.probes[0].loss_minus]
            assert {name: module.training for name, module in model.named_modules()} == modes
        return found

    assert losses(train=True) == losses(train=False)


@every_method_fast_for_kinds
def test_no_gradient_is_allocated_and_no_graph_is_built(case):
    model = tiny_opt()
    optimizer = case.build(model, targets=("all",))
    outputs = []

    def closure() -> Tensor:
        outputs.append(lm_loss(model, tokens())())
        return outputs[-1]

    for _ in range(MIDDLE):
        assert isinstance(optimizer.step(closure), float)
    assert len(outputs) == case.passes * MIDDLE and not any(loss.requires_grad for loss in outputs)
    assert all(parameter.grad is None and parameter.grad_fn is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
