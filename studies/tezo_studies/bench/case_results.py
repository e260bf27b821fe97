"""A file of results that is written after each case, and that the same command goes on with after a cut."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tezo.system.errors import RequestError
from tezo.system.files import write_file

SAME = ("hardware", "batch", "length", "rank")
"""Keys of the head that all cases of a file have in common."""


class CaseResults:
    """The file: a head, which says what was measured on, and the cases; one that is being measured is in it as begun.

    Args:
        path: the file; it need not exist.

    Attributes:
        content: what is in the file: the head's keys, and "cases".
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content: dict[str, Any] = {"cases": {}}
        if path.is_file():
            self.content = json.loads(path.read_text(encoding="utf-8"))

    @property
    def cases(self) -> dict[str, dict[str, Any]]:
        """Name -> result, or {"reason": why there is none}."""
        cases: dict[str, dict[str, Any]] = self.content["cases"]
        return cases

    def begun(self) -> list[str]:
        """The names of cases that were begun and not ended."""
        return [name for name, result in self.cases.items() if result.get("begun")]

    def forget_begun(self) -> None:
        """Leaves out what an earlier run of the command began and did not end."""
        begun = self.begun()
        for name in begun:
            del self.cases[name]
        if begun:
            self._write()

    def put(self, name: str, result: dict[str, Any]) -> None:
        """Adds a result, and writes the file."""
        self.cases[name] = result
        self._write()

    def of_this_machine(self, head: Mapping[str, Any]) -> None:
        """Sets the head.

        Raises:
            RequestError: the cases so far are of another machine, or of other settings.
        """
        for key in SAME:
            if self.cases and self.content[key] != head[key]:
                raise RequestError(f"{self._path} has {key} {self.content[key]}, not {head[key]}; give another --json.")
        self.content = {**head, "cases": self.cases}

    def _write(self) -> None:
        write_file(self._path, (json.dumps(self.content, indent=1) + "\n").encode())
