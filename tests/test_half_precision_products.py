"""Perturbed layers in half precision: what is rounded, on CPUs that multiply it and on CPUs that emulate it."""

from dataclasses import replace

import pytest
import torch
from cases import choose
from torch import Tensor, nn

from tezo.directions import products as emulation
from tezo.directions.products import arithmetic_dtype, is_emulated
from tezo.directions.random import DrawKey
from tezo.forward.blocks import block_points
from tezo.forward.perturbed_parameter import Shift

LOW_RANK = ("tezo", "lozo", "subzo")
CPUS = pytest.mark.parametrize("emulating", [True, False], ids=["emulating", "native"])
WIDTH, ROWS, RHO = 64, 24, 1e-2


def layer() -> nn.Linear:
    made = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.normal_(made.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return made.to(torch.bfloat16)


def dense(points, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The sum of terms of one block, in float64, with coefficients cast where a product casts them."""
    total = torch.zeros(shape, dtype=torch.float64)
    for _, point in points:
        coefficient = point.coefficient.to(dtype) if point.casts_coefficient else point.coefficient
        ((scale,),) = [getattr(point, "scales", None) or (1.0,)]
        if (beside := getattr(point, "beside", None)) is not None:
            left, right = replace(point, beside=None, scales=None).with_coefficient(beside.to(dtype).float()).factors()
            total += (left.double() @ right.double().T).view(shape)
        fixed = {key: getattr(point, key).double() for key in ("u_MR", "v_NR") if hasattr(point, key)}
        exact = replace(point.with_coefficient(coefficient.double().squeeze(0)), **fixed)
        left, right = exact.factors()
        total += scale * (left.double() @ right.double().T).view(shape)
    return total


@CPUS
@choose(*LOW_RANK)
def test_a_perturbed_layer_is_the_exact_one_up_to_two_roundings(monkeypatch, case, emulating):
    monkeypatch.setattr(emulation, "relative_time", lambda _: 2.0 if emulating else 0.5)
    model = nn.Sequential(layer())
    optimizer = case.build(model, lr=1e-2, rank=8)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    optimizer.step(lambda: model(x).float().square().mean())
    moving = optimizer.parameters["0.weight"]
    optimizer.refresh()
    direction = optimizer.draw().directions["0.weight"][0]
    with torch.no_grad():
        moving.set_perturbations([Shift(direction, RHO), Shift(direction, -RHO)])
        both = model(torch.cat([x, x]))
        moving.set_perturbations([])
    weight = model[0].weight.detach().double()
    left, right = direction.factors()
    ((own_left, own_right),) = moving.trained()
    trained = own_left.double() @ own_right.double().T
    for out, sign in zip(both.chunk(2), (1, -1), strict=True):
        term = trained + sign * RHO * left.double() @ right.double().T
        exact = x.double() @ (weight + term).T
        # the stock output and the sum are rounded to bfloat16 once each, and so are x V and U, of the small term alone
        size = (x.double() @ weight.T).abs() + exact.abs() + 4 * x.double().abs() @ term.abs().T
        assert ((out.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps * size + 1e-6).all()


@choose(*LOW_RANK)
def test_a_small_perturbation_of_a_large_change_is_not_rounded_away(case):
    # c + rho z is 30 + 0.01 z: bfloat16 has a spacing of 0.125 there
    model = nn.Sequential(layer())
    optimizer = case.build(model, lr=1e-2, rank=8)
    (target,) = optimizer.targets
    z = optimizer.perturbation.direction(target, DrawKey(0, 3), {})
    change = z.with_coefficient(torch.full_like(z.coefficient, 30.0))
    plus, minus = (
        dense(block_points(change, True, [Shift(z, scale)], torch.bfloat16), (WIDTH, WIDTH), torch.bfloat16)
        for scale in (RHO, -RHO)
    )
    left, right = z.factors()
    exact = 2 * RHO * left.double() @ right.double().T
    assert (plus - minus - exact).norm() < 0.01 * exact.norm()


def test_what_was_measured_is_kept_for_later_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("TEZO_CACHE", str(tmp_path))
    emulation.relative_time.cache_clear()
    try:
        monkeypatch.setattr(emulation, "_measure", lambda _: 3.0)
        assert is_emulated(torch.bfloat16)
        emulation.relative_time.cache_clear()  # another process
        monkeypatch.setattr(emulation, "_measure", lambda _: 0.3)
        assert is_emulated(torch.bfloat16) and not is_emulated(torch.float16)
        assert arithmetic_dtype(torch.empty(1, dtype=torch.bfloat16)) == torch.float32
        assert arithmetic_dtype(torch.empty(1, dtype=torch.float16)) == torch.float16
        assert not is_emulated(torch.float32) and arithmetic_dtype(torch.empty(1)) == torch.float32
    finally:
        emulation.relative_time.cache_clear()


def test_a_measurement_leaves_the_number_of_threads_and_is_positive():
    threads = torch.get_num_threads()
    assert emulation._measure(torch.bfloat16) > 0
    assert torch.get_num_threads() == threads
