"""Numbers that are found out once and kept in a file of the user's cache folder."""

import json
import os
import tempfile
from pathlib import Path


def default_cache() -> Path:
    """`$TEZO_CACHE` if set, else `tezo` in the user's cache folder."""
    chosen = os.environ.get("TEZO_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "tezo"


class NumberCache:
    """Integers by name, in a JSON file. A file that cannot be read or written is ignored.

    Args:
        folder: cache folder.
        name: name of the file, without its ending.

    Attributes:
        numbers: the integers.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.json"
        self.numbers: dict[str, int] = {}
        try:
            read = json.loads(self.path.read_text(encoding="utf-8"))
            self.numbers = {str(key): int(number) for key, number in read.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            pass
        self._known = len(self.numbers)

    def save(self) -> None:
        """Replaces the file atomically if a number was added."""
        if len(self.numbers) == self._known:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False) as file:
                json.dump(self.numbers, file)
            Path(file.name).replace(self.path)
        except OSError:
            pass
