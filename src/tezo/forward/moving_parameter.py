"""How one parameter is moved: shown to the model perturbed, and stepped for good."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tezo.directions.perturbations import DrawKey
from tezo.directions.spaces import Direction, row_tiles
from tezo.directions.targets import Target
from tezo.errors import RequestError
from tezo.forward.interception import Interception
from tezo.numerics import rounding
from tezo.numerics.random import generator


@dataclass(frozen=True)
class Shift:
    """W_t + scale * Z, with Z a direction."""

    direction: Direction
    scale: float


class MovingParameter(ABC):
    """One tuned parameter, W_t.

    A step goes: `begin`, then `show` with plus and minus rho, in one pass or one after the other, `show` with
    nothing, then the update rule's `add_` or `write_`. Between steps the model computes with W_t.
    """

    application = "in forward"
    """How it is moved, in words."""
    writes_weight = True
    """Whether showing or stepping the parameter changes the stored tensor."""

    in_blocks = False
    """Whether one forward pass can show several shifts, each to its block of the rows."""

    draws_for_all_blocks = False
    """Whether a pass that shows several shifts of one direction saves a costly draw."""

    was_called = False
    """Whether a forward pass has met what was shown; one that is moved where it lies is always taken to be met."""

    def __init__(self, target: Target) -> None:
        self.target = target
        if is_changed_beside([target.parameter]):
            raise RequestError(
                f"{target.name} has been tuned by another optimizer, whose change is not in the weights; call that "
                "one's merge() to keep it, or close() to drop it."
            )
        _open.add(self)
        self._handles: list[RemovableHandle | Interception] = []
        self._moment = DrawKey(0, 0)
        self._rounding: torch.Generator | None = None

    def begin(self, direction: Direction, key: DrawKey) -> None:
        """Makes ready for a step whose directions share `direction`'s fixed factors."""
        del direction
        self._moment = key
        self._rounding = None

    @abstractmethod
    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        """Lets block g of the rows meet the parameter at `shifts[g]`; with no shifts, all rows meet W_t itself."""

    def add_(self, direction: Direction, rows: slice, delta: Tensor, alpha: float) -> None:
        """W += alpha * (the point of `direction`'s space with coefficient `delta` at `rows`); here a dense one."""
        del direction
        self.write_(rows, delta, alpha)

    def decay_(self, factor: float) -> None:
        """Multiplies what is trained by `factor`: here the stored tensor."""
        self.decay_weight_(factor)

    def state(self) -> dict[str, Tensor]:
        """What has been trained and is not in the stored tensor."""
        return {}

    def load_state(self, draw: Callable[[int | None], Direction], state: dict[str, Tensor]) -> None:
        """Puts `state` back; `draw` gives a direction with the fixed factors of a step, or None: of the last one."""
        del draw, state

    folds_into_weight = False
    """Whether new fixed factors mean that the stored tensor is written."""
    compression_error = 0.0
    """Lost by compressing what was trained, each time as a share of its norm, added up."""

    def trained(self) -> list[tuple[Tensor, Tensor]]:
        """(left, right) pairs whose products add up to what was trained beside the stored tensor; here none."""
        return []

    def fold(self) -> None:  # noqa: B027 - most parameters have nothing beside the stored tensor
        """Writes what was trained beside the stored tensor into it; here nothing."""

    def close(self) -> None:
        """Leaves the module as it was found, but for the trained values in stored tensors."""
        for handle in self._handles:
            handle.remove()
        _open.discard(self)

    @property
    def weight(self) -> Tensor:
        """The stored tensor as a matrix, or a vector."""
        data = self.target.parameter.data
        return data if data.ndim == 2 else data.view(self.target.stored_shape)

    def row_tiles(self) -> Iterator[slice]:
        """The rows of the stored tensor, a tile's worth at a time."""
        return row_tiles(self.target.stored_shape)

    def write_(self, rows: slice, delta: Tensor, alpha: float) -> None:
        """Stored tensor[rows] += alpha * delta, without bias below float32."""
        rounding.add_(self.weight[rows], delta, alpha, self.rounding)

    def decay_weight_(self, factor: float) -> None:
        """Stored tensor *= factor, without bias below float32."""
        for rows in self.row_tiles():
            tile = self.weight[rows]
            rounding.add_(tile, tile.to(self.target.state_dtype), factor - 1, self.rounding)

    @property
    def rounding(self) -> torch.Generator:
        """The step's generator for stochastic rounding."""
        if self._rounding is None:
            key, parameter = self._moment, self.target.parameter
            self._rounding = generator(
                parameter.device, seed=key.seed, step=key.step, name=self.target.name, role="rounding"
            )
        return self._rounding


_open: WeakSet[MovingParameter] = WeakSet()
"""Those that are not closed."""


def is_changed_beside(parameters: Iterable[Tensor]) -> bool:
    """Whether an open optimizer has trained a change of any of these that is not in the stored tensors."""
    asked = {id(parameter) for parameter in parameters}
    return any(id(moving.target.parameter) in asked and moving.state() for moving in _open)


def require_writable(target: Target, reason: str) -> None:
    """An error where an in-place add to the stored tensor would be refused or lost in silence.

    Quantised and offloaded tensors do either, whatever dtype they report, so this asks for a plain torch
    tensor and then tries: add to one entry, compare, restore.
    """
    data = target.parameter.data
    plain = target.is_writable
    if plain and data.numel() > 0:
        entry = data.view(-1)[:1] if data.is_contiguous() else data[(slice(0, 1),) * data.ndim]
        before = entry.clone()
        entry.add_(1 + before.abs())
        plain = not torch.equal(entry, before)
        entry.copy_(before)
    if not plain:
        found = f"{type(target.parameter).__name__}, {data.dtype}, {data.device}"
        raise RequestError(
            f"{reason} writes to weights, and {target.name} ({found}) cannot be written in place; "
            "use lozo-adam, tezo, tezo-m or tezo-cadam on linear layers, or a plain float base."
        )
