"""The memory that a process may still allocate, limited by the system and its control group."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import explain
from ..base.text import decimal_size

__all__ = ["available_memory", "bytes_of", "require_memory"]

_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Return the bytes that this process can still allocate without swapping or being killed; None if unknown.

    Processes that call this at the same time get the same answer and must share it.
    """
    known = [found for found in (_system(), _control_groups()) if found is not None]
    return max(0, min(known)) if known else None


def _system() -> int | None:
    return bytes_of(_MEMINFO, "MemAvailable")


def bytes_of(path: Path, name: str) -> int | None:
    """Return the bytes of a line "NAME: 12 kB" of a file of the system; None if there is none.

    Example:
        >>> bytes_of(Path("/proc/none"), "MemTotal") is None
        True
    """
    try:
        with path.open("rb") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith(f"{name}:".encode()))
    except (OSError, StopIteration):
        return None


def _control_groups() -> int | None:
    """Return the smallest room of this process's control group and its parents, version 2 or 1."""
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError:
        return None
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _ROOT, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _ROOT / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.strip("/")
        rooms += [_room(each, *names) for each in (folder, *folder.parents) if each.is_relative_to(root)]
    return min((room for room in rooms if room is not None), default=None)


def _room(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        allowed = int((folder / limit).read_text())  # "max" means no limit
        used = int((folder / usage).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    cached = next((int(line.split()[1]) for line in lines if line.split()[0] == reclaimable), 0)
    return allowed - used + cached


def require_memory(function: str, needed: int, available: int | None, what: str, remedy: str) -> None:
    """Raise MemoryError, with the numbers, unless the needed memory is available."""
    if available is not None and needed > available:
        expected = f"{decimal_size(needed)} of free memory for {what}"
        raise MemoryError(explain(function, "", expected=expected, got=decimal_size(available), remedy=remedy))
