"""Linear layers outside of a pass, and their derivatives, without a copy of the weights.

y = W x + b and, for the derivative g of a loss by y, W^T g are computed by whoever holds W: a module of torch, in its
own type, or an engine. Nothing of W is kept between the two, so that a model whose layers are read from a file for
each forward needs no more memory here than there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

Product = Callable[[Tensor], Tensor]
"""(P, X) -> (P, Y), float32 on the CPU."""
LayerFunction = Callable[[Tensor], Tensor]
"""x (P, I) -> W x + b (P, O), float32 on the CPU, with a derivative by x."""


class NoDerivativeError(Exception):
    """A module computes its outputs in a way that has no derivative by its inputs."""


class _Layer(torch.autograd.Function):
    """W x + b by one function; W^T g by another."""

    @staticmethod
    def forward(ctx: Any, x_PI: Tensor, outputs: Product, transposed: Product) -> Tensor:
        ctx.transposed = transposed
        return outputs(x_PI.detach())  # which may go to another process, and would be followed there

    @staticmethod
    def backward(ctx: Any, g_PO: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed(g_PO), None, None


def differentiable(outputs: Product, transposed: Product) -> LayerFunction:
    """Returns a layer as a function with a derivative, of two products without one.

    Args:
        outputs: x (P, I) -> W x + b (P, O).
        transposed: g (P, O) -> W^T g (P, I).
    """

    def function(x_PI: Tensor) -> Tensor:
        found: Tensor = _Layer.apply(x_PI, outputs, transposed)  # type: ignore[no-untyped-call]
        return found

    return function


def alone(module: nn.Module, x_PI: Tensor) -> Tensor:
    """Returns the outputs of a linear module outside of a pass of its model: parts on other ranks are gathered."""
    whole = {name: each.full_tensor() for name, each in module.named_parameters() if isinstance(each, DTensor)}
    found: Tensor = functional_call(module, whole, (x_PI,)) if whole else module(x_PI)
    return found


def layer_in_torch(module: nn.Module, inputs: int, like: Tensor) -> LayerFunction:
    """Returns a linear module as a function, its trained change included.

    Its derivative raises `NoDerivativeError` where the module has none.

    Args:
        module: the module.
        inputs: size of its inputs, I.
        like: a tensor of the type and on the device in which the module computes.
    """

    def outputs(x_PI: Tensor) -> Tensor:
        return alone(module, x_PI.to(like)).float().cpu()

    def transposed(g_PO: Tensor) -> Tensor:
        size = g_PO.abs().max().clamp_min(torch.finfo(g_PO.dtype).tiny)  # float16 has no small numbers
        with torch.enable_grad():
            x_PI = like.new_zeros(len(g_PO), inputs, requires_grad=True)
            found = alone(module, x_PI)
        if not found.requires_grad:
            raise NoDerivativeError
        (g_PI,) = torch.autograd.grad(found, x_PI, (g_PO / size).to(found))
        return g_PI.float().cpu() * size

    return differentiable(outputs, transposed)
