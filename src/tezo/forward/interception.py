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

from tezo.forward.uncopied import Uncopied

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


class Interception(Uncopied):
    """Replaces torch functions in the forward of `module` when they are called on its weight.

    It wraps the module's forward instead of using a pair of hooks: a forward hook does not run after a
    KeyboardInterrupt or SystemExit in the module, and the replacements would stay in force everywhere.

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
        self._module = module
        self._inner = module.__dict__.get("forward")  # of another wrapper, such as accelerate's
        self._removed = False
        self._run = untraced(self._forward)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self._run(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._inner or functools.partial(type(self._module).forward, self._module)
        if self._removed or not self._active():
            return forward(*args, **kwargs)
        with _Mode(self._module, self._replacements):
            return forward(*args, **kwargs)

    def remove(self) -> None:
        """Gives the module its forward back; where another wrapper has been put over this one, it only passes on."""
        self._removed = True
        if self._module.__dict__.get("forward") is not self:
            return
        if self._inner is not None:
            self._module.forward = self._inner
        else:
            del self._module.forward


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
