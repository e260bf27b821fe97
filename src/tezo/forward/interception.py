"""Replacing a torch function inside a module's forward, where it is called on the module's weight.

A hook on a module's output can neither avoid the forward's computation nor change a step inside it. An interception
can: while the module runs, a call such as `linear(x, weight, bias)` is redirected to a replacement.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Replacement = Callable[..., Tensor]
"""A function with the arguments of the torch function that it replaces."""


P = ParamSpec("P")
R = TypeVar("R")


def unintercepted(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with all interception of torch functions disabled inside it.

    For code that runs inside a module's forward and contains no product that `float32_on_emulating_cpu` would replace.
    It saves the overhead of the interception on every torch call and attribute access.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, excluded from torch.compile.

    For hooks: they read values that change every step, so tracing them would recompile the model every step. With this
    wrapper the graph breaks at the hook instead.
    """
    reason = "directions change every step"
    return torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call,no-any-return]


class Interception:
    """Replaces torch functions in the forward of `module` when they are called on its weight.

    Args:
        module: the module. During its forward its weight may be another tensor, loaded or gathered for the call.
        replacements: torch function -> replacement.
        active: called before each forward; nothing is replaced if it returns False.
    """

    def __init__(
        self,
        module: nn.Module,
        replacements: Mapping[Any, Replacement],
        active: Callable[[], bool],
    ) -> None:
        self._replacements = {function: untraced(replacement) for function, replacement in replacements.items()}
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
        """Removes the hooks from the module."""
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
