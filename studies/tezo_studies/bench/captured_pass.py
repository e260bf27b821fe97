"""Passes of a closure captured once as a CUDA graph, hooks included, and repeated: a candidate for the library.

The library computes the points of all layers before a pass, at the same addresses in each step
(`tezo.forward.together`). A captured pass therefore reads those of the step at hand. It holds for a batch, and for the
factors of directions that are there when it is captured; after a refresh it would compute with the old ones.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tezo.optim.closures import Losses
from tezo.system.errors import RequestError

EAGER = 3
"""Passes of a number of models before theirs is captured: the first step checks what the model reads."""
WAITING = frozenset({"_local_scalar_dense", "nonzero", "unique2", "masked_select"})
"""Functions of ATen that wait for the device, which a capture refuses."""

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records a function; returns a function that runs what was recorded, into the same result each time."""


class CapturedLosses(Losses):
    """A closure whose pass is captured, for each number of models that share it, and repeated from then on.

    Args:
        closure: of one batch.
        capture: records a pass.
    """

    def __init__(self, closure: Losses, capture: Capture) -> None:
        self._closure, self._capture = closure, capture
        self._passes: dict[int, int] = {}
        self._captured: dict[int, Callable[[], Tensor]] = {}

    @property
    def tokens(self) -> int:
        return self._closure.tokens

    def losses(self, copies: int) -> Tensor:
        self._passes[copies] = self._passes.get(copies, 0) + 1
        if self._passes[copies] <= EAGER:
            return self._closure.losses(copies)
        if copies not in self._captured:
            self._captured[copies] = self._capture(lambda: self._closure.losses(copies))
        return self._captured[copies]()


def by_cuda_graph(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Captures a function as a CUDA graph, see `Capture`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def repeat() -> Tensor:
        graph.replay()
        return result

    return repeat


class Refused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises, while entered, at what a capture on `device` refuses: waiting for it, and copies from elsewhere.

    Raises:
        RequestError: it names the function.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        name = func.overloadpacket.__name__
        elsewhere = [one for one in args if isinstance(one, Tensor) and one.device != self._device]
        if name in WAITING or (name in ("_to_copy", "copy_") and elsewhere):
            raise RequestError(f"{name} cannot be captured in a CUDA graph.")
        return func(*args, **(kwargs or {}))
