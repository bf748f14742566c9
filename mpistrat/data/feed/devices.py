"""Batches on their way to the replicas' devices: copied while the step before computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.distributed_values import regroup
from ...base.errors import explain
from ..spec import empty_rows
from .plan import Plan, Step

__all__ = ["Device", "Devices", "Loaded"]


class Device(Protocol):
    """One replica's device, to which arrays are copied on a stream of its own."""

    def start(self, array: NDArray[Any]) -> Any:
        """Begin to copy a host array, in any thread; return what `finish` wants."""

    def finish(self, started: Any) -> Any:
        """Make what this thread computes next wait for the copy, and return the array on the device."""

    def reclaim(self) -> None:
        """Take back the memory of arrays that the program has dropped; called by the thread that computes."""


class Loaded(NamedTuple):
    """A step whose copies have begun. `rows` and `nbytes` are this worker's; without `parts` it has none left.

    `arrays` are each local replica's, on the host.
    """

    total: int | None
    rows: int
    nbytes: int
    parts: list[Any] | None
    counts: NDArray[np.int64] | None = None
    arrays: list[list[Any]] | None = None


class Devices:
    """Starts the copies of each step as it is read, and finishes them as it is handed out.

    Reading and starting happen in the thread that reads ahead, so as many steps are on the devices as it may read
    ahead. Without devices the arrays stay where they are.

    Args:
        devices: one for each local replica, None for one that takes host arrays; None where all do.
    """

    def __init__(self, devices: Sequence[Device | None] | None) -> None:
        self._devices = devices if devices is not None and any(device is not None for device in devices) else None

    @property
    def copies(self) -> bool:
        """Whether steps are copied to devices."""
        return self._devices is not None

    def load(self, steps: Iterator[Step]) -> Iterator[Loaded]:
        """Return the steps with their copies begun."""
        return map(self._load, steps)  # no generator: its variables would hold the batch that the loop has

    def _load(self, step: Step) -> Loaded:
        if step.blocks is None:
            return Loaded(step.rows, 0, 0, None, step.counts)
        rows = nbytes = 0
        arrays = [nest.flatten(block) for block in step.blocks]
        for leaves in arrays:
            rows += len(leaves[0]) if leaves else 0
            for leaf in leaves:
                nbytes += leaf.nbytes
        return Loaded(step.rows, rows, nbytes, self._start(step.blocks), step.counts, arrays)

    def _start(self, blocks: list[Any]) -> list[Any]:
        if self._devices is None:
            return blocks
        return [
            block
            if device is None
            else nest.map_structure(lambda leaf, device=device: _Started(device.start(leaf)), block)
            for device, block in zip(self._devices, blocks, strict=True)
        ]

    def hand_out(self, loaded: Loaded, plan: Plan) -> tuple[Any, list[list[Any]]]:
        """Return the element of a step, and each replica's arrays in it.

        The arrays are on the replicas' devices, and have zero rows where the worker has none left.
        """
        parts, arrays = loaded.parts, loaded.arrays
        if parts is None:
            if plan.row_spec is None:
                expected = "at least one batch on every worker, or a Dataset, to know what zero rows look like"
                raise ValueError(
                    explain("distribute_datasets_from_function", "dataset_fn", expected=expected, got="none")
                )
            parts = self._start([empty_rows(plan.row_spec) for _ in range(plan.workers.num_local_replicas)])
        if self._devices is not None:
            parts = [
                part
                if device is None
                else nest.map_structure(lambda leaf, device=device: device.finish(leaf.copy), part)
                for device, part in zip(self._devices, parts, strict=True)
            ]
        if arrays is None or self._devices is not None:
            arrays = [nest.flatten(part) for part in parts]
        return regroup(parts), arrays

    def reclaim(self) -> None:
        """Take back what the program has dropped; called as it asks for the next step."""
        for device in self._devices or ():
            if device is not None:
                device.reclaim()


class _Started:
    """What a device returned from `start`: one leaf, whatever it is."""

    def __init__(self, copy: Any) -> None:
        self.copy = copy
