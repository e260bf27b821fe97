"""Whether a run is the one that its log says: enough of model, rows and place to refuse to go on with others.

All of it is in the header of the step log: JSON with the kinds of value in `KEYS`.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from tezo.errors import RequestError

KEYS = {
    "directions": int,
    "config": dict,
    "untrained": list,
    "model": str,
    "rows": str,
    "device": str,
    "versions": dict,
}
"""Of every log; later versions have more."""

_ROWS = {"rows": "training rows", "answers": "answers of its training rows", "held_rows": "dev and test rows"}


def hash_of(value: Any) -> str:
    """SHA-256 of a value of numbers, strings and tuples of them, in hexadecimal."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def check_complete(header: Mapping[str, Any]) -> None:
    """An error where a log's header lacks what every run writes."""
    if not all(isinstance(header.get(key), kind) for key, kind in KEYS.items()):
        raise RequestError("steps.log: its header is not that of a run; give the folder of a run.")


def check_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """An error where a setting is not what the run began with; both by dotted key."""
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise RequestError(
                f"{key} is {now.get(key)!r}, and the run began with {before.get(key)!r}; give what it began with, "
                "or another --output."
            )


def check_rows(found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """An error where rows are not those that the run began with."""
    for key, what in _ROWS.items():
        if found.get(key, own[key]) != own[key]:  # the header of an earlier version has the first alone
            raise RequestError(f"data: the {what} are not those that the run began with; put them back.")


def check_model(found: Mapping[str, Any], own: str) -> None:
    """An error where the weights are not those that the run began with; `own` is their digest."""
    if found["model"] != own:
        raise RequestError("model.name: its weights are not those that the run began with; put them back.")


def check_place(
    found: Mapping[str, Any], own: Mapping[str, Any], drawn_on_the_device: Callable[[], str | None]
) -> list[str]:
    """What the user should know of another device or other versions.

    Args:
        found: "device" and "versions" that the run began with.
        own: those of now.
        drawn_on_the_device: names a parameter whose steps depend on the type of its device, or None.

    Raises:
        RequestError: steps cannot be taken again on this device.
    """
    notices = []
    if found["device"] != own["device"]:
        name = drawn_on_the_device()
        if name is not None:
            raise RequestError(
                f"model.device is {own['device']}, and the run drew noise for {name} on {found['device']}, which no "
                f"other device draws; set model.device={found['device']}."
            )
        notices.append(f"the run began on {found['device']}: on {own['device']} steps may differ in rounding.")
    for package, version in own["versions"].items():
        if found["versions"].get(package) != version:
            then = found["versions"].get(package)
            notices.append(f"the run began with {package} {then}: with {version} steps may differ in rounding.")
    return notices
