"""The package's log: one logger, whose lines carry the rank once it is known."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys

from .text import printable

__all__ = ["logger", "once", "set_rank", "setup"]

logger = logging.getLogger("mpistrat")


class _RankFilter(logging.Filter):
    """Adds the rank to every record, so that a user's own format may show `%(rank)s`, and escapes control characters."""

    rank: int | str = "-"

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        with contextlib.suppress(Exception):  # of a wrong format, which the handler reports
            record.msg, record.args = printable(record.getMessage(), keep="\n"), ()
        return True


class _Handler(logging.StreamHandler):
    """Writes to a stream, which the program may have closed."""

    def handleError(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(ValueError):  # of a closed sys.stderr, which would tell of it
            super().handleError(record)


_filter = _RankFilter()
logger.addFilter(_filter)


def set_rank(rank: int) -> None:
    """Set the rank that later lines carry."""
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
    """Log a message the first time it is given, never again; at most INFO on ranks other than 0.

    So what holds for all ranks is reported by one.
    """
    logger.log(level if _filter.rank in (0, "-") else min(level, logging.INFO), message)
