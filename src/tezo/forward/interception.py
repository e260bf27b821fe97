"""Torch functions that a module calls on its weight: replacing them, and noting the calls that no module makes."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tezo.directions.targets import Target
from tezo.system.errors import RequestError

LINEAR = torch.nn.functional.linear
ADDMM = torch.addmm
EMBEDDING = torch.nn.functional.embedding

P = ParamSpec("P")
R = TypeVar("R")


class Uncopied:
    """Objects that copy and pickle refuse: a copy of a model would share the hooks of the original."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        del protocol
        raise RequestError(
            f"copy or pickle: {type(self).__name__} belongs to one model in this process, and so do the hooks of a "
            "model that is being tuned; call merge() or close() first, or save model.state_dict(), which is a snapshot."
        )


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Excludes a function from torch.compile.

    For hooks: they read values that change every step, so tracing them would recompile the model every step. With this
    wrapper the graph breaks at the hook instead.
    """
    reason = "directions change every step"
    return torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call,no-any-return]


class Intercepted(Uncopied, functools.partial[Any]):
    """The forward of a module in an `Interception`."""


class Interception(TorchFunctionMode):
    """Replaces torch functions in the forward of `module` when they are called on its weight.

    A hook on a module's output could neither avoid the forward's computation nor change a step inside it. The module's
    forward is wrapped, because a forward hook does not run after a KeyboardInterrupt or SystemExit in the module, and
    the replacements would stay in force everywhere.

    `replacements` has functions with the same arguments; none is used in a forward before which `active` returns False.
    During the forward, the module's weight may be another tensor, loaded or gathered for the call.
    """

    def __init__(
        self, module: nn.Module, replacements: Mapping[Any, Callable[..., Tensor]], active: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._module, self._replacements, self._active = module, replacements, active
        self._inner = module.__dict__.get("forward")  # of another wrapper, such as accelerate's
        self._removed = False
        self._outer = module.forward = Intercepted(untraced(self._forward))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._inner or functools.partial(type(self._module).forward, self._module)
        if self._removed or not self._active():
            return forward(*args, **kwargs)
        with self:
            return forward(*args, **kwargs)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        replacement = self._replacements.get(func)
        if replacement is not None:
            weight = self._module.weight
            for arg in args:
                if arg is weight:
                    return replacement(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def remove(self) -> None:
        """Gives the module its forward back; where another wrapper has been put over this one, it only passes on."""
        self._removed = True
        if self._module.__dict__.get("forward") is not self._outer:
            return
        if self._inner is not None:
            self._module.forward = self._inner
        else:
            del self._module.forward


_STORAGE = tuple(getattr(torch.Tensor, name).__get__ for name in ("data", "grad"))
"""Attributes by which this library reads and writes weights between evaluations."""


class DirectReads(TorchFunctionMode):
    """Notes, while entered, which weights are read past their modules.

    A tuned weight is perturbed where its modules are called. Code that takes the tensor itself, such as DeBERTa's
    relative positions or a head that multiplies by the embeddings, gets the stored values: the perturbation does not
    reach the loss there, and merge() changes the output.

    Parameters that cannot be perturbed in the forward pass are left out. `names` are those that were read.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._targets = {id(target.parameter): target for target in targets if target.in_forward}
        self._open: Counter[int] = Counter()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "DirectReads":
        def count(change: int, key: int) -> Callable[..., None]:
            def hook(*_: object) -> None:
                self._open[key] += change

            return untraced(hook)

        for key, target in self._targets.items():
            for site in target.sites:  # around the hooks that perturb, which may read the weight
                enter, leave = count(1, key), count(-1, key)
                self._handles.append(site.module.register_forward_pre_hook(enter, prepend=True))
                self._handles.append(site.module.register_forward_hook(leave, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

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
    """Returns whether a function gives values of the tensor with this id: not its dtype, shape or storage alone."""
    name = getattr(func, "__name__", "")
    of_another = bool(args) and id(args[0]) != key and (name == "to" or name.endswith("_as"))
    shape_alone = of_another or name.endswith("_like") or name.startswith("new_") or func in _STORAGE
    return not shape_alone and any(True for _ in _tensors(output))
