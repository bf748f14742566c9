"""Errors of scheduled functions, as the chief raises them."""

from __future__ import annotations

from concurrent.futures import CancelledError

from ..errors import MpistratError

__all__ = ["ClosureCancelledError", "RemoteError", "RemoteTraceback"]


class ClosureCancelledError(MpistratError, CancelledError):
    """A scheduled function was not run, because another one failed before, or the coordinator was closed."""


class RemoteError(MpistratError, RuntimeError):
    """A scheduled function failed with an exception that cannot be sent; the text has its traceback."""


class RemoteTraceback(Exception):
    """The cause of an exception that came from a worker: which worker, and its traceback there."""
