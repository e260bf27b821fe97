"""The interface of a tuned parameter: temporary perturbations during a step, and permanent updates.

And what a step needs around them: signals that wait, evaluation mode, and state dicts that have the trained change.
"""

import gc
import signal
import threading
import weakref
from _signal import getsignal  # type: ignore[import-not-found]  # the public one is 80 times as slow
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tezo.directions.perturbation import DrawKey
from tezo.directions.random import generator
from tezo.directions.spaces import Direction, row_tiles
from tezo.directions.targets import Target
from tezo.forward import rounding
from tezo.forward.interception import Interception, Uncopied
from tezo.system.errors import RequestError

_NUMBERS = tuple(map(int, signal.valid_signals()))
"""All signals of this system."""
_INSISTENT = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals of which a second one does not wait: a closure may hang."""

_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
"""Signal -> the handler in Python that `_wait` stands for."""
_waiting: list[tuple[int, FrameType | None]] = []
"""Signals that came during a step and wait, in order."""
_state = {"waits": False, "commits": False}
"""Whether signals wait, and whether the update has begun, in which a second signal waits too."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Makes the handlers of signals wait for `let_interrupt`, or for the end, while open.

    Python runs a handler between any two instructions. One that raises, as Ctrl-C raises KeyboardInterrupt, would end a
    step between a perturbation and its removal, or between the updates of two parameters. A second SIGINT or SIGTERM
    does not wait, until the update has begun.
    """
    if _state["waits"] or threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread alone
        return
    try:
        _state.update(waits=True, commits=False)
        _take_over()
        yield
        let_interrupt()
    finally:
        _state["waits"] = False
        # where a handler raises in between, `_wait` stays in the place of others, and passes their signals on
        for number, handler in list(_handlers.items()):
            if getsignal(number) is _wait:
                signal.signal(number, handler)
        _handle_waiting()


def let_interrupt(*, last: bool = False) -> None:
    """Runs the handlers that wait; one of them may raise. The `last` one precedes the update, which no signal ends."""
    if _waiting and _state["waits"]:
        _state["waits"] = False
        try:
            _handle_waiting()
        finally:
            _state["waits"] = True
            _take_over()  # from handlers that those that waited have set
    if last:
        _state["commits"] = True


def _take_over() -> None:
    for number in _NUMBERS:
        handler = getsignal(number)
        if callable(handler) and handler is not _wait:
            _handlers[number] = handler
            signal.signal(number, _wait)


def _wait(number: int, frame: FrameType | None) -> None:
    before = [one for one in _waiting if one[0] == number]
    insists = bool(before) and number in _INSISTENT and not _state["commits"]
    if _state["waits"] and not insists:
        _waiting.append((number, frame))
        return
    for one in before:
        _waiting.remove(one)
        _handle(*one)
    _handle(number, frame)


def _handle_waiting() -> None:
    """Runs the handler of each signal that waits; where several raise, the last error has the others as its context."""
    if _waiting:
        one = _waiting.pop(0)
        try:
            _handle(*one)
        finally:
            _handle_waiting()


def _handle(number: int, frame: FrameType | None) -> None:
    own = getsignal(number)
    handler = _handlers.get(number) if own is _wait else own
    if callable(handler):
        handler(number, frame)
    elif own == signal.SIG_DFL:  # set by the handler of the first signal
        signal.raise_signal(number)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts all modules into evaluation mode while open, so that all evaluations of a step use the same function."""
    was_training = [module for module in model.modules() if module.training]
    for module in was_training:
        module.training = False
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def require_plain(target: Target) -> None:
    """Raises a `RequestError` if a state dict cannot have the weight with its change added."""
    if not target.is_writable:
        raise RequestError(
            f"state_dict: the change of {target.name} is beside a weight that is packed, offloaded or sharded, and "
            "cannot be added to it; save the adapter instead (export_adapter of its optimizer, or export of its run)."
        )


class InStateDict(Uncopied):
    """Hooks by which state dicts have what the modules compute with, more than the stored weight.

    `torch.save(model.state_dict())` and `save_pretrained` would else write the untuned weight, and a loaded weight
    would get the change of the one before on top. `merged` returns a new tensor with the values that the modules
    compute with, None for the stored ones; `replaced` is called before stored values are loaded.
    """

    def __init__(self, target: Target, merged: Callable[[], Tensor | None], replaced: Callable[[], object]) -> None:
        self._merged, self._replaced = merged, replaced
        self._last: Callable[[], Tensor | None] = lambda: None
        self._handles: list[RemovableHandle] = []
        for site in target.sites:
            module: Any = site.module
            for name, parameter in module.named_parameters(recurse=False):
                if parameter is target.parameter:
                    self._handles += [
                        module.register_state_dict_post_hook(partial(self._save, name)),
                        module.register_load_state_dict_pre_hook(partial(self._load, name)),
                    ]

    def _save(self, name: str, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        del module
        merged = self._last()
        if merged is None or all(value is not merged for value in state.values()):
            merged = self._merged()
        if merged is not None:
            state[prefix + name] = merged
            self._last = weakref.ref(merged)

    def _load(self, name: str, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        del module
        if prefix + name in state:
            self._replaced()

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


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

    The order of a step is: `begin`; `set_perturbations` with +rho and -rho, in one pass or in two; `set_perturbations`
    with no shifts; then the update rule calls `add_`. Between steps the model computes with W_t.
    """

    way = "in forward"
    """How perturbations are applied, in words."""
    writes_weight = True
    """Whether perturbations or updates change the stored tensor."""
    folds_into_weight = False
    """Whether a refresh of the fixed factors writes the stored tensor."""
    most_kept = 0
    """Largest rank of what was trained with earlier factors and is stored beside the weight."""
    in_blocks = False
    """Whether one forward pass can apply several shifts, each to its own block of rows."""
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
        self._key = DrawKey(0, 0)
        self._rounding: torch.Generator | None = None

    def begin(self, direction: Direction, key: DrawKey) -> None:
        """Prepares for a step whose directions share the fixed factors of `direction`."""
        del direction
        self._key = key
        self._rounding = None

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

    def load_state(self, draw: Callable[[int | None], Direction], state: dict[str, Tensor]) -> None:
        """Restores the result of `state`; `draw` returns a direction with the factors of a step, None for the last."""
        del draw, state

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

    def fold(self) -> None:  # noqa: B027 - most parameters have nothing beside the stored tensor
        """Adds the change stored beside the stored tensor to it; here there is none."""

    def merged(self) -> Tensor | None:
        """Returns a new tensor with W_t; None: W_t is the stored tensor. Refuses if it is packed, or perturbed now."""
        if self.in_storage:
            self._check_between_steps("state_dict")
        return None

    def replaced(self) -> None:
        """Prepares for the stored tensor to be loaded anew: W_t is then what is loaded. Refuses if it is perturbed."""
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
        if self._rounding is None:
            device, key = self.target.parameter.device, self._key
            self._rounding = generator(device, seed=key.seed, step=key.step, name=self.target.name, role="rounding")
        return self._rounding


_open: WeakSet[PerturbedParameter] = WeakSet()
"""All instances that are not closed."""


def open_on(parameters: Iterable[Tensor]) -> list[PerturbedParameter]:
    """Returns what perturbs and updates any of these, of optimizers that are not closed."""
    asked = {id(parameter) for parameter in parameters}
    return [moving for moving in _open if id(moving.target.parameter) in asked]


def is_changed_beside(parameters: Iterable[Tensor]) -> bool:
    """Returns whether an open optimizer has trained a change of any of these that is not in the stored tensors."""
    return any(moving.state() for moving in open_on(parameters))


def settle(parameters: Iterable[Tensor], *, keep: bool) -> bool:
    """Closes what optimizers that are gone have left on these parameters; returns whether a change was kept.

    With `keep` their changes are added to the stored tensors, else dropped.

    Raises:
        RequestError: they cannot be added, because the tensors are packed.
    """
    ours = open_on(parameters)
    if any(moving.owner() is not None and moving.state() for moving in ours):
        gc.collect()  # its optimizer may be gone but for a cycle
    left = [moving for moving in ours if moving.owner() is None]
    changed = [moving for moving in left if keep and moving.state()]
    for moving in changed:
        if not moving.target.is_writable:
            raise RequestError(
                f"{moving.target.name} has been tuned by a run or optimizer that is gone, and is packed, so that it "
                "cannot take the change; load the model again."
            )
    with torch.inference_mode(False), torch.no_grad():
        for moving in changed:
            moving.fold()
    for moving in left:
        moving.close()
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
