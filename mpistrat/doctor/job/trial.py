"""The trial of an item on each rank: the ranks, a folder, and reports to the process that runs the check."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, final

import numpy as np

from ...cluster.topology import Topology
from ..probe import report

__all__ = ["Skipped", "Trial"]

_SHOWN = 3  # wrong values of a rank


class Skipped(Exception):
    """The error of an item that cannot be tried here; its text is the reason."""


@final
class Trial:
    """One item on one rank.

    Args:
        topology: all ranks.
        folder: on a file system that all ranks see; the item may write there.
        end: when the item should end, by `time.perf_counter`.
    """

    def __init__(self, topology: Topology, folder: Path, end: float) -> None:
        self.topology, self.folder, self._end = topology, folder, end
        self.comm: Any = topology.comm
        self._wrong = 0

    def part(self, name: str) -> None:
        """Report this rank's next step. If it hangs, the report names this step."""
        report(rank=self.topology.rank, part=name)

    def same(self, what: str, got: Any, expected: Any) -> None:
        """Report unexpected values, without messages to other ranks: the network may be at fault."""
        mine, wanted = np.asarray(got), np.asarray(expected)
        if mine.shape == wanted.shape and bool((mine == wanted).all()):
            return
        self._wrong += 1
        if self._wrong <= _SHOWN:
            report(rank=self.topology.rank, wrong=f"{what}: {_difference(mine, wanted)}")

    def has_time(self, seconds: float) -> bool:
        """Return True if every rank has that time left. Collective."""
        from mpi4py import MPI

        least = np.empty(1)
        self.comm.Allreduce(np.array([self._end - time.perf_counter()]), least, MPI.MIN)
        return bool(least[0] > seconds)

    def number(self, row: str, column: str, value: float, unit: str) -> None:
        """Report a figure of all ranks, on rank 0."""
        if self.topology.rank == 0:
            report(number=[row, column, float(value), unit])

    def fact(self, **facts: Any) -> None:
        """Report facts by name, on rank 0."""
        if self.topology.rank == 0:
            report(fact=facts)


def _difference(got: np.ndarray, expected: np.ndarray) -> str:
    """Describe the first difference of two arrays."""
    if got.shape != expected.shape:
        return f"expected the shape {expected.shape}, got {got.shape}"
    places = np.argwhere(np.atleast_1d(got != expected))
    first = tuple(int(i) for i in places[0])
    where = f" at element {first[0] if len(first) == 1 else first}" if got.ndim else ""
    more = f" ({len(places)} of {got.size} are wrong)" if got.size > 1 else ""
    return f"expected {np.atleast_1d(expected)[first]}{where}, got {np.atleast_1d(got)[first]}{more}"
