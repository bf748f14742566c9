"""Limits of this process that MPI and large programs run into: open files, locked memory, stack."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, ok, warning

__all__ = ["check_limits"]

_FILES, _STACK = 1024, 1 << 20
_CARDS = Path("/sys/class/infiniband")


def check_limits() -> Iterator[Finding]:
    """Say what `ulimit` allows."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _below(files, _FILES):
        what = f"{files} at most (up to {most} on request): MPI needs some for each rank, a data set one for each file"
        yield warning("open files", what, "ulimit -n 4096 before you start")
    else:
        yield ok("open files", f"{_said(files)} at most")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    cards = _cards()
    if cards and locked != resource.RLIM_INFINITY:
        what = f"{_kib(locked)} may be locked, and there are network cards that need it ({', '.join(cards)})"
        yield warning(
            "locked memory",
            what,
            "Ask the site to set memlock to unlimited (SLURM: PropagateResourceLimitsExcept=MEMLOCK)",
        )
    else:
        yield ok(
            "locked memory", f"{_kib(locked)} may be locked" + ("" if cards else "; no network card here needs it")
        )
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    if _below(stack, _STACK):
        yield warning("stack", f"{_kib(stack)}: libraries crash with so little", "ulimit -s 8192 before you start")
    else:
        yield ok("stack", _kib(stack))


def _below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least


def _said(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _kib(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"


def _cards() -> list[str]:
    try:
        return sorted(path.name for path in _CARDS.iterdir())
    except OSError:
        return []
