"""Hooks by which state dicts of a model have its trained change, where that is not in the stored weights."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tezo.directions.targets import Target
from tezo.forward.interception import Uncopied
from tezo.system.errors import RequestError


def require_plain(target: Target) -> None:
    """Raises a `RequestError` if a state dict cannot have the weight with its change added."""
    if not target.is_writable:
        raise RequestError(
            f"state_dict: the change of {target.name} is beside a weight that is packed, offloaded or sharded, and "
            "cannot be added to it; save the adapter instead (export_adapter of its optimizer, or export of its run)."
        )


class InStateDict(Uncopied):
    """Hooks that put the weights that modules compute with into state dicts, instead of the stored weights.

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
