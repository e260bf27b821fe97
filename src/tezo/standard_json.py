"""JSON as its standard has it: there is no NaN or infinity in it, and null stands for them."""

import json
import math
from typing import Any


def json_text(value: Any, indent: int | None = None) -> str:
    """The document of dicts, lists, tuples, strings, numbers and None."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
