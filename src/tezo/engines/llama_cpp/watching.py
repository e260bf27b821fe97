"""Visitors of the nodes of graphs: one lists layers, another keeps their inputs and adds vectors to their outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tezo.engines.llama_cpp.plan import Numbers, Part
from tezo.engines.llama_cpp.tensors import Tensors
from tezo.forward.engine import LayerInputs


@dataclass(frozen=True)
class Layer:
    """A layer of a file: a product of its input by a matrix.

    Attributes:
        name: of the weight.
        inputs: size of its input.
        outputs: size of its output.
        at_outputs: whether it is computed for the tokens alone whose output is asked for, as in the last block.
    """

    name: str
    inputs: int
    outputs: int
    at_outputs: bool


class Listing:
    """Lists the layers of a graph, and those of them to whose output a LoRA is added.

    Args:
        tensors: reads them.
        part: the tokens that are computed, more than are put out.

    Attributes:
        layers: name of the weight -> the layer, in the order in which they are computed.
        adapted: names of the weights with a LoRA.
        repeated: names of the weights that multiply more than once.
    """

    def __init__(self, tensors: Tensors, part: Part) -> None:
        self._tensors, self._tokens, self._outputs = tensors, len(part.token_T), int(part.output_T.sum())
        self.layers: dict[str, Layer] = {}
        self.adapted: set[str] = set()
        self.repeated: set[str] = set()

    def wants(self, node: int) -> bool:
        """See `Visitor`; nothing has to be computed for the shapes."""
        tensors = self._tensors
        if adapted := tensors.adapted_by(node):
            self.adapted.add(adapted)
        name = tensors.product_of(node)
        columns = tensors.columns(node)
        if name is not None and columns in (self._tokens, self._outputs):
            (inputs, outputs, *_), at_outputs = tensors.shape(tensors.source(node, 0)), columns < self._tokens
            self.repeated |= {name} & self.layers.keys()
            self.layers[name] = Layer(name, inputs, outputs, at_outputs)
        return False

    def take(self, node: int) -> None:
        """See `Visitor`."""


@dataclass
class _Kept:
    """What is kept of a layer's inputs, and of its outputs."""

    at_PI: Numbers
    mean_PI: Numbers | None
    before_I: Numbers
    """Sum of the inputs of the tokens that all texts begin with."""
    squares: dict[int, float] = field(default_factory=dict)
    """Place -> mean square of the outputs there."""


class Watching:
    """Keeps inputs of layers at places, and adds vectors to outputs, piece after piece.

    Args:
        tensors: reads and writes them.
        inputs: names of the weights of layers whose inputs are kept.
        kept_P: for each place, in the order in which they are read, its number among those that are kept; -1: it is
            none of them.
        means: whether means over the tokens before are kept.
        added: name of a weight -> for each text vectors for its tokens (tokens, M), or for all of them (1, M).
    """

    def __init__(
        self,
        tensors: Tensors,
        inputs: Sequence[str],
        kept_P: Sequence[int],
        means: bool,
        added: Mapping[str, Sequence[Tensor]],
    ) -> None:
        self._tensors, self._inputs, self._means, self._added = tensors, set(inputs), means, added
        self._kept_P, self._count = np.array(kept_P, np.int64), 1 + max(kept_P, default=-1)
        self._layers: dict[str, _Kept] = {}
        self._read = 0
        self._positions_P = np.ones(self._count)

    def begin(self, part: Part, *, is_common: bool) -> None:
        """Is called before the pieces of a part; `is_common`: all texts begin with it."""
        self._is_common = is_common
        self._of_part: list[tuple[int, int, int]] = []  # (kept place, sequence, position)
        kept = self._kept_P[self._read : self._read + int(part.read_T.sum())]
        for number, token in zip(kept.tolist(), np.flatnonzero(part.read_T), strict=True):
            if number >= 0:
                position = int(part.position_T[token])
                self._of_part.append((number, int(part.seq_TS[token, 0]), position))
                self._positions_P[number] = position + 1

    def enter(self, piece: Part) -> None:
        """Is called before a piece is computed."""
        self._piece, self._inputs_seen = piece, dict[int, str]()
        kept = self._kept_P[self._read : self._read + int(piece.read_T.sum())]
        self._read += int(piece.read_T.sum())
        self._numbers, self._tokens = kept[kept >= 0], np.flatnonzero(piece.read_T)[kept >= 0]
        self._weights: tuple[Numbers, Numbers] | None = None

    def wants(self, node: int) -> bool:
        """See `Visitor`."""
        name = self._tensors.output_of(node)
        return name is not None and (name in self._inputs or name in self._added)

    def take(self, node: int) -> None:
        """See `Visitor`."""
        tensors = self._tensors
        name = tensors.output_of(node)
        assert name is not None
        is_product = tensors.product_of(node) == name
        if name in self._inputs:
            if is_product:
                self._keep(name, tensors.source(node, 1))
            self._measure(name, node)
        if name in self._added and is_product:
            values = tensors.values(node)
            tensors.write(node, values + self._vectors(self._added[name])[self._of_columns(name, len(values))])

    def found(self) -> dict[str, LayerInputs]:
        """Returns what was kept, by the names of weights, in the order in which layers are computed."""
        found: dict[str, LayerInputs] = {}
        inputs: dict[int, tuple[Tensor, Tensor | None]] = {}
        for name, kept in self._layers.items():
            if id(kept.at_PI) not in inputs:
                mean_PI = kept.mean_PI
                if mean_PI is not None:
                    mean_PI += kept.before_I / self._positions_P[:, None]
                inputs[id(kept.at_PI)] = (
                    torch.from_numpy(kept.at_PI),
                    None if mean_PI is None else torch.from_numpy(mean_PI),
                )
            squares = list(kept.squares.values())
            found[name] = LayerInputs(*inputs[id(kept.at_PI)], sum(squares) / max(1, len(squares)))
        return found

    def _keep(self, name: str, source: int) -> None:
        """Keeps the input of a layer in this piece, unless an earlier layer has the same."""
        first = self._inputs_seen.setdefault(source, name)
        if first != name and first in self._layers:
            if name not in self._layers:
                own = self._layers[first]
                self._layers[name] = _Kept(own.at_PI, own.mean_PI, own.before_I)
            if self._layers[name].at_PI is self._layers[first].at_PI:
                return
        x_TI = self._tensors.values(source)
        columns = self._of_columns(name, len(x_TI))
        kept = self._layers.get(name)
        if kept is None:
            size = x_TI.shape[1]
            at_PI, before_I = np.zeros((self._count, size), np.float32), np.zeros(size, np.float32)
            kept = self._layers[name] = _Kept(at_PI, np.zeros_like(at_PI) if self._means else None, before_I)
        x_TI = x_TI if len(columns) == len(self._piece.token_T) else _spread(x_TI, columns, len(self._piece.token_T))
        kept.at_PI[self._numbers] = x_TI[self._tokens]
        if kept.mean_PI is None:
            return
        if self._is_common:
            kept.before_I += x_TI.sum(0)
        elif self._of_part:
            numbers, weights_PT = self._shares()
            kept.mean_PI[numbers] += weights_PT @ x_TI

    def _measure(self, name: str, node: int) -> None:
        values = self._tensors.values(node)
        row_of = {token: row for row, token in enumerate(self._of_columns(name, len(values)).tolist())}
        for number, token in zip(self._numbers.tolist(), self._tokens.tolist(), strict=True):
            self._layers[name].squares[number] = float(np.square(values[row_of[token]]).mean())

    def _of_columns(self, name: str, count: int) -> Numbers:
        """Returns the token of the piece that each vector of a layer is of."""
        piece = self._piece
        for tokens in (np.arange(len(piece.token_T)), np.flatnonzero(piece.output_T)):
            if len(tokens) == count:
                return tokens
        raise TypeError(f"{name} has {count} vectors for {len(piece.token_T)} tokens")

    def _shares(self) -> tuple[Numbers, Numbers]:
        """Returns (kept places of the part, the weight of each token of the piece in their means)."""
        if self._weights is None:
            piece = self._piece
            number_P, seq_P, position_P = np.array(self._of_part).T
            is_used_TS = np.arange(piece.seq_TS.shape[1]) < piece.count_T[:, None]
            member_TS = np.zeros((len(piece.token_T), len(piece.texts)), bool)
            token_U, slot_U = np.nonzero(is_used_TS)
            member_TS[token_U, piece.seq_TS[token_U, slot_U]] = True
            seen_PT = member_TS[:, seq_P].T & (piece.position_T <= position_P[:, None])
            self._weights = number_P, (seen_PT / (position_P[:, None] + 1)).astype(np.float32)
        return self._weights

    def _vectors(self, of_texts: Sequence[Tensor]) -> Numbers:
        """Returns the vector that is added at each token of the piece, (T, M)."""
        piece = self._piece
        rows = []
        for seq, position in zip(piece.seq_TS[:, 0].tolist(), piece.position_T.tolist(), strict=True):
            vectors = of_texts[piece.texts[seq]]
            rows.append(vectors[position if len(vectors) > 1 else 0])
        return torch.stack(rows).float().numpy()


def _spread(x_CI: Numbers, tokens_C: Numbers, count: int) -> Numbers:
    """Returns vectors of some tokens in their places among all, with zeros at the others."""
    spread = np.zeros((count, x_CI.shape[1]), np.float32)
    spread[tokens_C] = x_CI
    return spread
