"""Baselines beside the paper's: conservative steps, sparse masks, forward gradients."""

import copy
from collections.abc import Callable

import pytest
import torch
from tezo_methods.forward_gradient import forward_gradient
from tezo_methods.mezo_conservative import mezo_conservative
from tezo_methods.sparse_mezo import packed, small_bound, sparse_mezo, unpacked
from tiny import lm_loss, tiny_gpt2, tiny_llama, tiny_opt, tokens
from torch import Tensor, nn

from tezo.methods.mezo import mezo
from tezo.system.errors import RequestError

RISES_AHEAD: Callable[[Tensor], Tensor] = lambda x: torch.where(x < -0.1, 1 + x.abs(), x)  # noqa: E731
"""Falls towards smaller x as far as -0.1, and is above its value at 0 beyond."""


@pytest.mark.parametrize(
    ("objective", "sign"),
    [(lambda x: x, 1), (RISES_AHEAD, 0), (lambda x: torch.where(x > 0.1, -1 - x, RISES_AHEAD(x)), -1)],
    ids=["taken", "left out", "reversed"],
)
def test_a_conservative_step_ends_at_the_best_of_its_three_points(objective, sign):
    model, twin = (nn.Linear(1, 1, bias=False).double() for _ in range(2))
    for each in (model, twin):
        nn.init.zeros_(each.weight)
    one, lr = torch.ones(1, dtype=torch.float64), 100.0
    optimizer = mezo_conservative(model, lr=lr, seed=3)
    optimizer.step(lambda: objective(model(one)).sum())
    (probe,) = optimizer.last_step.probes
    kappa = (probe.loss_plus - probe.loss_minus) / 2e-3
    assert probe.projected_grad == sign * kappa
    assert optimizer.last_step.loss == 0.0 and optimizer.num_forward_passes == 5
    assert float(model.weight.detach()) == pytest.approx(-sign * lr * kappa**2)  # kappa is z here
    again = mezo_conservative(twin, lr=lr, seed=3)
    again.replay(optimizer.last_step)
    assert torch.equal(model.weight, twin.weight)


def test_a_conservative_step_has_one_direction():
    with pytest.raises(RequestError, match=r"method\.num_directions is 2; this method is defined for 1 only"):
        mezo_conservative(tiny_opt(), num_directions=2)


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.75, 0.99])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_the_bound_leaves_the_wanted_part_of_the_entries_above_it(sparsity, dtype):
    weight = torch.randn(37, 53, generator=torch.Generator().manual_seed(0)).to(dtype)
    above = int((weight.abs() > small_bound(weight, sparsity)).sum())
    equals = 0 if dtype == torch.float64 else 3  # several entries of float16 have the size of the bound
    assert abs(above - int(sparsity * weight.numel())) <= equals


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5), (64, 33)])
def test_a_mask_comes_back_from_its_bits(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = packed(mask)
    assert bits.numel() == -(-mask.numel() // 8)
    assert torch.equal(unpacked(bits, mask.numel()).view(shape), mask)


def test_only_small_entries_move_and_the_mask_follows_the_weights():
    model = tiny_opt()
    optimizer = sparse_mezo(model, lr=0.05, sparsity=0.5, targets=("all",))
    bounds = {t.name: small_bound(t.parameter.data, 0.5) for t in optimizer.targets}
    frozen_once = False
    for step in range(4):
        before = {t.name: t.parameter.detach().clone() for t in optimizer.targets}
        optimizer.step(lm_loss(model, tokens(seed=step)))
        for target in optimizer.targets:
            small = before[target.name].abs() <= bounds[target.name]
            still = target.parameter == before[target.name]
            if "positions" in target.name:  # perturbed in place, and back up to rounding
                still |= (target.parameter - before[target.name]).abs() < 1e-12
            assert torch.equal(~still, small), target.name
            frozen_once |= step > 0 and not small.float().mean().sub(0.5).abs() < 0.1
    assert frozen_once, "no mask changed: this shows nothing of masks that follow"


def test_on_the_sum_of_squares_the_small_entries_vanish_and_the_large_ones_stay():
    model = nn.Linear(8, 8, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    start, eye = model.weight.detach().clone(), torch.eye(8, dtype=torch.float64)
    optimizer = sparse_mezo(model, lr=4e-3, sparsity=0.75)
    for _ in range(1200):
        optimizer.step(lambda: model(eye).square().sum())
    bound, end = small_bound(start, 0.75), model.weight.detach()
    small = start.abs() <= bound
    assert int(small.sum()) == 16
    crossed = small & (end.abs() > bound)  # one that begins close to the bound may cross it, and then stays
    assert int(crossed.sum()) <= 1 and end[small & ~crossed].abs().max() < 1e-3
    assert torch.equal(end[~small], start[~small])


def test_a_sparsity_out_of_range_is_refused():
    with pytest.raises(RequestError, match=r"method\.sparsity is 1\.0; it must be at least 0 and below 1"):
        sparse_mezo(tiny_opt(), sparsity=1.0)


@pytest.mark.parametrize("make", [tiny_opt, tiny_llama, tiny_gpt2, lambda: tiny_llama(tied=True)])
def test_a_forward_gradient_is_the_derivative_that_backpropagation_finds(make):
    """kappa = <grad f, z>, and z is what the step moves along."""
    model = make()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    loss = lm_loss(copied := copy.deepcopy(model), tokens(seed=1))()
    loss.backward()
    gradients = {name: weight.grad for name, weight in copied.named_parameters()}
    optimizer = forward_gradient(model, lr=1.0, num_directions=1, targets=("all",))
    value = optimizer.step(lm_loss(model, tokens(seed=1)))
    assert value == pytest.approx(float(loss.detach()), rel=1e-12)
    (kappa,) = optimizer.last_step.projected_grads
    moved = {name: weight.detach() - before[name] for name, weight in model.named_parameters()}  # -kappa z
    along = sum(float((moved[name] * gradients[name]).sum()) for name in moved)
    assert along == pytest.approx(-(kappa**2), rel=1e-9)
    assert optimizer.num_forward_passes == 1 and optimizer.rho == 0.0


def test_it_is_the_limit_of_mezo_for_a_small_rho_and_replays():
    models = [tiny_opt() for _ in range(3)]
    exact, near = forward_gradient(models[0], lr=1e-3, seed=5), mezo(models[1], lr=1e-3, rho=1e-5, seed=5)
    again = forward_gradient(models[2], lr=1e-3, seed=5)
    for step in range(3):
        exact.step(lm_loss(models[0], tokens(seed=step)))
        near.step(lm_loss(models[1], tokens(seed=step)))
        again.replay(exact.last_step)
        assert exact.last_step.projected_grads == pytest.approx(near.last_step.projected_grads, rel=1e-5)
    for ours, theirs in zip(models[0].parameters(), models[2].parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Opaque(torch.autograd.Function):
    """An operation with a backward pass and no forward-mode derivative."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad


def test_a_model_without_forward_mode_derivatives_is_refused_and_as_before():
    model = nn.Sequential(nn.Linear(4, 4))
    before = model[0].weight.detach().clone()
    optimizer = forward_gradient(model, lr=1.0)
    for loss, part in ((lambda: Opaque.apply(model(torch.ones(4))).sum(), "no forward-mode derivative"),
                       (lambda: float(model(torch.ones(4)).sum()), "return it as a tensor")):  # fmt: skip
        with pytest.raises(RequestError, match=part):
            optimizer.step(loss)
    assert torch.equal(model[0].weight, before) and optimizer.num_steps == 0
