"""The last blocks of a decoder as a function of each token alone, rebuilt from the inputs of their layers.

A pass shows the inputs of linear layers at P places, and each layer can be computed alone. Attention and an MLP add
their outputs y to the residual stream h, and a norm n = w * h / |h| (root mean square) stands before each and before
the head. So the stream before the first of these blocks, h_0, and behind the last one, h_1, are

    h_1 - h_0 = S, the sum of all y,   h_1 = r_1 v_1 n_1,   h_0 = r_0 v_0 n_0,

n_1 and n_0 known, r a number for each place, v one for each coordinate: alternating least squares find both. From there
on the stream is a sum, the weights of each norm are a regression, and the activation is the one of `ACTIVATIONS` that
leads from the inputs of an MLP to those of its last layer. Each of these is checked: blocks that are built otherwise
are not rebuilt.

The vectors v, norms and activations are found once. A later pass, with factors U V^T beside the layers that write the
stream, shows r, and with it the stream at its places. With the outputs of attention held as they were there, the inputs
of the head follow as a function of the factors. In the model the outputs of attention would change too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor
from torch.nn import functional

from tezo.directions.bases.basis import input_size, output_size
from tezo.directions.targets import Target
from tezo.forward.layers import LayerFunction, NoDerivativeError

ALTERNATIONS = 40
"""Rounds of alternating least squares, each over all places and then over all coordinates."""
CLOSE = 0.1
"""Largest part of what is rebuilt that may be missed. Engines round the inputs of layers in few bits."""

PLACES_AT_ONCE = 512
"""Places whose gradient is computed at a time: each keeps about two numbers for each of its inputs meanwhile."""
CHECKED = 8
"""Places at which the derivatives of layers are checked."""

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: tuple[Activation, ...] = (
    functional.silu,
    lambda x: functional.gelu(x, approximate="tanh"),
    functional.gelu,
    functional.relu,
    lambda x: functional.relu(x).square(),
)
"""Functions between the first and the last layers of an MLP."""

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""Name of a layer -> (U (D, r), V (I, r))."""
FunctionOf = Callable[[Target], LayerFunction]
"""Layer -> the layer as a function."""


@dataclass(frozen=True)
class Block:
    """The linear layers of a block, as their sizes and order suggest.

    Attributes:
        entrance: layer that reads the stream first.
        attention: layer by which attention writes to the stream.
        readers: layers that an MLP begins with.
        mlp: layer by which it writes to the stream.
    """

    entrance: Target
    attention: Target
    readers: Sequence[Target]
    mlp: Target

    @property
    def writers(self) -> tuple[Target, Target]:
        """The layers that write to the stream."""
        return self.attention, self.mlp


@dataclass(frozen=True)
class Mlp:
    """A rebuilt MLP, a = f(x_1) x_2 or f(x_1), y = W a + b.

    Attributes:
        norm_D: weights of the norm before it.
        readers: layers that compute x_1 and x_2 of its inputs.
        order: number of x_1 among what they compute, then that of x_2, if there is one.
        last: the layer that writes to the stream.
        activation: f.
    """

    norm_D: Tensor
    readers: Sequence[LayerFunction]
    order: Sequence[int]
    last: LayerFunction
    activation: Activation

    def inside(self, h_PD: Tensor) -> Tensor:
        """Returns the inputs of the last layer, (P, I)."""
        n_PD = self.norm_D * normalised(h_PD)
        return gated([reader(n_PD) for reader in self.readers], self.order, self.activation)


def gated(outputs: Sequence[Tensor], order: Sequence[int], activation: Activation) -> Tensor:
    """Returns f(x_1) x_2 or f(x_1), of the outputs (P, O) of the readers of an MLP; one may compute both at once."""
    if len(outputs) < len(order):
        outputs = outputs[0].chunk(2, 1)
    first, *beside = (outputs[i] for i in order)
    return activation(first) if not beside else activation(first) * beside[0]


def name_of(target: Target) -> str:
    """Returns the name of the module of a layer."""
    return target.sites[0].name


def last_blocks(targets: Sequence[Target], size: int) -> list[Block]:
    """Returns the blocks at the end of a model, the first one first.

    Args:
        targets: all linear layers, in the order of the model.
        size: D, of the residual stream.
    """
    found: list[Block] = []
    end = len(targets)
    while end:
        mlp, start = targets[end - 1], end - 1
        sizes = (input_size(mlp), 2 * input_size(mlp))
        while start and _reads(targets[start - 1], size) and output_size(targets[start - 1]) in sizes:
            start -= 1
        readers, inside = targets[start : end - 1], input_size(mlp) != size
        before = next((i for i in reversed(range(start)) if _ends(targets, i, size)), -1) + 1
        span = targets[before:start]
        writers = [target for target in span if output_size(target) == size]
        others = [target for target in span if _reads(target, size)]
        if output_size(mlp) != size or not inside or len(readers) not in (1, 2) or not writers or len(others) < 2:
            break
        entrance = next(target for target in others if target is not writers[-1])
        found.insert(0, Block(entrance, writers[-1], readers, mlp))
        end = before
    return found


def _reads(target: Target, size: int) -> bool:
    return input_size(target) == size


def _ends(targets: Sequence[Target], i: int, size: int) -> bool:
    """Returns whether a layer may be the last one of an MLP."""
    inside = input_size(targets[i])
    return output_size(targets[i]) == size and inside != size and i > 0 and (
        output_size(targets[i - 1]) in (inside, 2 * inside) and _reads(targets[i - 1], size)
    )  # fmt: skip


def normalised(h_PD: Tensor) -> Tensor:
    """Returns h by its root mean square."""
    return h_PD * h_PD.square().mean(1, keepdim=True).rsqrt()


def missed(found: Tensor, real: Tensor) -> float:
    """Returns |found - real| / |real|."""
    return float(torch.linalg.vector_norm(found - real) / torch.linalg.vector_norm(real).clamp_min(1e-30))


def ends_of_stream(n_PD: Tensor, n_0_PD: Tensor, sum_PD: Tensor, by_2D: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the stream behind the last block, h_1 (P, D) in float64, and (v_1, v_0), (2, D).

    Args:
        n_PD: inputs of the head.
        n_0_PD: inputs of the first layer of the first block.
        sum_PD: S.
        by_2D: (v_1, v_0), if they are known from other places.

    Raises:
        NotRebuiltError: it has not these ends.
    """
    if n_PD.shape != sum_PD.shape:
        raise NotRebuiltError("the blocks do not write to the inputs of the head")
    a_PD, b_PD, sum_PD = n_PD.double(), -n_0_PD.double(), sum_PD.double()
    v_2D = torch.ones(2, a_PD.shape[1], dtype=torch.float64) if by_2D is None else by_2D
    r_2P = _pairs(a_PD * v_2D[0], b_PD * v_2D[1], sum_PD, 1)
    for _ in range(ALTERNATIONS if by_2D is None else 0):
        v_2D = _pairs(a_PD * r_2P[0, :, None], b_PD * r_2P[1, :, None], sum_PD, 0)
        r_2P = _pairs(a_PD * v_2D[0], b_PD * v_2D[1], sum_PD, 1)
    h_PD = a_PD * v_2D[0] * r_2P[0, :, None]
    h_0_PD = -b_PD * v_2D[1] * r_2P[1, :, None]
    if missed(h_PD - h_0_PD, sum_PD) >= CLOSE:
        raise NotRebuiltError("the outputs of the blocks do not sum up to the stream")
    return h_PD, v_2D


def _pairs(a_PD: Tensor, b_PD: Tensor, sum_PD: Tensor, dim: int) -> Tensor:
    """Returns (s, t) with the smallest |s a + t b - sum| along a dimension."""
    aa, bb, ab, a_s, b_s = (
        (x * y).sum(dim) for x, y in ((a_PD, a_PD), (b_PD, b_PD), (a_PD, b_PD), (a_PD, sum_PD), (b_PD, sum_PD))
    )
    by = (aa * bb - ab.square()).clamp_min(1e-12 * aa * bb).clamp_min(1e-30)
    return torch.stack([(a_s * bb - b_s * ab) / by, (b_s * aa - a_s * ab) / by])


class LastBlocks:
    """The last blocks of a model, rebuilt.

    Args:
        blocks: their layers.
        inputs: module name -> inputs of the layer, (P, I): of `watched`.
        n_PD: inputs of the head.
        function_of: returns a layer as a function.

    Attributes:
        size: root mean square of the stream behind the last block.

    Raises:
        NotRebuiltError: the blocks are built otherwise.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        inputs: Mapping[str, Tensor],
        n_PD: Tensor,
        function_of: FunctionOf,
    ) -> None:
        self._blocks = blocks
        writers = [target for block in blocks for target in block.writers]
        self._writers = {target.name: function_of(target) for target in writers}
        added = {target.name: self._writers[target.name](inputs[name_of(target)]) for target in writers}
        total_PD = torch.stack([*added.values()]).sum(0)
        h_1_PD, self._by_2D = ends_of_stream(n_PD, inputs[name_of(blocks[0].entrance)], total_PD)
        h_PD, self.size = (h_1_PD - total_PD).float(), float(h_1_PD.square().mean().sqrt())
        self._mlps: list[Mlp] = []
        for block in blocks:
            h_PD = h_PD + added[block.attention.name]
            self._mlps.append(_mlp(block, h_PD, inputs, function_of, self._writers[block.mlp.name]))
            h_PD = h_PD + added[block.mlp.name]
        self._norm_D = _norm(h_PD, n_PD)

    @staticmethod
    def watched(blocks: Sequence[Block]) -> list[str]:
        """Returns the modules whose inputs must be kept."""
        inner = [[block.attention, block.readers[0], block.mlp] for block in blocks]
        return [name_of(target) for target in [blocks[0].entrance, *(target for part in inner for target in part)]]

    def seen(self, inputs: Mapping[str, Tensor], n_PD: Tensor, factors: Factors) -> "Stream":
        """Returns the stream at some places, as a pass with these factors beside the layers shows it.

        Args:
            inputs: module name -> inputs of the layer, (P, I): of `watched`.
            n_PD: inputs of the head.
            factors: of layers that write to the stream.

        Raises:
            NotRebuiltError: the outputs of the blocks do not sum up to the stream.
        """
        total_PD, attention = torch.zeros_like(n_PD), []
        for block in self._blocks:
            x_PI = inputs[name_of(block.attention)]
            attention.append((x_PI, self._writers[block.attention.name](x_PI)))
            total_PD += attention[-1][1] + self._writers[block.mlp.name](inputs[name_of(block.mlp)])
            for target in block.writers:
                total_PD += _beside(inputs[name_of(target)], factors.get(target.name))
        h_1_PD, _ = ends_of_stream(n_PD, inputs[name_of(self._blocks[0].entrance)], total_PD, self._by_2D)
        return Stream(self._blocks, self._mlps, self._norm_D, (h_1_PD - total_PD).float(), attention, n_PD)


@dataclass(frozen=True)
class Stream:
    """The stream at P places, with the outputs of attention held.

    Attributes:
        blocks: rebuilt blocks.
        mlps: of each block.
        norm_D: weights of the norm before the head.
        start_PD: the stream before the first block.
        attention: of each block, inputs (P, I) and outputs (P, D) of the layer by which it writes, without factors.
        head_PD: inputs of the head.
    """

    blocks: Sequence[Block]
    mlps: Sequence[Mlp]
    norm_D: Tensor
    start_PD: Tensor
    attention: Sequence[tuple[Tensor, Tensor]]
    head_PD: Tensor

    def at(self, places_P: Tensor) -> "Stream":
        """Returns the stream at some of the places."""
        attention = [(x_PI[places_P], y_PD[places_P]) for x_PI, y_PD in self.attention]
        return replace(self, start_PD=self.start_PD[places_P], attention=attention, head_PD=self.head_PD[places_P])

    def of(self, factors: Factors, added: Mapping[str, Tensor] | None = None) -> Tensor:
        """Returns the inputs of the head, (P, D), with U V^T beside these layers, and (P, D) added to outputs."""
        h_PD, also = self.start_PD, added or {}
        for block, (x_PI, y_PD), mlp in zip(self.blocks, self.attention, self.mlps, strict=True):
            at, then = block.attention.name, block.mlp.name
            h_PD = h_PD + y_PD + _beside(x_PI, factors.get(at)) + also.get(at, 0.0)
            a_PI = mlp.inside(h_PD)
            h_PD = h_PD + mlp.last(a_PI) + _beside(a_PI, factors.get(then)) + also.get(then, 0.0)
        return self.norm_D * normalised(h_PD)

    def gradients(self, rows_CD: Tensor) -> dict[str, Tensor]:
        """Returns the mean over the places of the gradient of d_c . n by the outputs of each layer that writes h.

        Args:
            rows_CD: d.

        Returns:
            Parameter name -> (D, C), float64.
        """
        classes, places = len(rows_CD), len(self.start_PD)
        names = [writer.name for block in self.blocks for writer in block.writers]
        shifts = {name: torch.zeros_like(rows_CD).requires_grad_() for name in names}
        class_X, place_X = (each.flatten() for each in torch.meshgrid(
            torch.arange(classes), torch.arange(places), indexing="ij"))  # fmt: skip
        for part_X in torch.split(torch.arange(len(place_X)), PLACES_AT_ONCE):
            class_P, stream = class_X[part_X], self.at(place_X[part_X])
            with torch.enable_grad():
                n_PD = stream.of({}, {name: shift_CD[class_P] for name, shift_CD in shifts.items()})
                torch.autograd.backward((n_PD * rows_CD[class_P]).sum() / places, inputs=[*shifts.values()])
        return {name: shift_CD.grad.T.double() for name, shift_CD in shifts.items() if shift_CD.grad is not None}

    def check(self, found_PD: Tensor) -> None:
        """Checks what `of` returns with the factors of the pass.

        Raises:
            NotRebuiltError: it is not what the head had.
        """
        if missed(found_PD, self.head_PD) > CLOSE:
            raise NotRebuiltError("what is rebuilt differs from the inputs of the head")


def _beside(x_PI: Tensor, factors: tuple[Tensor, Tensor] | None) -> Tensor | float:
    """Returns U V^T x."""
    return 0.0 if factors is None else (x_PI @ factors[1]) @ factors[0].T


class NotRebuiltError(Exception):
    """Blocks are built in another way; the message says where."""


def _norm(h_PD: Tensor, n_PD: Tensor) -> Tensor:
    """Returns the weights of the norm that makes n of h, (D,)."""
    unit_PD = normalised(h_PD)
    norm_D = (unit_PD * n_PD).sum(0) / unit_PD.square().sum(0).clamp_min(1e-30)
    if missed(norm_D * unit_PD, n_PD) > CLOSE:
        raise NotRebuiltError("a norm is not by the root mean square")
    return norm_D


def _mlp(block: Block, h_PD: Tensor, inputs: Mapping[str, Tensor], function_of: FunctionOf, last: LayerFunction) -> Mlp:
    """Returns the MLP that leads from the stream to the inputs of its last layer."""
    n_PD, a_PI = inputs[name_of(block.readers[0])], inputs[name_of(block.mlp)]
    norm_D, readers = _norm(h_PD, n_PD), [function_of(reader) for reader in block.readers]
    outputs = [reader(n_PD) for reader in readers]
    count = sum(x_PO.shape[1] for x_PO in outputs) // a_PI.shape[1]
    if len(outputs) > 1 and {x_PO.shape[1] for x_PO in outputs} != {a_PI.shape[1]}:
        raise NotRebuiltError("an MLP has layers of other sizes")
    for function, x_PI in [*((reader, n_PD) for reader in readers), (last, a_PI)]:
        _check_derivative(function, x_PI[:CHECKED])
    tried = [
        (missed(gated(outputs, order, activation), a_PI), order, activation)
        for order in permutations(range(count))
        for activation in ACTIVATIONS
    ]
    miss, order, activation = min(tried, key=lambda one: one[0])
    if miss > CLOSE:
        raise NotRebuiltError("no known activation leads through an MLP")
    return Mlp(norm_D, readers, order, last, activation)


def _check_derivative(function: LayerFunction, x_PI: Tensor) -> None:
    """Checks that <W^T y, x> = |y|^2 for y = W x. A packed layer may have no derivative, and a change beside it one."""
    with torch.enable_grad():
        x_PI = x_PI.detach().requires_grad_()
        found_PO = function(x_PI)
    y_PO = found_PO.detach() - function(torch.zeros_like(x_PI)).detach()
    try:
        (g_PI,) = torch.autograd.grad(found_PO, x_PI, y_PO)
    except NoDerivativeError:
        g_PI = torch.zeros_like(x_PI)
    size = float(y_PO.square().sum())
    if abs(float((g_PI * x_PI.detach()).sum()) - size) > CLOSE * size:
        raise NotRebuiltError("a layer has no derivative by its inputs")
