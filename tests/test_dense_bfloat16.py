"""Dense directions in the forward pass of bfloat16 layers, on a CPU that multiplies bfloat16, against float64."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tezo.directions.spaces import Dense
from tezo.methods.mezo import mezo
from tezo.optim.closures import Losses

RHO = 1e-3
FEW, MANY = 12, 100
"""Rows of one evaluation: fewer, and for both signs together more, than `FEW_ROWS`."""


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """As on a CPU with instructions for bfloat16, whether this one has them or not."""
    monkeypatch.setattr("tezo.forward.dense.multiplies_bfloat16", lambda tensor: tensor.dtype == torch.bfloat16)
    monkeypatch.setattr("tezo.forward.dense.FEW_ROWS", 64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear(outputs: int, inputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs, dtype=torch.bfloat16)
    layer.weight.data.copy_(normal(outputs, inputs, seed=1) * 0.02)
    layer.bias.data.copy_(normal(outputs, seed=2))
    return layer


def conv1d(outputs: int, inputs: int) -> nn.Module:
    layer = Conv1D(outputs, inputs).bfloat16()
    layer.weight.data.copy_(normal(inputs, outputs, seed=1) * 0.02)
    layer.bias.data.copy_(normal(outputs, seed=2))
    return layer


class Evaluated(NamedTuple):
    """Outputs with +rho Z and -rho Z in bfloat16; W, Z and the bias in float64, with outputs as rows."""

    plus: Tensor
    minus: Tensor
    weight: Tensor
    z: Tensor
    bias: Tensor


class Recorded(Losses):
    """A closure that keeps the outputs of the model, for one sign or for both in one pass."""

    tokens = 1

    def __init__(self, model: nn.Module, x_TN: Tensor, *, shared: bool) -> None:
        self.model, self.x_TN, self.outputs = model, x_TN, []
        self.tokens = 1 if shared else 1 << 20

    def losses(self, copies: int) -> Tensor:
        self.outputs += self.model(self.x_TN.repeat(copies, 1)).chunk(copies)
        return torch.zeros(copies)


def evaluated(make: Callable[[int, int], nn.Module], x_TN: Tensor, step: int = 0, *, shared: bool = True) -> Evaluated:
    """One step of MeZO with learning rate 0."""
    model = nn.Sequential(make(40, x_TN.shape[1]))
    optimizer = mezo(model, lr=0.0, rho=RHO, targets=("0.weight",))
    optimizer.num_steps = step
    optimizer.unperturbed_loss = math.inf  # no third pass, of the model itself
    optimizer.refresh()
    (direction,) = optimizer.draw().directions["0.weight"]
    assert isinstance(direction, Dense)
    z = torch.cat([values.double() for _, values in direction.tiles()])
    closure = Recorded(model, x_TN, shared=shared)
    optimizer.step(closure)
    plus, minus = closure.outputs
    weight, bias = model[0].weight.detach().double(), model[0].bias.detach().double()
    if make is conv1d:
        weight, z = weight.T, z.T
    return Evaluated(plus, minus, weight, z, bias)


@pytest.mark.parametrize("shared", [True, False], ids=["both-signs", "each-sign"])
@pytest.mark.parametrize("make", [linear, conv1d])
@pytest.mark.parametrize("tile", [3 << 18, 100])
def test_with_few_rows_rho_x_z_is_added_to_the_stock_output(monkeypatch, make, shared, tile):
    monkeypatch.setattr("tezo.directions.spaces.TILE", tile)
    x_TN = normal(FEW, 32)
    plus, minus, weight, z, bias = evaluated(make, x_TN, shared=shared)
    for output, rho in ((plus, RHO), (minus, -RHO)):
        exact = x_TN.double() @ (weight + rho * z).T + bias
        # two roundings to bfloat16: of x W^T + b, and of the sum
        assert ((output.double() - exact).abs() <= 2**-7 * exact.abs() + 1e-3).all()
    # what Z adds, about the spacing of the outputs, arrives on the whole
    moved, expected = (plus.double() - minus.double()) / 2, RHO * x_TN.double() @ z.T
    share = float((moved * expected).sum() / expected.square().sum())
    assert abs(share - 1) < 0.1


@pytest.mark.parametrize("make", [linear, conv1d])
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_both_signs_in_one_pass_are_the_bits_of_two_passes(make, rows):
    x_TN = normal(rows, 32)
    for one, two in zip(evaluated(make, x_TN)[:2], evaluated(make, x_TN, shared=False)[:2], strict=True):
        torch.testing.assert_close(one, two, rtol=2**-8, atol=2**-10)


def ones(outputs: int, inputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def test_with_many_rows_w_plus_rho_z_is_rounded_without_bias():
    # The inputs are the identity, so the outputs are the rounded W +- rho Z. W is 1: rounded to nearest, nothing moves.
    # Entries are at p between two neighbours; sum (seen - p) / sqrt(sum p (1 - p)) is within 5.5 (4e-8).
    width = MANY
    seen, chance = [], []
    for step in range(8):
        plus, minus, weight, z, _ = evaluated(ones, torch.eye(width).bfloat16(), step)
        for output, rho in ((plus, RHO), (minus, -RHO)):
            exact = weight + rho * z
            below = torch.where(exact < 1, 1 - 2.0**-8, 1.0)
            gap = torch.where(exact < 1, 2.0**-8, 2.0**-7)
            rounded = output.T.double()
            inside = (exact - below >= 0) & (exact - below <= gap)
            assert ((rounded == below) | (rounded == below + gap))[inside].all()
            assert inside.double().mean() > 0.99
            seen.append(((rounded - below) / gap)[inside])
            chance.append(((exact - below) / gap)[inside])
    s, p = torch.cat(seen), torch.cat(chance)
    for chosen in (p >= 0, p < 0.5, p > 0.5):
        assert abs(float((s - p)[chosen].sum() / (p * (1 - p))[chosen].sum().sqrt())) < 5.5
