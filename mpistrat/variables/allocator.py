"""Where variables get their memory: slabs, in memory that the ranks of a node share, or on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from ..cluster.devices import parse
from ..comm.arrays import import_cupy
from ..comm.process_group import ProcessGroup
from ..comm.shared_memory import free_space
from ..errors import DeviceError, SharedMemoryError, explain
from .arena import Arena, Gradients
from .memory import zeros

if TYPE_CHECKING:
    from ..comm.node import SharedBlock

__all__ = ["ArenaAllocator"]

FIRST_SLAB = 64 << 20
LARGEST_SLAB = 1 << 30
PAGE = 64 << 10  # the largest page that common machines have
UNLIMITED = 1 << 62


@final
class ArenaAllocator:
    """Hands out places in arenas, in the same order on every rank. One per strategy.

    A slab holds variables of one dtype, trainable or not. It has 64 MiB at first, then twice as much each time up to
    1 GiB, at most a quarter of the memory that is free, and at least the variable. Pages that no variable uses cost
    nothing. Memory is given back at `close()`, not when a variable dies: other ranks might still use it.

    Args:
        group: the strategy's ranks.
        devices: where variables lie; default this rank's devices. All "gpu:k", or none.
        central: whether the first rank of a node writes and updates all variables, instead of each its part.
    """

    def __init__(self, group: ProcessGroup, devices: Sequence[str] | None = None, central: bool = False) -> None:
        self.group = group
        self.central = central
        self.devices = tuple(group.topology.devices if devices is None else devices)
        on_gpu = [parse(device)[0] == "gpu" for device in self.devices]
        if any(on_gpu) and not all(on_gpu):
            text = explain("ArenaAllocator", "devices", expected="all CPUs or all GPUs", got=", ".join(self.devices))
            raise DeviceError(text)
        self.on_gpu = all(on_gpu)
        self.arenas: list[Arena] = []
        self._open: dict[tuple[np.dtype, bool], Arena] = {}
        self._next_slab: dict[tuple[np.dtype, bool], int] = {}
        self._blocks: dict[Arena, list[SharedBlock]] = {}

    def allocate(self, size: int, dtype: np.dtype, trainable: bool, name: str) -> tuple[Arena, int]:
        """Return an arena and the offset in it of `size` zeroed elements. Collective, inside a collective.

        Args:
            size: elements.
            dtype: of the elements.
            trainable: whether gradients are needed.
            name: the variable, for errors.

        Raises:
            SharedMemoryError: on every rank, when the shared memory of a node cannot hold them.
        """
        key, what = (dtype, trainable), f"variable {name!r}"
        arena = self._open.get(key)
        offset = None if arena is None else arena.take(size)
        if arena is None or offset is None:
            arena = self._open[key] = self._new_slab(size * dtype.itemsize, dtype, trainable, what)
            self.arenas.append(arena)
            offset = arena.take(size)
        if offset is None:
            raise RuntimeError(
                f"ArenaAllocator.allocate: {name}: {size} elements do not fit a new slab of {arena.size}"
            )
        self._make_real(arena, offset, size, what)
        return arena, offset

    def close(self) -> None:
        """Let go of all memory; views that the user kept stay valid."""
        for arena in self.arenas:
            arena.copies.clear()
            arena.gradients = None
        self.arenas.clear()
        self._open.clear()
        self._blocks.clear()

    def _new_slab(self, needed: int, dtype: np.dtype, trainable: bool, what: str) -> Arena:
        key = (dtype, trainable)
        size = self._slab_bytes(key, needed, trainable)
        if self.on_gpu:
            elements = size // dtype.itemsize
            arena = Arena(self.group, self._key(key), [zeros(elements, dtype, d) for d in self.devices], shared=False)
            if trainable:
                arena.gradients = Gradients(arena, [zeros(elements, dtype, d) for d in self.devices], None)
            return arena
        node = self.group.node
        counts = list(self.group.replicas_of_node)
        values = node.allocate([size if rank == 0 else 0 for rank in range(node.size)], what)
        arena = Arena(self.group, self._key(key), [values.segments[0].view(dtype)], True, self.central)
        self._blocks[arena] = [values]
        if trainable:
            block = node.allocate([size * count for count in counts], f"the gradients of {what}")
            replicas = [
                [block.segments[rank][size * i : size * (i + 1)].view(dtype) for i in range(count)]
                for rank, count in enumerate(counts)
            ]
            every = [array for rank in replicas for array in rank]
            arena.gradients = Gradients(arena, replicas[node.rank], every if node.shared else None)
            self._blocks[arena].append(block)
        return arena

    def _key(self, key: tuple[np.dtype, bool]) -> str:
        return f"{len(self.arenas)}:{key[0].name}:{'trainable' if key[1] else 'fixed'}"

    def _slab_bytes(self, key: tuple[np.dtype, bool], needed: int, trainable: bool) -> int:
        wanted = self._next_slab.get(key, FIRST_SLAB)
        self._next_slab[key] = min(2 * wanted, LARGEST_SLAB)
        copies = 1 + (sum(self.group.replicas_of_node) if trainable else 0)
        limit = self.group.agree(self._free_bytes() // 4 // copies, "min")
        return -(-max(needed, min(wanted, limit), 1) // PAGE) * PAGE

    def _free_bytes(self) -> int:
        if self.on_gpu:
            cupy = import_cupy("Variable")
            return min(int(cupy.cuda.Device(parse(d)[1]).mem_info[0]) for d in self.devices)
        free = free_space() if self.group.node.shared else None
        return UNLIMITED if free is None else free

    def _make_real(self, arena: Arena, offset: int, size: int, what: str) -> None:
        """Touch the pages of a new variable while a lack of memory is still an error, not a signal."""
        if self.on_gpu:
            return
        node, item = self.group.node, arena.dtype.itemsize
        blocks = self._blocks[arena]
        low, high = arena.writes(size)
        real = blocks[0].populate(0, (offset + low) * item, (offset + high) * item)
        for replica in range(len(arena.gradients.local) if arena.gradients else 0):
            start = (replica * arena.size + offset) * item
            real = real and blocks[1].populate(node.rank, start, start + size * item)
        try:
            node.agree_populated(real, what)
        except SharedMemoryError:
            arena.used = offset
            raise
