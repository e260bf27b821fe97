"""The options of a method: what an optimizer was built with, and who said so."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from torch import nn

from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.system.errors import RequestError, nearest
from tezo.system.values import coerce

P = ParamSpec("P")
T = TypeVar("T", bound=BaseOptimizer)

SOURCES = GIVEN, DEFAULT, RESOLVED = "given", "default", "resolved"
MOST_SHOWN = 3
"""Members of a list in the text of `Settings`; what an engine cannot change are patterns by the dozen."""


@dataclass(frozen=True)
class Setting:
    """A value, and its source: `GIVEN` by the caller, the method's `DEFAULT`, or `RESOLVED` on the rows of a run."""

    value: Any
    source: str


class Settings(dict[str, Setting]):
    """Name of an option -> its setting; as text, a table with a line for each."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        values = {name: _text(setting.value) for name, setting in self.items()}
        longest = max(map(len, values.values()), default=0)
        return "\n".join(f"{name:<{width}}  {values[name]:<{longest}}  {self[name].source}" for name in self)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        left_out = len(value) - MOST_SHOWN
        shown = [*map(_text, value[:MOST_SHOWN]), *([f"and {left_out} more"] if left_out > 0 else [])]
        return "[" + ", ".join(shown) + "]"
    return "none" if value is None else str(value)


def options_of(build: Callable[..., BaseOptimizer]) -> dict[str, tuple[Any, Any]]:
    """Returns option -> (annotated type, default) of a method's function, those of `Basic` and `Common` included."""
    own, shared = (inspect.signature(function).parameters for function in (build, ZerothOrderOptimizer.__init__))
    found = {p.name: (p.annotation, p.default) for p in own.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    for p in own.values():
        if p.kind is inspect.Parameter.VAR_KEYWORD:
            (named,) = get_args(p.annotation)
            found |= {name: (kind, shared[name].default) for name, kind in get_type_hints(named).items()}
    return found


def with_settings(build: Callable[P, T]) -> Callable[P, T]:
    """Makes a method's function check the types of its options, and put `optimizer.settings` on what it builds."""
    known = options_of(build)

    @functools.wraps(build)
    def built(*args: P.args, **given: P.kwargs) -> T:
        named: Any = dict(given)
        models = [*args, *([named.pop("model")] if "model" in named else [])]
        if models and not isinstance(models[0], nn.Module):
            raise RequestError(
                f"the model is {_kind(models[0])}; give the model itself, whose parameters method.targets selects: "
                f"tezo.{build.__name__}(model)."
            )
        for name in named:
            if name not in known:
                raise RequestError(f"method.{name}: tezo.{build.__name__} has no such option. " + nearest(name, known))
        options = {name: coerce(f"method.{name}", value, known[name][0]) for name, value in named.items()}
        optimizer = build(*models, **options)
        optimizer.settings = Settings(
            {name: Setting(options.get(name, default), GIVEN if name in options else DEFAULT)
             for name, (_, default) in known.items()}
        )  # fmt: skip
        return optimizer

    return built


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
