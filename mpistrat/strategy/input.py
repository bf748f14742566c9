"""How a distributed dataset meets the ranks and devices of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster.devices import parse
from ..comm.process_group import ProcessGroup
from ..cross_device.values import place

__all__ = ["sum_over_ranks", "to_device"]


def to_device(devices: Sequence[str]) -> Callable[[np.ndarray, int], Any] | None:
    """Return what moves a host array to a local replica's device; None where all are CPUs. Not collective."""
    if all(parse(device)[0] == "cpu" for device in devices):
        return None
    return lambda array, replica: place(array, devices[replica])


def sum_over_ranks(group: ProcessGroup) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return what sums a small array of integers over all ranks. Not collective; what it returns is."""

    def total(counts: NDArray[np.int64]) -> NDArray[np.int64]:
        with group.collective("input step", dtype="int64", shape=counts.shape):
            return group.all_gather_int(counts.tolist()).sum(axis=0)

    return total
