"""Cores of this process, and whether BLAS starts as many threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..cluster.cores import THREAD_VARIABLES, available_cores, cpu_quota
from .finding import Finding, ok, warning

__all__ = ["blas_threads", "check_cores", "core_ranges"]


def check_cores() -> Iterator[Finding]:
    """Compare cores with BLAS threads, and with the processor time that a container may use."""
    cores = available_cores()
    what = f"{len(cores)} for this process ({core_ranges(cores)})"
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
    """Return how many threads the user asks for in each rank, and the variable that says so; (0, "") if none does."""
    said = {}
    for name in THREAD_VARIABLES:
        text = os.environ.get(name, "").split(",")[0].strip()
        if text.isascii() and text.isdigit() and 0 < len(text) < 7:
            said[name] = int(text)
    name = max(said, key=said.__getitem__, default="")
    return said.get(name, 0), f"{name}={said[name]}" if name else ""


def core_ranges(cores: list[int]) -> str:
    """Return sorted core numbers in short.

    Example:
        >>> core_ranges([0, 1, 2, 3, 8, 10, 11])
        '0-3,8,10-11'
    """
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in parts)
