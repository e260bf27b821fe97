"""A sweep over rows of free text: the layers of the last blocks learn from one batch after another.

Each batch is passed once, with the factors U V^T that those before have led to beside the layers. The pass shows what
`last_blocks` rebuilds the last blocks from, attention as it is now. The gradient of the loss of the batch by U and V is
that of this function; Adam follows it, at rates that fall to zero along the sweep:

    U <- U - f_s U_RATE h / (N sqrt(D)) Adam(dL_s / dU),
    V <- V - f_s V_RATE / sqrt(I) Adam(dL_s / dV),   f_s = (1 - s / S) / (1 + t),   s = 0, ..., S - 1,

t the step of the sweep, from U = 0 (D, r) and entries of V (I, r) that are normal with variance 1 / I. The N layers
write to one stream, whose root mean square behind the last block is h. It is one forward pass a batch, and what has
been learnt moves attention, which a function that is fitted to a single pass would hold as it was. Later sweeps are
slower, since the first one may have learnt the rows that come again.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.bases.basis import input_size, output_size
from tezo.directions.random import normal
from tezo.directions.targets import Target
from tezo.forward.layers import LayerFunction
from tezo.forward.perturbed_parameter import open_on
from tezo.newton.last_blocks import (
    PLACES_AT_ONCE,
    Block,
    Factors,
    FunctionOf,
    LastBlocks,
    last_blocks,
    name_of,
)
from tezo.newton.text import Pair, Seen, readout
from tezo.optim.closures import RowOutputs
from tezo.system.progress import tracked
from tezo.system.signals import let_interrupt

BATCHES, ROWS = 32, 32
"""Batches of a sweep, and rows of a batch."""
LEARNING_SHARE = 0.4
"""Blocks that learn, the last ones, as a part of all."""
U_RATE, V_RATE = 0.12, 0.06
"""Rates of Adam at the start of a sweep. Chosen by trials on dev rows of completions, on decoders of 135M and of 260K
parameters, which are not committed; so was `LEARNING_SHARE`."""

RowsOfBatch = Callable[[int], RowOutputs]
"""Number of a batch -> its rows."""


def blocks_to_sweep(targets: Sequence[Target], last: Target, rows: RowOutputs, budget: int) -> list[Block]:
    """Returns the blocks that may learn: none, where the layers are not those of a decoder.

    Args:
        targets: all linear layers, in the order of the model.
        last: the last one that is tuned.
        rows: a batch.
        budget: bytes that the inputs of the layers of blocks may take.
    """
    places = sum(len(each.place_P) for each in rows.places() if each is not None)
    found = last_blocks(targets, output_size(last))
    sizes = [sum(4 * places * input_size(t) for t in _layers(block)) for block in found]
    most = min(len(learning_blocks(found)), budget // max(sizes, default=1))
    return found[len(found) - most :]


def learning_blocks(blocks: Sequence[Block]) -> Sequence[Block]:
    """Returns those of all blocks that learn: the last `LEARNING_SHARE`."""
    return blocks[len(blocks) - math.ceil(LEARNING_SHARE * len(blocks)) :]


def _layers(block: Block) -> list[Target]:
    return [block.attention, *block.readers, block.mlp]


@contextmanager
def beside(model: nn.Module, factors: Factors) -> Iterator[None]:
    """While open, the layers of a model have U V^T beside their weights."""
    with ExitStack() as opened:
        for tuned in open_on(model.parameters()) if factors else ():
            if tuned.target.name in factors:
                u_MR, v_IR = factors[tuned.target.name]
                pair = (u_MR, v_IR) if tuned.target.input_role == "v" else (v_IR, u_MR)
                opened.enter_context(tuned.beside(*pair))
        yield


class Sweep:
    """Layers of the last blocks that learn from one batch after another; see the module.

    Args:
        model: the model.
        target: the last layer that is tuned.
        blocks: the blocks.
        ranks: parameter name -> r.
        step: the optimizer's; the first V is random by it.
        rate: number of a batch -> factor of `U_RATE` and `V_RATE`.

    Attributes:
        calls: of the model so far.
    """

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        blocks: Sequence[Block],
        ranks: Mapping[str, int],
        step: int,
        rate: Callable[[int], float],
    ) -> None:
        self._model, self._target, self._blocks, self._rate, self.calls = model, target, blocks, rate, 0
        self._layers = LastBlocks.watched(blocks)
        writers = [t for block in blocks for t in block.writers if t.name in ranks]
        self._factors = {t.name: _start(t, ranks[t.name], step) for t in writers}
        self._every = [factor for pair in self._factors.values() for factor in pair]
        self._rebuilt: LastBlocks | None = None

    def beside(self) -> AbstractContextManager[None]:
        """While open, the layers of the model have what was learnt so far beside their weights."""
        return beside(self._model, self._factors if self._rebuilt else {})

    def learn(self, rows: RowOutputs, weight_E: Tensor | None = None) -> None:
        """Learns from a batch.

        Args:
            rows: free text.
            weight_E: of the loss of each example, (E,); None: 1.

        Raises:
            NotRebuiltError: the blocks are built otherwise.
        """
        with self.beside():
            seen = Seen.of(self._model, rows, self._layers)
        self.calls += len(rows.places())
        inputs = {name: seen.inputs(name) for name in self._layers}
        if self._rebuilt is None:
            self._rebuilt = LastBlocks(self._blocks, inputs, seen.head_inputs, _functions(self._model, seen))
            self._adam = _adam(self._factors, self._rebuilt.size)
            self._rates = torch.optim.lr_scheduler.LambdaLR(self._adam, self._rate)
        stream = self._rebuilt.seen(inputs, seen.head_inputs, self._factors)
        text = readout(self._model, self._target, [seen])
        weight_P = None if weight_E is None else weight_E.float()[seen.examples]
        self._adam.zero_grad()
        found = []
        for part_P in torch.split(torch.arange(len(seen.tokens)), PLACES_AT_ONCE):
            with torch.enable_grad():
                h_PD = stream.at(part_P).of(self._factors)
                loss = text.loss(h_PD, part_P, None if weight_P is None else weight_P[part_P])
                torch.autograd.backward(loss * (len(part_P) / len(seen.tokens)), inputs=self._every)
            found.append(h_PD.detach())
        stream.check(torch.cat(found))
        self._adam.step()
        self._rates.step()

    @property
    def found(self) -> dict[str, Pair]:
        """Parameter name -> (U (D, r), V (I, r)), float64: what was learnt so far."""
        return {name: (u_DR.detach().double(), v_IR.detach().double()) for name, (u_DR, v_IR) in self._factors.items()}


def sweep(
    model: nn.Module, target: Target, blocks: Sequence[Block], rows_of: RowsOfBatch, ranks: Mapping[str, int], step: int
) -> tuple[dict[str, Pair], int]:
    """Returns what the layers of the blocks learn from `BATCHES` batches of free text, and the calls of the model.

    Args:
        model: the model.
        target: the last layer that is tuned.
        blocks: the blocks.
        rows_of: number of a batch -> its rows.
        ranks: parameter name -> r.
        step: the optimizer's; the first V is random by it, and rates fall with it.

    Raises:
        NotRebuiltError: the blocks are built otherwise.
    """
    learner = Sweep(model, target, blocks, ranks, step, lambda batch: (1 - batch / BATCHES) / (1 + step))
    for s in tracked(range(BATCHES), "batches"):
        let_interrupt()
        learner.learn(rows_of(s))
    return learner.found, learner.calls


def _start(target: Target, rank: int, step: int) -> Pair:
    size = input_size(target)
    v_IR = normal((size, rank), seed=0, step=step, name=target.name, role="v").float() / math.sqrt(size)
    return torch.zeros(output_size(target), rank, requires_grad=True), v_IR.requires_grad_()


def _adam(factors: Factors, size: float) -> torch.optim.Optimizer:
    groups = list[dict[str, Any]]()
    for u_DR, v_IR in factors.values():
        groups += [
            {"params": [u_DR], "lr": U_RATE * size / (len(factors) * math.sqrt(len(u_DR)))},
            {"params": [v_IR], "lr": V_RATE / math.sqrt(len(v_IR))},
        ]
    return torch.optim.Adam(groups)


def _functions(model: nn.Module, seen: Seen) -> FunctionOf:
    """Returns (layer -> the layer as a function), by whoever passes these rows."""

    def function_of(target: Target) -> LayerFunction:
        return seen.rows.layer_function(model, name_of(target), input_size(target), seen.record.like)

    return function_of
