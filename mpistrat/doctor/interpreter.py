"""Python and the packages that every program of mpistrat needs."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from .._version import __version__
from .finding import Finding, ok

__all__ = ["check_interpreter", "versions"]

_PACKAGES = ("numpy", "mpi4py", "h5py")


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package, and of what it needs.

    Example:
        >>> sorted(versions())
        ['h5py', 'mpi4py', 'mpistrat', 'numpy', 'python']
    """
    found = {"python": platform.python_version(), "mpistrat": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def check_interpreter() -> Iterator[Finding]:
    """Say which Python this is."""
    found = versions()
    rest = ", ".join(f"{name} {found[name]}" for name in ("mpistrat", "numpy"))
    yield ok("Python", f"{found['python']} at {sys.executable}, {rest}, on {platform.system()} {platform.machine()}")
