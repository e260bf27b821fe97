"""The interface of a tuned parameter: temporary perturbations during a step, and permanent updates."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tezo.directions.random import DrawKey, generator
from tezo.directions.spaces import Direction, FixedFactors, row_tiles
from tezo.directions.targets import Target
from tezo.forward import rounding
from tezo.forward.interception import Interception
from tezo.forward.state_dict import InStateDict
from tezo.system.errors import RequestError


@dataclass(frozen=True)
class Shift:
    """The perturbation W_t + scale * Z, with Z a direction.

    With low-rank matrices and vectors it is W_t + scale * Z_i for each of several examples i, one block of rows each.
    """

    direction: Direction
    scale: float
    examples: Sequence[int] = range(1)


class PerturbedParameter(ABC):
    """One tuned parameter, W_t.

    The order of a step is: `refresh`; `set_perturbations` with +rho and -rho, in one pass or in two;
    `set_perturbations` with no shifts; then the update rule calls `add_`. Between steps the model computes with W_t.

    Attributes:
        target: the parameter.
        shifts: the perturbations that are set.
        key: of the step; stochastic rounding is drawn from it.
    """

    way = "in forward"
    """How perturbations are applied, in words."""
    writes_weight = True
    """Whether perturbations or updates change the stored tensor."""
    folds_into_weight = False
    """Whether a refresh of the fixed factors writes the stored tensor."""
    most_kept = 0
    """Largest rank of the change that was trained with earlier factors and is stored beside the weight."""
    in_blocks = False
    """Whether one forward pass can apply several shifts, each to one block of rows."""
    draws_for_all_blocks = False
    """Whether applying several shifts of one direction in one pass saves an expensive draw."""
    was_called = False
    """Whether a forward pass has used a perturbation; always True for a parameter that is perturbed in place."""
    in_storage = False
    """Whether perturbations are in the stored tensor, where code that reads the tensor past its modules meets them."""
    compression_error = 0.0
    """Sum of the relative errors (Frobenius norm) of all compressions of the trained change."""
    owner: Callable[[], object | None] = staticmethod(lambda: True)
    """None once the optimizer is gone, so that nobody can call `close`; see `settle`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        settle([target.parameter], keep=True)
        if is_changed_beside([target.parameter]):
            raise RequestError(
                f"{target.name} has been tuned by another optimizer, whose change is not in the weights; call merge() "
                "of that optimizer to keep the change, or close() to discard it."
            )
        _open.add(self)
        self._handles: list[RemovableHandle | Interception | InStateDict] = [
            InStateDict(target, self.merged, self.replaced)
        ]
        self.shifts: tuple[Shift, ...] = ()
        self.key = DrawKey(0, 0)
        self._rounding: tuple[DrawKey, torch.Generator] | None = None

    def refresh(self, key: DrawKey, origin: FixedFactors | None) -> None:
        """Prepares for the step of `key`.

        Where its directions have other fixed factors than those before, the change trained with these is moved into
        the stored tensor, or compressed and stored beside it.

        Args:
            key: of the step.
            origin: zero of the space of its directions; None: they are dense.
        """
        del origin
        self.key = key

    @abstractmethod
    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        """Sets the perturbations of the blocks of rows, those of `shifts[0]` first; with no shifts, all use W_t."""

    def add_(self, direction: Direction, rows: slice, delta: Tensor, alpha: float) -> None:
        """Adds alpha * (the point of the direction's space with coefficient `delta` at `rows`) to W_t.

        Here the coefficient is that of `Dense`, and a half-precision weight is rounded stochastically.
        """
        del direction
        rounding.add_(self.weight[rows], delta, alpha, self.rounding)

    def decay_(self, factor: float) -> None:
        """Multiplies the trained values by `factor`; here the stored tensor."""
        self.decay_weight_(factor)

    def decay_weight_(self, factor: float) -> None:
        """Multiplies the stored tensor by `factor`; a half-precision weight is rounded stochastically."""
        for rows in row_tiles(self.target.stored_shape, self.weight.device):
            tile = self.weight[rows]
            rounding.add_(tile, tile.to(self.target.state_dtype), factor - 1, self.rounding)

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors of the trained change that is not in the stored tensor, by key."""
        return {}

    def load_state(self, origin: Callable[[int | None], FixedFactors | None], state: Mapping[str, Tensor]) -> None:
        """Restores the result of `state`; `origin` returns zero of the space of a refresh step, None for the last."""
        del origin, state

    def trained(self) -> list[tuple[Tensor, Tensor]]:
        """Returns (left, right) pairs; the change stored beside the stored tensor is the sum of left @ right^T."""
        return []

    def changes(self) -> list[tuple[Tensor, Tensor] | None]:
        """Returns factors (left, right) of the difference of W_t, perturbed, and the stored tensor, for each block.

        None: there is no difference. One block: it is that of all rows.

        Raises:
            RequestError: the change is not low-rank.
        """
        raise RequestError(
            f"{self.target.name} is perturbed {self.way}, and an engine takes low-rank changes of linear layers alone; "
            "use gauss-newton, tezo, lozo or subzo, or method.targets=all-linear."
        )

    def beside(self, left_MK: Tensor, right_NK: Tensor) -> AbstractContextManager[None]:
        """While open, W_t has left @ right^T added.

        Raises:
            RequestError: the change is not beside the stored tensor.
        """
        del left_MK, right_NK
        raise RequestError(
            f"{self.target.name} is perturbed {self.way}, and a trial change must be beside it; set "
            "method.in_forward=true, or method.targets=all-linear."
        )

    def fold(self) -> None:  # noqa: B027 - most parameters have nothing beside the stored tensor
        """Adds the change stored beside the stored tensor to it; here there is none."""

    def merged(self) -> Tensor | None:
        """Returns a new tensor with W_t; None: W_t is the stored tensor. Refuses if it is packed, or perturbed now."""
        if self.in_storage:
            self._check_between_steps("state_dict")
        return None

    def replaced(self) -> None:
        """Prepares for the stored tensor to be loaded anew: W_t is then the loaded one. Refuses if it is perturbed."""
        if self.in_storage or not self.writes_weight:
            self._check_between_steps("load_state_dict")

    def _check_between_steps(self, call: str) -> None:
        if self.shifts:
            raise RequestError(
                f"{call} was called by the closure of a step, while {self.target.name} is perturbed; call it between "
                "steps."
            )

    def close(self) -> None:
        """Removes the hooks; changes to the stored tensor remain."""
        for handle in self._handles:
            handle.remove()
        _open.discard(self)

    @property
    def weight(self) -> Tensor:
        """The stored tensor as a matrix (M, N) or a vector (M,)."""
        data = self.target.parameter.data
        return data if data.ndim == 2 else data.view(self.target.stored_shape)

    @property
    def rounding(self) -> torch.Generator:
        """The step's generator for stochastic rounding."""
        if self._rounding is None or self._rounding[0] is not self.key:
            device, key = self.target.parameter.device, self.key
            draw = generator(device, seed=key.seed, step=key.step, name=self.target.name, role="rounding")
            self._rounding = key, draw
        return self._rounding[1]


_open: WeakSet[PerturbedParameter] = WeakSet()
"""All instances that are not closed."""


def open_on(parameters: Iterable[Tensor]) -> list[PerturbedParameter]:
    """Returns the perturbed parameters of open optimizers for any of these."""
    asked = {id(parameter) for parameter in parameters}
    return [each for each in _open if id(each.target.parameter) in asked]


def is_changed_beside(parameters: Iterable[Tensor]) -> bool:
    """Returns whether an open optimizer has trained a change of any of these that is not in the stored tensors."""
    return any(each.state() for each in open_on(parameters))


def settle(parameters: Iterable[Tensor], *, keep: bool) -> bool:
    """Closes perturbed parameters left by deleted optimizers; returns whether a change was kept.

    With `keep` their changes are added to the stored tensors, else dropped.

    Raises:
        RequestError: they cannot be added, because the tensors are packed.
    """
    ours = open_on(parameters)
    if any(each.owner() is not None and each.state() for each in ours):
        gc.collect()  # its optimizer may be gone but for a cycle
    left = [each for each in ours if each.owner() is None]
    changed = [each for each in left if keep and each.state()]
    for each in changed:
        if not each.target.is_writable:
            raise RequestError(
                f"{each.target.name} has been tuned by a run or optimizer that is gone, and is packed, so that it "
                "cannot take the change; load the model again."
            )
    with torch.inference_mode(False), torch.no_grad():
        for each in changed:
            each.fold()
    for each in left:
        each.close()
    return bool(changed)


def require_writable(target: Target, reason: str) -> None:
    """Raises a `RequestError` if an in-place add to the stored tensor fails or has no effect.

    Both happen with quantised and offloaded tensors, independent of the dtype that they report. Therefore the tensor
    must be a plain torch tensor, and an add to one entry is tried, checked and undone. `reason` is the subject of the
    message, such as "this method".
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
        stored = f"{type(target.parameter).__name__}, {data.dtype}, {data.device}"
        raise RequestError(
            f"{reason} writes to weights, and {target.name} ({stored}) cannot be written in place; "
            "use head-feedback, tezo, tezo-m or tezo-cadam on linear layers, or a plain float base."
        )
