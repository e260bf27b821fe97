"""Warnings of the library during a command: they are shown as they come, and kept for its summary."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARY = logging.getLogger(__name__.partition(".")[0])


class _Kept(logging.Handler):
    """Keeps each text once. Logging shows a warning that has no handler, and would not show one that has this one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.setdefault(record.getMessage())
        kept = next((each for each in _LIBRARY.handlers if isinstance(each, _Kept)), self)
        if self is kept and not _is_shown(record) and logging.lastResort is not None:
            logging.lastResort.handle(record)


def _is_shown(record: logging.LogRecord) -> bool:
    """Returns whether another handler has a record, of those that logging calls."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        if any(not isinstance(each, _Kept) for each in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


@contextmanager
def warned() -> Iterator[dict[str, None]]:
    """Yields the texts that the library warns of while it is open, in order, from all threads."""
    kept = _Kept()
    _LIBRARY.addHandler(kept)
    try:
        yield kept.texts
    finally:
        _LIBRARY.removeHandler(kept)
