"""Errors of what records a run: of the record itself, which are a warning once, and of the run."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import final

from ..base.errors import MpistratError
from ..base.log import logger
from ..base.text import error_text

__all__ = ["RunError", "WarnOnce"]


@final
class WarnOnce:
    """A context that may be entered again and again: the first error in it is logged, later ones are skipped.

    Example:
        >>> recording = WarnOnce("the log", OSError)
        >>> for _ in range(2):
        ...     with recording:
        ...         raise OSError("no space left on device")
    """

    def __init__(self, what: str, *kinds: type[Exception]) -> None:
        """Set the errors to suppress.

        Args:
            what: the record, for the warning.
            kinds: classes of errors. Others are raised, and so are this package's, such as a collective's timeout.
        """
        self._what, self._kinds, self._warned = what, kinds, False

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not isinstance(error, self._kinds) or isinstance(error, MpistratError):
            return False
        if not self._warned:
            self._warned = True
            text = "%s: %s; training continues, and later errors of it are not reported"
            logger.warning(text, self._what, error_text(error))
        return True


@final
class RunError:
    """The error that ends a run, apart from one that the program was handling when the run started."""

    def __init__(self) -> None:
        self._handled: BaseException | None = None

    def start(self) -> None:
        """Note the start of the run."""
        self._handled = sys.exc_info()[1]

    def at_end(self) -> BaseException | None:
        """Return the error that ends the run, None without one."""
        error = sys.exc_info()[1]
        return None if error is self._handled else error
