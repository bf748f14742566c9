"""The package's log: one logger, whose lines include the rank once it is known."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys

from .text import printable

__all__ = ["logger", "once", "set_rank", "setup"]

logger = logging.getLogger("mpistrat")


class _RankFilter(logging.Filter):
    """A filter that adds the rank to every record, for `%(rank)s` in a user's format, and escapes control characters."""

    rank: int | str = "-"

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        with contextlib.suppress(Exception):  # the handler reports a wrong format
            record.msg, record.args = printable(record.getMessage(), keep="\n"), ()
        return True


class _Handler(logging.StreamHandler):
    """A handler for a stream that the program may have closed."""

    def handleError(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(ValueError):  # sys.stderr is closed
            super().handleError(record)


_filter = _RankFilter()
logger.addFilter(_filter)


def set_rank(rank: int) -> None:
    """Set the rank of later lines."""
    _filter.rank = rank


@functools.lru_cache(maxsize=1)
def setup(level: str = "warning") -> None:
    """Give the logger a handler on stderr unless the program configured one."""
    logger.setLevel(level.upper())
    if not logging.getLogger().handlers and not logger.handlers:
        handler = _Handler(sys.stderr)
        handler.setFormatter(logging.Formatter("mpistrat %(levelname)s rank %(rank)s: %(message)s"))
        logger.addHandler(handler)


@functools.cache
def once(level: int, message: str) -> None:
    """Log a message the first time only; at most at INFO on ranks other than 0.

    So one rank reports a condition of all ranks.
    """
    logger.log(level if _filter.rank in (0, "-") else min(level, logging.INFO), message)
