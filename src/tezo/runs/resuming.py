"""The line by which a run goes on, as errors and verdicts print it."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tezo.models.kinds import ADDRESS, IN_MEMORY, engine_kind

RUN = "RUN"
"""Stands for the run folder where a text may be read elsewhere."""


def resume_line(folder: Path | str, config: Mapping[str, Any], steps: int | None = None) -> str:
    """Returns the command, or for objects in memory the call in Python, by which a run goes on.

    Some settings are not taken from a run folder, because it may be a stranger's. They must be given again: the line
    has their flags, without the values.

    Args:
        folder: of the run, or `RUN`.
        config: of the run, as nested mappings.
        steps: number of steps that it is to have; None: as before.
    """
    sections = {name: config.get(name) for name in ("model", "data", "train")}
    model, data, train = (dict(value) if isinstance(value, Mapping) else {} for value in sections.values())
    if IN_MEMORY in (model.get("name"), train.get("reward"), *(data.get(part) for part in ("train", "dev", "test"))):
        more = "" if steps is None else f", steps={steps}"
        return f"tezo.train(..., output={folder if folder == RUN else repr(str(folder))}, resume=True{more})"
    line = f"tezo train --output {shlex.quote(str(folder))} --resume"
    if steps is not None:
        line += f" --steps {steps}"
    if train.get("reward") is not None:
        line += " --reward FILE.py:FUNCTION"
    if engine_kind(str(model.get("engine"))) == ADDRESS:
        line += " --engine http://HOST:PORT"
    if model.get("trust_remote_code") is True:
        line += " --set model.trust_remote_code=true"
    return line


def in_folder(text: str, folder: Path) -> str:
    """Returns a text that has a `resume_line` of `RUN`, with the folder in its place."""
    return text.replace(f"tezo train --output {RUN} ", f"tezo train --output {shlex.quote(str(folder))} ")
