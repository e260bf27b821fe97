"""What an optimizer was built with: every option of its method, its value, and who said so."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, get_args

from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.optimizer import ZerothOrderOptimizer

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


def with_settings(build: Callable[P, T]) -> Callable[P, T]:
    """Makes a method's function put the `Settings` on the optimizer that it builds, as `optimizer.settings`."""
    parameters = inspect.signature(build).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    for p in parameters.values():
        if p.kind is inspect.Parameter.VAR_KEYWORD:
            own = inspect.signature(ZerothOrderOptimizer.__init__).parameters
            (shared,) = get_args(p.annotation)
            defaults |= {name: own[name].default for name in shared.__annotations__}

    @functools.wraps(build)
    def built(*args: P.args, **options: P.kwargs) -> T:
        optimizer = build(*args, **options)
        optimizer.settings = Settings(
            {name: Setting(options.get(name, default), GIVEN if name in options else DEFAULT)
             for name, default in defaults.items()}
        )  # fmt: skip
        return optimizer

    return built
