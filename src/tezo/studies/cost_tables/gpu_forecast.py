"""What a step on a GPU would take, from shapes alone: no model is allocated, and nothing is computed.

Memory is the sum of

- the parameters, in float16;
- what the method keeps in addition, as its own classes allocate it (`memory_forecast`, `first_order_kept`);
- the peak of a pass over the batch on the meta device (`dry_pass`).

The allocator's rounding and reserve, the CUDA context, buffers of a tile and temporaries of an update are left out;
attention is counted with its scores, which fused kernels do not store. Time is a lower bound, see `least_seconds`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.targets import ALL, select_targets
from tezo.estimators.two_point import fitting_copies
from tezo.optim.memory_forecast import Forecast, forecast
from tezo.optim.methods import METHODS
from tezo.optim.stepped_weights import stepped_weight
from tezo.studies.cost_tables.cost_line import CostLine, settings_of
from tezo.studies.cost_tables.dry_pass import DryPass, dry_pass, meta_model

BANDWIDTH = 3.35e12
"""Bytes per second of the memory of an H100 SXM, by its data sheet."""
FLOPS = 989e12
"""Floating-point operations per second of an H100 SXM in dense float16 products, by its data sheet."""


@dataclass(frozen=True)
class StepCost:
    """What a step takes.

    Attributes:
        weights: bytes of the model's parameters, those of an adapter included.
        kept: bytes that the method keeps beside them, gradients left out.
        passing: bytes at the peak of a pass or of the update after it: activations and gradients.
        flops: floating-point operations of the matrix products of one pass over the batch.
        written: bytes of the weights that a step rewrites.
    """

    weights: int
    kept: int
    passing: int
    flops: int
    written: int

    @property
    def memory(self) -> int:
        """Bytes in total."""
        return self.weights + self.kept + self.passing


def step_cost(line: CostLine, model: str) -> StepCost:
    """The forecast for a row of a table and a key of `SHAPES`, in the tables' setting."""
    lengths = settings_of(line, model).lengths()
    rows, length = len(lengths), max(lengths)
    if line.by_gradient:
        return _first_order_cost(line, model, rows, length)
    one, meta = _pass(model, line.peft, rows, length), meta_model(settings_of(line, model), line.peft)
    weights = sum(parameter.nbytes for parameter in meta.parameters())
    if line.method is None:
        return StepCost(weights, 0, one.peak, one.flops, 0)
    with valueless(meta) as allocated:
        said = forecast(allocated, METHODS[line.method], **line.options)
    assert said.refusal is None, said.refusal
    peak = _pass(model, line.peft, rows * copies_of(said, rows * length), length).peak
    return StepCost(weights, said.kept, peak, one.flops, said.written)


@cache
def _pass(model: str, peft: str, rows: int, length: int, *, backward: bool = False) -> DryPass:
    return dry_pass(meta_model(settings_of(CostLine(""), model), peft), rows, length, backward=backward)


def copies_of(said: Forecast, tokens: int) -> int:
    """Number of perturbed models that share a pass, see `tezo.estimators.two_point`."""
    return min(2, max(1, fitting_copies(tokens, dense=said.rank is None)))


def _first_order_cost(line: CostLine, model: str, rows: int, length: int) -> StepCost:
    meta = meta_model(settings_of(line, model), line.peft)
    cost, (kept, gradients) = _pass(model, line.peft, rows, length, backward=True), first_order_kept(meta)
    weights = sum(parameter.nbytes for parameter in meta.parameters())
    return StepCost(weights, kept, max(cost.peak, gradients), cost.flops, weights)


def first_order_kept(model: nn.Module) -> tuple[int, int]:
    """(bytes that `FirstOrderOptimizer` keeps between steps, bytes of the gradients in its update).

    It keeps two moments of each tensor that it steps, and that tensor where it is a float32 copy of a weight in half
    precision. In the update, the copy's own gradient is beside the weight's.
    """
    kept = gradients = 0
    for target in select_targets(model, (ALL,)):
        stepped = stepped_weight(target, master=True).stepped
        copy = 0 if stepped is target.parameter else stepped.nbytes
        kept += copy + 2 * stepped.nbytes
        gradients += target.parameter.nbytes + copy
    return kept, gradients


def least_seconds(line: CostLine, model: str) -> float:
    """A lower bound for a zeroth-order step on an H100, in seconds:

        2 max(F / 989 TFLOP/s, w / 3.35 TB/s) + 2 (k + x) / 3.35 TB/s,

    where F are the operations of a pass; w the bytes of the weights, read once a pass; k those of moments, read and
    written once, and of factors and coefficients, read once a pass; and x those of the weights that the step writes,
    read and written once. Left out: the drawing of noise, the products with low-rank factors, launches of kernels, and
    that no kernel reaches a peak.
    """
    cost = step_cost(line, model)
    return 2 * max(cost.flops / FLOPS, cost.weights / BANDWIDTH) + 2 * (cost.kept + cost.written) / BANDWIDTH


@contextmanager
def valueless(model: Any) -> Iterator[Any]:
    """While open, the parameters of a model on the meta device are on the CPU: one zero, repeated, in their shapes.

    Optimizers refuse parameters that have no values at all; these take no memory either.
    """
    owners = [(module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)]
    before = [getattr(module, name) for module, name in owners]
    stand_ins: dict[Tensor, nn.Parameter] = {own: _one_zero(own) for own in before}
    try:
        for (module, name), own in zip(owners, before, strict=True):
            setattr(module, name, stand_ins[own])
        yield model
    finally:
        for (module, name), own in zip(owners, before, strict=True):
            setattr(module, name, own)


def _one_zero(parameter: nn.Parameter) -> nn.Parameter:
    zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    return nn.Parameter(zero, requires_grad=parameter.requires_grad)
