"""Warnings of the library during a command: they are shown as they come, and kept for its summary."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARY = logging.getLogger(__name__.partition(".")[0])


class _Kept(logging.Handler):
    """Keeps each text once. Logging shows what nobody handles, and would not show what this handler has seen."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.setdefault(record.getMessage())
        first, *others = (*_LIBRARY.handlers, *logging.getLogger().handlers)
        if self is first and all(isinstance(each, _Kept) for each in others) and logging.lastResort is not None:
            logging.lastResort.handle(record)


@contextmanager
def warned() -> Iterator[dict[str, None]]:
    """Yields the texts that the library warns of while it is open, in order, from all threads."""
    kept = _Kept()
    _LIBRARY.addHandler(kept)
    try:
        yield kept.texts
    finally:
        _LIBRARY.removeHandler(kept)
