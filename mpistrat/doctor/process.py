"""This process: its Python and packages, its cores and BLAS threads, and the limits that matter to MPI."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from ..base.cores import THREAD_VARIABLES, available_cores, cpu_quota
from ..base.text import ranges
from ..base.version import __version__
from .finding import Finding, ok, warning

__all__ = ["blas_threads", "check_cores", "check_interpreter", "check_limits", "check_torch", "open_files", "versions"]

_PACKAGES = ("numpy", "mpi4py", "h5py")


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package, and of its dependencies.

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
    """Report the Python in use."""
    found = versions()
    rest = ", ".join(f"{name} {found[name]}" for name in ("mpistrat", "numpy"))
    yield ok("Python", f"{found['python']} at {sys.executable}, {rest}, on {platform.system()} {platform.machine()}")


_TORCH = 2, 5  # the first PyTorch that loads backends at its import


def check_torch() -> Iterator[Finding]:
    """Check that torch.distributed can use the backends of this package; nothing without PyTorch."""
    name = "PyTorch"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    known = "mpistrat" in importlib.metadata.entry_points(group="torch.backends").names
    switch = os.environ.get("MPISTRAT_TORCH", "1")
    numbers = [int(part) if part.isdigit() else 0 for part in version.split(".")[:2]]
    if tuple(numbers) < _TORCH:
        remedy = "Install PyTorch 2.5 or newer, or call mpistrat.torch.use() in the program"
        yield warning(name, f"{version} loads no backends: init_process_group needs RANK, MASTER_ADDR, …", remedy)
    elif not known:
        remedy = (
            "Install mpistrat again: pip install --force-reinstall --no-deps mpistrat; or call mpistrat.torch.use()"
        )
        yield warning(name, f"{version}; the installed mpistrat has no entry point in torch.backends", remedy)
    elif switch == "0" or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        variable = "MPISTRAT_TORCH=0" if switch == "0" else "TORCH_DEVICE_BACKEND_AUTOLOAD"
        yield ok(name, f"{version}; {variable} keeps torch.distributed from starting over MPI")
    else:
        yield ok(name, f"{version}; under a launcher torch.distributed starts over MPI, without variables")


def check_cores() -> Iterator[Finding]:
    """Compare cores with BLAS threads, and with the processor time that a container may use."""
    cores = available_cores()
    what = f"{len(cores)} for this process ({','.join(ranges(cores))})"
    allowed = cpu_quota()
    if allowed is not None and allowed.cores < len(cores):
        remedy = "Start as many ranks × threads as the quota allows, or raise it (docker run --cpus=…)"
        yield warning("cores", f"{what}, but its control group may use the time of {allowed.cores:g} only", remedy)
    else:
        yield ok("cores", what)
    threads, why = blas_threads()
    if threads > len(cores):
        what = f"{threads} ({why}) on {len(cores)} cores: they hinder each other"
        name = why.partition("=")[0]
        remedy = f"unset {name}: mpistrat gives each rank its share; or set it to {len(cores)} at most"
        yield warning("BLAS threads", what, remedy)
    elif why:
        yield ok("BLAS threads", f"{threads} ({why}) for every rank")
    else:
        yield ok("BLAS threads", "not set: each rank gets its share of its node's cores")


def blas_threads() -> tuple[int, str]:
    """Return the number of threads that the user sets per rank, and its variable; (0, "") if none."""
    said = {}
    for name in THREAD_VARIABLES:
        text = os.environ.get(name, "").split(",")[0].strip()
        if text.isascii() and text.isdigit() and 0 < len(text) < 7:
            said[name] = int(text)
    name = max(said, key=said.__getitem__, default="")
    return said.get(name, 0), f"{name}={said[name]}" if name else ""


_FILES, _STACK = 1024, 1 << 20
_CARDS = Path("/sys/class/infiniband")


def check_limits() -> Iterator[Finding]:
    """Check the limits of `ulimit`."""
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


def machine() -> str:
    """Return a text equal on ranks that can share memory: of boot, host name and /dev/shm. "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.uname().nodename} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return ""


def open_files() -> dict[str, int]:
    """Return the limit of open files, -1 for none, and the numbers of open files and sockets."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    kinds = []
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with contextlib.suppress(OSError):  # closed since
            kinds.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
    most = -1 if limit == resource.RLIM_INFINITY else limit
    return {"most": most, "open": len(kinds), "sockets": kinds.count("socket")}


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
