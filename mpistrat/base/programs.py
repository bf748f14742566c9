"""Starting this package's own programs in new Python processes, by their paths, and the user's program in this process.

`python -m` and `python -c` put the working directory first on the path, and would run a `json.py` that happens to be there. No
other module of this package starts Python, except for the user's program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["isolated", "program", "put_on_path", "run_program"]

_START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start.py")


def isolated(file: str, *words: str) -> list[str]:
    """Return the command line of a file of this package that needs only the standard library."""
    return [sys.executable, "-S", "-I", file, *words]


def program(what: str, *words: str, python: str = sys.executable) -> list[str]:
    """Return the command line of a module of this package, by its name, or of a file of it, by its path.

    Like `python -m`, with PYTHONPATH, but without the working directory on the path. A file is started without the package.
    """
    return [python, _START, what, *words]


def put_on_path(words: Sequence[str]) -> None:
    """Put the folder of the user's program on the path, as Python does. `words`: see `run_program`."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0])))


def run_program(words: Sequence[str]) -> None:
    """Run the user's program in this process, as __main__.

    Args:
        words: its command line without the interpreter: a file, or -m and a module, and arguments.
    """
    import runpy

    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
