"""scored.jsonl: every answer of a reward run with its step, member, row and score, as long as there is room."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tezo.system.errors import RequestError
from tezo.system.files import UntrustedError, append, json_text, open_plain, read_bytes, storing

MOST_BYTES = 1 << 26
"""Size of the file from which on nothing is added."""


class ScoredLog:
    """The answers that steps have scored. A resumed run goes on after the steps that its log has.

    Args:
        path: of the file.
        steps: number of steps in the step log.

    Raises:
        RequestError: the file is a link, or larger than it can be.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self._path = path
        try:
            data = read_bytes(path, 2 * MOST_BYTES) if os.path.lexists(path) else b""
        except UntrustedError as error:
            raise RequestError(f"{path.parent}: {error}; remove it to go on.") from None
        self._found, self.size = len(data), 0
        for text in data.splitlines(keepends=True):
            try:
                known = text.endswith(b"\n") and json.loads(text)["step"] < steps
            except (ValueError, KeyError, TypeError, RecursionError):
                known = False
            if not known:
                break
            self.size += len(text)

    def cut_tail(self) -> None:
        """Removes what is ahead of the step log; to be called before a line is added."""
        if self.size < self._found:
            with storing(self._path), os.fdopen(open_plain(self._path, os.O_RDWR), "r+b") as file:
                file.truncate(self.size)
            self._found = self.size

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds the answers of a step, where there is room for all of them."""
        data = "".join(f"{json_text(line)}\n" for line in lines).encode(errors="surrogatepass")
        if data and self.size + len(data) <= MOST_BYTES:
            append(self._path, data)
            self.size += len(data)
