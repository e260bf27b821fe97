"""Layers outside of a pass: what a module computes, and its derivative, with nothing of the weight kept between."""

import gc

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tezo.forward.layers import layer_in_torch


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected(module, x_PI, g_PO):
    x_PI = x_PI.clone().requires_grad_()
    found = module(x_PI)
    return found.detach(), torch.autograd.grad(found, x_PI, g_PO)[0]


@pytest.mark.parametrize("kind", [nn.Linear, lambda inputs, outputs: Conv1D(outputs, inputs)])
def test_a_layer_and_its_derivative_are_the_modules(kind):
    module, x_PI, g_PO = kind(7, 3), noise(5, 7, seed=0), noise(5, 3, seed=1)
    with torch.no_grad():  # as in a step
        layer = layer_in_torch(module, 7, x_PI[:0])
        assert torch.equal(layer(x_PI), module(x_PI))
    own = x_PI.clone().requires_grad_()
    found = layer(own)
    for one, other in zip((found, torch.autograd.grad(found, own, g_PO)[0]), expected(module, x_PI, g_PO), strict=True):
        assert torch.allclose(one, other, atol=1e-6) and one.dtype == torch.float32


def test_a_derivative_in_float16_has_its_size():
    """Those of a mean over many tokens are less than float16 has."""
    module, x_PI, g_PO = nn.Linear(64, 64), noise(5, 64, seed=0), 1e-9 * noise(5, 64, seed=1)
    _, wanted_PI = expected(module, x_PI, g_PO)
    layer = layer_in_torch(module.half(), 64, x_PI[:0].half())
    own = x_PI.clone().requires_grad_()
    (found_PI,) = torch.autograd.grad(layer(own), own, g_PO)
    assert float(torch.linalg.vector_norm(found_PI - wanted_PI)) < 1e-2 * float(torch.linalg.vector_norm(wanted_PI))
    (zero_PI,) = torch.autograd.grad(layer(own), own, torch.zeros(5, 64))
    assert not zero_PI.any()


def test_no_weight_is_held_between_a_layer_and_its_derivative():
    """Of a module whose weight is read for each forward, as those of a file are."""

    class ReadAtUse(nn.Module):
        def forward(self, x_PI: Tensor) -> Tensor:
            return x_PI @ noise(64, 33, seed=3)

    def held() -> int:
        gc.collect()
        return sum(isinstance(each, Tensor) and each.shape == (64, 33) for each in gc.get_objects())

    module, x_PI, before = ReadAtUse(), noise(5, 64, seed=0), held()
    layer = layer_in_torch(module, 64, x_PI[:0])
    own = x_PI.clone().requires_grad_()
    found = layer(own)
    assert held() == before
    (found_PI,) = torch.autograd.grad(found, own, noise(5, 33, seed=1))
    assert torch.allclose(found_PI, noise(5, 33, seed=1) @ noise(64, 33, seed=3).T, atol=1e-5)
