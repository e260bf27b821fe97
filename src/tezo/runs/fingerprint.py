"""Checks that a resumed or replayed run has the settings, model, rows and device of its step log's header.

The header is a JSON object with the keys and types of `KEYS`.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from tezo.errors import RequestError

KEYS = {
    "directions": int,
    "config": dict,
    "untrained": list,
    "model": dict,
    "rows": str,
    "device": str,
    "versions": dict,
}
"""Key -> type."""

_ROWS = {"rows": "training rows", "answers": "answers of its training rows", "held_rows": "dev and test rows"}


def hash_of(value: Any) -> str:
    """SHA-256, in hexadecimal, of the `repr` of a value made of numbers, strings and tuples."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def check_complete(header: Mapping[str, Any]) -> None:
    """Raises a `RequestError` if a log's header lacks a key of `KEYS`, or has it with another type."""
    if not all(isinstance(header.get(key), kind) for key, kind in KEYS.items()):
        raise RequestError("steps.log: its header is not that of a run; give the folder of a run.")


def check_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises a `RequestError` if a setting differs from the one that the run began with; both by dotted key."""
    for key in sorted(before.keys() | now.keys(), key=lambda key: (key != "method.name", key)):  # options follow it
        if before.get(key) != now.get(key):
            raise RequestError(
                f"{key} is {now.get(key)!r}, and the run began with {before.get(key)!r}; use the original value, "
                "or another --output."
            )


def check_rows(header: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises a `RequestError` if the digests of rows differ from those in the header."""
    for key, what in _ROWS.items():
        if header.get(key) != own[key]:
            raise RequestError(f"data: the {what} are not those that the run began with; restore them.")


def check_place(
    header: Mapping[str, Any], own: Mapping[str, Any], drawn_on_the_device: Callable[[], str | None]
) -> list[str]:
    """Messages for the user about a changed device or changed package versions.

    Args:
        header: "device", "versions" and "noise" at the beginning of the run; "noise" is the version of the generator
            of dense noise and rounding on a CPU, 1 if it is missing.
        own: the same of this process.
        drawn_on_the_device: returns the name of a parameter whose steps depend on the device type, or None.

    Raises:
        RequestError: the run's steps cannot be reproduced on this device.
    """
    notices = []
    if header["device"] != own["device"]:
        name = drawn_on_the_device()
        if name is not None:
            raise RequestError(
                f"model.device is {own['device']}, and the run drew noise for {name} on {header['device']}, which "
                f"cannot be reproduced on another device; set model.device={header['device']}."
            )
        notices.append(f"the run began on {header['device']}: on {own['device']} steps may differ in rounding.")
    elif header["device"] == "cpu" and header.get("noise", 1) != own["noise"]:
        name = drawn_on_the_device()
        if name is not None:
            raise RequestError(
                f"steps.log: the run drew noise for {name} with version {header.get('noise', 1)} of the generator, and "
                f"this version of tezo has version {own['noise']}, which gives other weights; use the earlier tezo."
            )
    for package, version in own["versions"].items():
        if header["versions"].get(package) != version:
            before = header["versions"].get(package)
            notices.append(f"the run began with {package} {before}: with {version} steps may differ in rounding.")
    return notices
