"""The status with which Python ends this process, for what runs at its end.

Python does not pass it to functions of atexit, and sys.exit is not the only way to set it: `raise SystemExit(3)` and `quit(3)`
set it, too, and a program may catch the exception. So it is recorded where the interpreter itself reads it: an attribute of an
exception that leaves the program, read by no Python code.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from types import CodeType, MemberDescriptorType
from typing import Any, NoReturn, cast

from ...base.frames import frame_of

__all__ = ["end_as_python", "forget", "program", "record", "status", "uncaught"]

_MEMBER = cast(MemberDescriptorType, vars(SystemExit)["code"])

program: CodeType | None = None  # of the main thread's outermost frame
_status = 0  # of the SystemExit that has left the program


def record() -> None:
    """Record from now on with which status this process ends. Later calls look again what the program is."""
    global program
    outermost = frame_of(threading.main_thread().ident or 0)
    while outermost is not None and outermost.f_back is not None:
        outermost = outermost.f_back
    program = None if outermost is None else outermost.f_code
    names = gc.get_referents(vars(SystemExit))[0]  # the dict of the type, which Python shows without write access
    if names["code"] is _MEMBER:
        names["code"] = property(_read, _MEMBER.__set__, _MEMBER.__delete__, _MEMBER.__doc__)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # the interpreter caches attributes
        if sys.version_info < (3, 12):  # there sys.exit makes no exception before a handler asks for one
            sys.exit = exit


def exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status), as sys.exit, which it replaces. It can be pickled, as that can."""
    raise SystemExit(status)


def _read(error: SystemExit) -> Any:
    """Return the `code` of an exception, and record it where the interpreter reads it to end the process."""
    global _status
    code = _MEMBER.__get__(error, type(error))
    if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
        _status = code & 0xFF if isinstance(code, int) else int(code is not None)
    return code


def forget() -> None:
    """Forget the parent's status, in a forked child."""
    global _status
    _status = 0


def uncaught() -> BaseException | None:
    """Return the exception on which the program has ended, if it has, other than SystemExit: the interpreter notes it."""
    trace, error = getattr(sys, "last_traceback", None), getattr(sys, "last_value", None)
    return error if error is not None and trace is not None and trace.tb_frame.f_code is program else None


def status() -> int:
    """Return the status with which this process ends: what it called sys.exit with, 1 on an exception; else 0."""
    return _status or int(uncaught() is not None)


def end_as_python() -> NoReturn:
    """End this process at once, with the status that Python gives it: Ctrl-C is a signal."""
    if isinstance(uncaught(), KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status())
