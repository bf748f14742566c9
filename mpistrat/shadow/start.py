"""Run a Python program within a session of `ms.shadow`: python -m mpistrat.shadow.start MODE FOLDER STEPS ELEMENTS PROGRAM …"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

from ..base.programs import put_on_path, run_program
from ..cluster.launcher_variables import launched_rank
from .comparing import Comparing
from .contexts import installed
from .folder import Folder, ShadowError
from .session import Recording, Rounding, Session

__all__ = ["main"]

_FUNCTION = "mpistrat shadow"


def main(words: list[str]) -> None:
    """Run a program; a comparison prints its report at the end. Collective, if the program is."""
    mode, path, steps, elements, *program = words
    folder, count = Folder(Path(path), _FUNCTION), int(steps)
    session: Session
    if mode == "record":
        folder.clear()
        session = Recording(folder, count, int(elements), stop=True)
    elif mode == "round":
        session = Rounding(folder, count, stop=True)
    else:
        session = Comparing(folder, count, stop=True)
    if importlib.util.find_spec("torch") is not None:  # its hooks must be there before the program's first module
        importlib.import_module("mpistrat.torch")
    put_on_path(program)
    try:
        with contextlib.ExitStack() as stack:
            stack.push(lambda kind, error, trace: _report(session, error))
            stack.enter_context(installed(session))
            run_program(program)
    except ShadowError as error:
        if launched_rank() in (None, 0):  # no error of the program, which all ranks have
            print(error, file=sys.stderr, flush=True)
        sys.exit(1)


def _report(session: Session, error: BaseException | None) -> None:
    """Print how much was compared, on rank 0, unless a difference was found or the program failed."""
    failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
    if isinstance(session, Comparing) and not failed and launched_rank() in (None, 0):
        print(f"{_FUNCTION}: {session.report}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
