"""How this package starts its own programs in new processes of Python: by their paths.

`python -m` and `python -c` put the working directory first on the path, and would run a `json.py` that anybody has left there.
No other file of this package has such a start, except for the program that the user names.
"""

from __future__ import annotations

import os
import sys

__all__ = ["isolated", "program"]

_START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start.py")


def isolated(file: str, *words: str) -> list[str]:
    """Return the words that start a file of this package that needs the standard library only."""
    return [sys.executable, "-S", "-I", file, *words]


def program(what: str, *words: str, python: str = sys.executable) -> list[str]:
    """Return the words that start a module of this package, by its name, or a file of it, by its path.

    As `python -m`, with PYTHONPATH, but nothing is imported from the working directory. A file is started without the package.
    """
    return [python, _START, what, *words]
