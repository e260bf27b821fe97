"""Operations of a step, counted: functions of ATen that compute, and on a GPU the kernels that they launch.

On a GPU each operation has a price in time however small its tensors are. The number of operations depends on the
method and on the layers of a model, not on the sizes of its matrices, so a CPU can count it with a narrow model.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

WITHOUT_WORK = frozenset({"_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty",
                          "new_empty_strided", "resize_"})  # fmt: skip
"""Functions of ATen that compute nothing and are not marked as views: they make memory or metadata."""


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while entered, the functions of ATen that compute.

    Attributes:
        calls: name of a function -> number of its calls.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        name = func.overloadpacket.__name__
        if not func.is_view and name not in WITHOUT_WORK:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def count_launches(run: Callable[[], None], device: torch.device) -> dict[str, int]:
    """Runs a function, on a GPU twice, and counts.

    Args:
        run: the function. It should have run before, since a first step does more.
        device: device of the tensors.

    Returns:
        "operations": calls of functions of ATen that compute. On a GPU also "kernels": how many ran, copies included.
    """
    with Operations() as operations:
        run()
    counts = {"operations": operations.calls.total()}
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run()
            torch.cuda.synchronize(device)
        counts["kernels"] = sum(event.device_type == DeviceType.CUDA for event in profiled.events() or ())
    return counts
