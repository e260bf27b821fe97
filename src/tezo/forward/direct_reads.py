"""Reads of a weight past the modules that own it.

A tuned weight is perturbed where its modules are called. Code that takes the tensor itself, such as DeBERTa's relative
positions or a head that multiplies by the embeddings, gets the stored values: the perturbation does not reach the loss
there, and merge() changes the output.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tezo.directions.targets import Target
from tezo.forward.interception import untraced

_STORAGE = tuple(getattr(torch.Tensor, name).__get__ for name in ("data", "grad"))
"""What this library reads and writes weights by, between evaluations."""


class DirectReads(TorchFunctionMode):
    """While entered, notes which weights are read past their modules.

    Args:
        targets: parameters to watch; those that cannot be perturbed in the forward pass are left out.

    Attributes:
        names: names of the parameters that were read.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._targets = {id(target.parameter): target for target in targets if target.in_forward}
        self._open: Counter[int] = Counter()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "DirectReads":
        for key, target in self._targets.items():
            for site in target.sites:
                self._handles += self._hooks(site.module, key)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _hooks(self, module: nn.Module, key: int) -> list[RemovableHandle]:
        def enter(*_: object) -> None:
            self._open[key] += 1

        def leave(*_: object) -> None:
            self._open[key] -= 1

        # around the hooks that perturb, which may read the weight
        return [
            module.register_forward_pre_hook(untraced(enter), prepend=True),
            module.register_forward_hook(untraced(leave), always_call=True),
        ]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        output = func(*args, **(kwargs or {}))
        for key in map(id, _tensors((args, tuple((kwargs or {}).values())))):
            if key in self._targets and not self._open[key] and _gives_values(func, args, key, output):
                self.names.add(self._targets[key].name)
        return output


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _gives_values(func: Any, args: tuple[Any, ...], key: int, output: Any) -> bool:
    """Whether a function gives values of the tensor with this id: not its dtype, its shape or its storage alone."""
    name = getattr(func, "__name__", "")
    of_another = bool(args) and id(args[0]) != key and (name == "to" or name.endswith("_as"))
    shape_alone = of_another or name.endswith("_like") or name.startswith("new_") or func in _STORAGE
    return not shape_alone and any(True for _ in _tensors(output))
