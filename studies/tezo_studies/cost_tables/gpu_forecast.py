"""What a step on a GPU would take, from shapes alone: no model is allocated, and nothing is computed.

Memory is the sum of

- the parameters, in float16;
- what the method keeps in addition, as its own classes allocate it (`forecast`, `first_order_kept`);
- the peak of a pass over the batch on the meta device (`dry_pass`).

The allocator's rounding and reserve, the CUDA context, buffers of a tile and temporaries of an update are left out;
attention is counted with its scores, which fused kernels do not store. Time is a lower bound, see `least_seconds`.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from tezo.forecast.memory import copies_of, first_order_kept, forecast, pass_peak, valueless
from tezo.methods import METHODS
from tezo_studies.cost_tables.cost_line import CostLine, settings_of
from tezo_studies.cost_tables.meta_models import meta_model

BANDWIDTH = 3.35e12
"""Bytes per second of the memory of an H100 SXM, by its data sheet."""
FLOPS = 989e12
"""Floating-point operations per second of an H100 SXM in dense float16 products, by its data sheet."""


@dataclass(frozen=True)
class DryPass:
    """The cost of a pass over a batch: bytes at its peak, without the parameters, and operations of the products."""

    peak: int
    flops: int


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


def dry_pass(model: Any, rows: int, length: int, *, backward: bool = False) -> DryPass:
    """Returns the cost of one pass over a batch; the arguments are those of `pass_peak`."""
    peak = pass_peak(model, rows, length, backward=backward)
    with FlopCounterMode(display=False) as work:  # apart: this counter keeps what checkpointing frees
        pass_peak(model, rows, length, backward=backward)
    return DryPass(peak, work.get_total_flops())


def _first_order_cost(line: CostLine, model: str, rows: int, length: int) -> StepCost:
    meta = meta_model(settings_of(line, model), line.peft)
    cost, (kept, gradients) = _pass(model, line.peft, rows, length, backward=True), first_order_kept(meta)
    weights = sum(parameter.nbytes for parameter in meta.parameters())
    return StepCost(weights, kept, max(cost.peak, gradients), cost.flops, weights)


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
