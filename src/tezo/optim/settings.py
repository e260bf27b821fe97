"""The options of an optimizer as it was made: their values, and who chose them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

SOURCES = GIVEN, DEFAULT, RESOLVED = "given", "default", "resolved"
MOST_SHOWN = 3
"""Members of a list in the text of `Settings`; parameters that an engine cannot change are dozens of patterns."""


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

    def with_values(self, values: Mapping[str, Any]) -> "Settings":
        """Returns the same options with the values that are given for some."""
        return Settings(
            {
                name: replace(setting, value=values[name]) if name in values else setting
                for name, setting in self.items()
            }
        )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        left_out = len(value) - MOST_SHOWN
        shown = [*map(_text, value[:MOST_SHOWN]), *([f"and {left_out} more"] if left_out > 0 else [])]
        return "[" + ", ".join(shown) + "]"
    return "none" if value is None else str(value)
