"""Standing in for one torch function, where a module's own forward calls it on the module's weight.

A hook on a module's output cannot save the work that the forward did, nor reach into it. This can: while the
module runs, and only then, a call such as `linear(x, weight, bias)` goes to a replacement.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Replacement = Callable[..., Tensor]
"""Takes what the torch function takes."""


P = ParamSpec("P")
R = TypeVar("R")


def unintercepted(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with torch's own functions in it, whatever intercepts them outside.

    For what runs within a module's forward and has no product that `float32_on_emulating_cpu` would replace, which
    would otherwise be asked at every call, and at every look at a shape.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as it is, in a model that torch.compile has compiled.

    For hooks: what they read changes every step, and a model that was compiled with them would be compiled anew each
    time. The graph breaks there instead.
    """
    reason = "directions change every step"
    return torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call,no-any-return]


class Interception:
    """Replaces torch functions in the forward of `module` when they are called on its weight.

    Args:
        module: in whose forward; its weight may be another tensor there than outside, loaded or gathered for it.
        replacements: torch function -> what is called in its stead.
        active: asked before each forward; while False nothing is replaced.
    """

    def __init__(
        self,
        module: nn.Module,
        replacements: Mapping[Any, Replacement],
        active: Callable[[], bool],
    ) -> None:
        self._replacements = {of: untraced(replacement) for of, replacement in replacements.items()}
        self._active = active
        self._open: list[_Mode | None] = []
        self._handles = [
            module.register_forward_pre_hook(untraced(self._enter)),
            module.register_forward_hook(untraced(self._leave), always_call=True),
        ]

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        del args
        mode = _Mode(module, self._replacements) if self._active() else None
        self._open.append(mode)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, *_: object) -> None:
        mode = self._open.pop()
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Removes its hooks."""
        for handle in self._handles:
            handle.remove()


class _Mode(TorchFunctionMode):
    def __init__(self, module: nn.Module, replacements: Mapping[Any, Replacement]) -> None:
        super().__init__()
        self._module = module
        self._replacements = replacements

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        replacement = self._replacements.get(func)
        if replacement is not None and any(arg is self._module.weight for arg in args):
            return replacement(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


LINEAR = torch.nn.functional.linear
ADDMM = torch.addmm
EMBEDDING = torch.nn.functional.embedding
