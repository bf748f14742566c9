"""Starting this package's own programs in new Python processes, by their paths.

`python -m` and `python -c` put the working directory first on the path, and would run a `json.py` that happens to be there. No
other module of this package starts Python, except for the user's program.
"""

from __future__ import annotations

import os
import sys

__all__ = ["isolated", "program"]

_START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start.py")


def isolated(file: str, *words: str) -> list[str]:
    """Return the command line of a file of this package that needs only the standard library."""
    return [sys.executable, "-S", "-I", file, *words]


def program(what: str, *words: str, python: str = sys.executable) -> list[str]:
    """Return the command line of a module of this package, by its name, or of a file of it, by its path.

    Like `python -m`, with PYTHONPATH, but without the working directory on the path. A file is started without the package.
    """
    return [python, _START, what, *words]
