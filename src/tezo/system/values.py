"""Converts the values of settings and arguments to their declared types, and refuses any other."""

import inspect
import types
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from tezo.system.errors import RequestError
from tezo.system.files import UntrustedError, parse_yaml


def coerce(key: str, value: Any, kind: Any) -> Any:
    """Converts `value` to the type `kind`.

    A string, as the command line gives it, is read as YAML unless `kind` is str. Unlike in YAML, 1e-5 is a number, and
    1e3 a whole one. Numbers and arrays of NumPy and torch count as Python's.

    Args:
        key: dotted key of the setting, for messages.
        value: value from YAML, the command line or a caller.
        kind: declared type of the setting.

    Raises:
        RequestError: the value does not have this type.
    """
    if hasattr(value, "tolist"):  # of NumPy or torch
        value = value.tolist()
    text = value
    if isinstance(value, str) and kind not in (str, str | None) and get_origin(kind) is not Literal:
        value = _scalar(value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        if any(value in get_args(a) for a in arguments if get_origin(a) is Literal) or _is_one_of(value, arguments):
            return value
        return coerce(key, value, next(a for a in arguments if a is not type(None)))
    if origin is Literal:
        if value in arguments:
            return value
        raise RequestError(f"{key} is {value!r}; it must be one of {', '.join(map(str, arguments))}.")
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(arguments):
        return tuple(coerce(key, v, a) for v, a in zip(value, arguments, strict=True))
    if origin is Sequence:
        _check_is_no_list(key, value)
        items = [text] if arguments[0] is str and isinstance(text, str) and not isinstance(value, list) else value
        if isinstance(items, list | tuple):
            return [coerce(key, v, arguments[0]) for v in items]
    if origin is dict and isinstance(value, Mapping):
        for k, v in value.items():
            if isinstance(k, bool) or (arguments[1] is str and isinstance(v, bool)):
                raise RequestError(
                    f"{key} has {k}: {v}: YAML reads yes, no, on and off without quotes as true or false; quote them."
                )
            if v is None and ":" in str(k):
                raise RequestError(f"{key} has {k!r}, which YAML takes for one word; put a space behind the colon.")
        return {str(k): coerce(f"{key}.{k}", v, arguments[1]) for k, v in value.items()}
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise RequestError(f"{key} is {value!r}; it must be {_description(kind)}.")


def path_of(key: str, value: Any) -> Path:
    """Returns a path that a caller gave as `key`; raises a `RequestError` where it is none."""
    if not isinstance(value, str | PathLike):
        raise RequestError(f"{key} is {value!r}; give a path.")
    return Path(value)


def takes(function: Any, *arguments: Any) -> bool:
    """Returns whether an object can be called with these arguments, as far as its signature is known."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # some functions of C have no signature
        return True
    return True


def _is_one_of(value: Any, kinds: Sequence[Any]) -> bool:
    return not isinstance(value, bool) and any(isinstance(kind, type) and isinstance(value, kind) for kind in kinds)


def _scalar(text: str) -> Any:
    for reader in (int, float):
        try:
            return reader(text)
        except ValueError:
            pass
    try:
        return parse_yaml(text)
    except UntrustedError:
        return text


def _check_is_no_list(key: str, value: Any) -> None:
    """Raises a `RequestError` for a string that was meant as a list: YAML takes !x, without quotes, for a tag."""
    if isinstance(value, str) and value.startswith("["):
        raise RequestError(
            f"{key} is {value!r}, which YAML cannot read as a list; quote parts that begin with ! or have other "
            "signs of YAML, as in [all, '!lm_head']."
        )


_LISTS = {int: "a list of whole numbers, such as [8, 16]", float: "a list of numbers, such as [0.5, 1]"}


def _description(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return f"a list of {len(arguments)} values, such as [0.9, 0.99]"
    if origin is Sequence:
        return _LISTS.get(arguments[0], "a list of strings")
    return words.get(kind, "a section of key: value lines")
