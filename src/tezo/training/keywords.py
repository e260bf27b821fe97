"""Settings as keyword arguments: `lr=1e-4` for method.lr, `steps=200` for train.steps."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tezo.models.kinds import ModelConfig
from tezo.optim.methods import BASELINES, METHODS, Method
from tezo.system.errors import RequestError, nearest
from tezo.tasks.row_files import DataConfig
from tezo.training.recipe import TrainConfig

PARAMETERS = {
    "model.name": "model",
    "data.train": "data",
    "data.dev": "dev",
    "data.test": "test",
    "method.name": "method",
    "train.reward": "reward",
}
"""Keys that `tezo.train` has a parameter for, which takes objects too."""

PREFERRED = {"seed": "train.seed"}
"""What a name means that two sections have: data.seed follows train.seed unless it is set."""


def keys_by_name() -> dict[str, list[str]]:
    """Name -> the dotted keys that end in it, of all sections and of the options of all methods."""
    sections = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}
    keys = [f"{section}.{field.name}" for section, cls in sections.items() for field in dataclasses.fields(cls)]
    methods: list[Method[Any]] = [*METHODS.values(), *BASELINES.values()]
    options = {"name", *(name for method in methods for name in method.options())}
    found: dict[str, list[str]] = {}
    for key in [*keys, *(f"method.{name}" for name in sorted(options))]:
        found.setdefault(key.partition(".")[2], []).append(key)
    return found


def suggestion(key: str, known: Iterable[str]) -> str:
    """What to say of an unknown key: the keys of other sections that end in its name, else the nearest known name.

    Args:
        key: as it was given.
        known: names that are known in its place.
    """
    name = key.rpartition(".")[2]
    elsewhere = keys_by_name().get(name, [])
    return f"Did you mean {' or '.join(elsewhere)}?" if elsewhere else nearest(name, known)


def plain_names() -> dict[str, list[str]]:
    """Name -> the dotted keys that end in it, but for those of `PARAMETERS`."""
    found = {name: [key for key in keys if key not in PARAMETERS] for name, keys in keys_by_name().items()}
    return {name: keys for name, keys in found.items() if keys}


def dotted_settings(named: Mapping[str, Any], dotted: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(dotted key, value) pairs of both ways to give settings.

    Args:
        named: by plain names.
        dotted: by dotted keys.

    Raises:
        RequestError: a name is unknown or has several meanings, a key is given twice, or has a parameter of its own.
    """
    known = plain_names()
    pairs = [(dotted_key(name, known), value) for name, value in named.items()]
    for key, value in dotted.items():
        if key in PARAMETERS:
            raise RequestError(f"settings: {key} is the parameter {PARAMETERS[key]}; give it by that.")
        if "." not in key:
            raise RequestError(f"settings: {key} has no section; give it by its name, {key}=..., or by a dotted key.")
        if key in dict(pairs):
            raise RequestError(f"settings: {key} is given by its name too; leave one of them out.")
        pairs.append((key, value))
    return pairs


def dotted_key(name: str, known: Mapping[str, list[str]]) -> str:
    """The key that a plain name stands for.

    Args:
        name: of a setting.
        known: name -> the keys that end in it.

    Raises:
        RequestError: there is none, or there are several.
    """
    if name in PREFERRED:
        return PREFERRED[name]
    if name not in known:
        raise RequestError(f"{name}: there is no such setting. {nearest(name, [*sorted(known), *PARAMETERS.values()])}")
    first, *others = known[name]
    if others:
        raise RequestError(f"{name} may be {' or '.join(known[name])}; give one by settings={{{first!r}: ...}}.")
    return first
