"""Arenas: flat arrays of the variables of one dtype, with gradients at the same offsets; and their allocator."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..base import files, partition
from ..base.devices import parse
from ..base.errors import DeviceError, SharedMemoryError, explain
from ..base.options import StepOptions
from ..comm.arrays import accumulation_dtype, import_cupy
from ..comm.process_group import ProcessGroup
from ..comm.shared_memory import free_space
from .pieces import AS_THEY_ARE, NodeForm, Range
from .values import zeros

if TYPE_CHECKING:
    from ..comm.node import SharedBlock

__all__ = ["ALIGNMENT_BYTES", "Arena", "ArenaAllocator", "Gradients", "by_arena", "padded"]

ALIGNMENT_BYTES = 64  # of each variable: a cache line, which suits vector instructions
FIRST_SLAB = 64 << 20
LARGEST_SLAB = 1 << 30
PAGE = 64 << 10  # the largest page size of common machines
UNLIMITED = 1 << 62
LEAST_PIECE = 256 << 10  # bytes: with smaller ones a step was slower than with an all-reduce


@final
class Gradients:
    """The gradients of an arena, in one flat array for each replica.

    Attributes:
        local: one flat array for each replica of this rank; empty if variables have their own gradients, which a step takes.
        node: those of all replicas of the node, in replica order; None if the node shares no memory.
    """

    __slots__ = ("_arena", "_form", "local", "node")

    def __init__(self, arena: Arena, local: Sequence[Any] = (), node: Sequence[np.ndarray] | None = None) -> None:
        self._arena = arena
        self._form: NodeForm | None = None
        self.local: list[Any] = list(local)
        self.node = None if node is None else list(node)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of all gradients."""
        return self._arena.dtype

    @property
    def size(self) -> int:
        """Elements in each flat array."""
        return self._arena.size

    @property
    def key(self) -> str:
        """Name of the arena, equal on every rank."""
        return self._arena.key

    @property
    def form(self) -> NodeForm:
        """The form of sums between nodes. All ranks call it."""
        return self._form or self._arena.form

    def in_form(self, form: NodeForm) -> Gradients:
        """Return the same gradients with another form of their sums."""
        made = Gradients(self._arena, self.local, self.node)
        made._form = form
        return made

    def owned(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the part of element ranges that this rank reduces and updates."""
        return self._arena.owned(ranges)

    def pieces(self, ranges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]] | None:
        """Return the part that this rank's peer on each node reduces and updates; None if each peer does all of it."""
        return self._arena.pieces(ranges)

    def node_pieces(self) -> list[list[tuple[int, int]]]:
        """Return the pieces of all slices, by node; empty if no slice is cut."""
        return self._arena.node_pieces()

    def by_owner(self) -> list[tuple[int, int]]:
        """Return the range that each owner on this node reduces and updates."""
        return self._arena.by_owner()


@final
class Arena:
    """One slab of variables. `ArenaAllocator` creates it, equal on every rank.

    `copies` holds one flat array on CPUs, shared by the ranks of the node if possible, and one for each of this rank's devices on
    GPUs. An arena is cut into slices, one for each rank of a node, at the same offsets on every node. Every node updates a whole
    slice, or, if the arena is `sharded`, a piece of it, whose slots exist on no other node.

    Attributes:
        key: name of the arena, equal on every rank.
        dtype, size: of the flat arrays; size in elements.
        used: elements given to variables so far.
        copies: the copies of the variables that this rank writes to; writable, for internal use.
        gradients: the gradient arrays, None if nothing is trained.
    """

    def __init__(
        self,
        group: ProcessGroup,
        key: str,
        copies: Sequence[Any],
        shared: bool,
        central: bool = False,
        sharded: bool = False,
        new_form: Callable[[Range, Range], NodeForm] | None = None,
    ) -> None:
        """Wrap flat arrays of one dtype and size.

        Args:
            shared: the ranks of the node share the memory, so each writes only its part.
            central: if shared, the first of them writes all of it.
            sharded: nodes update pieces of slices if these are large enough.
            new_form: returns the form of pieces between nodes, for the elements that this rank updates, and its slice.
        """
        self.group = group
        self.key = key
        self.copies = list(copies)
        self.dtype: np.dtype = self.copies[0].dtype
        self.size: int = self.copies[0].size
        self.used = 0
        self.gradients: Gradients | None = None
        self._writer: tuple[int | None, int] = (group.node.rank, group.node.size) if shared else (0, 1)
        self._slice = (group.slice_index, group.slices) if shared or group.node.size == 1 else (0, 1)
        if shared and central:
            self._writer = self._slice = (0 if group.node.rank == 0 else None, 1)
        self._may_shard, self._starts = sharded, list[int]()  # offsets of variables
        self._new_form = new_form
        self._bounds: list[tuple[int, int]] | None = None
        self._pieces: list[list[tuple[int, int]]] = []  # of each slice, by node

    @property
    def values(self) -> Any:
        """The first copy; on CPUs the only one."""
        return self.copies[0]

    def take(self, size: int) -> int | None:
        """Return the offset of `size` free elements and mark them used; None if they do not fit.

        After the first call of `bounds` it returns None, because the slices are fixed.
        """
        unit = max(1, ALIGNMENT_BYTES // self.dtype.itemsize)
        offset = -(-self.used // unit) * unit
        if self._bounds is not None or offset + size > self.size:
            return None
        self.used = offset + size
        self._starts.append(offset)
        return offset

    def bounds(self) -> list[tuple[int, int]]:
        """Return the element range of each slice owner; fixed at the first call. All ranks call it.

        Existing variables are divided evenly. Later ones go to another arena.
        """
        if self._bounds is None:
            slices, nodes = self._slice[1], self.group.num_nodes
            if self._may_shard and self.used * self.dtype.itemsize >= LEAST_PIECE * slices * nodes:
                cuts = [self._cut(self.used * part // (slices * nodes)) for part in range(slices * nodes + 1)]
                pieces = list(itertools.pairwise(cuts))
                self._pieces = [pieces[first : first + nodes] for first in range(0, len(pieces), nodes)]
                self._bounds = [(of_slice[0][0], of_slice[-1][1]) for of_slice in self._pieces]
            else:
                self._bounds = partition.aligned_bounds(self.used, slices)
        return self._bounds

    def _cut(self, element: int) -> int:
        """Return the piece border nearest to an element: the start of a variable, or of a page of its slots in a file.

        So no two nodes write into one page of a file.
        """
        if element in (0, self.used):
            return element
        index = bisect_right(self._starts, element) - 1
        start, after = self._starts[index], [*self._starts[index + 1 :], self.used][0]
        page = files.PAGE // accumulation_dtype(self.dtype).itemsize
        return min(start + round((element - start) / page) * page, after)

    @property
    def sharded(self) -> bool:
        """True if each node updates its piece of each slice and alone has its slots. All ranks call it."""
        self.bounds()
        return bool(self._pieces)

    @functools.cached_property
    def form(self) -> NodeForm:
        """The form of gradients and weights between nodes. All ranks use it."""
        if self._new_form is None or not self.sharded:
            return AS_THEY_ARE
        every = [(0, self.size)]
        return self._new_form(*(each[0] if each else (0, 0) for each in (self.owned(every), self.sliced(every))))

    def clear_stored(self, low: int, high: int, value: Any = None) -> None:
        """Clear what is stored beside weights [low, high) before they are overwritten; with `value`, only of changed ones."""
        if "form" not in vars(self) or not self.form.names:
            return
        for begin, end in self.owned([(low, high)]):
            where = ... if value is None else self.values[begin:end] != value[begin - low : end - low]
            for array in self.form.stored(begin, end).values():
                array[where] = 0

    def sliced(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the parts of element ranges inside this rank's slice, in order; fixes the slices. All ranks call it."""
        bounds = self.bounds()
        return [] if self._slice[0] is None else partition.inside(ranges, *bounds[self._slice[0]])

    def pieces(self, ranges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]] | None:
        """Return the parts inside each node's piece of this rank's slice; None if slices are not cut. All ranks call it."""
        if not self.sharded:
            return None
        if self._slice[0] is None:
            return [[] for _ in range(self.group.num_nodes)]
        return [partition.inside(ranges, *piece) for piece in self._pieces[self._slice[0]]]

    def node_pieces(self) -> list[list[tuple[int, int]]]:
        """Return the pieces of all slices, by node; empty if no slice is cut. All ranks call it."""
        return [list(pieces) for pieces in zip(*self._pieces, strict=True)] if self.sharded else []

    def by_owner(self) -> list[tuple[int, int]]:
        """Return the range that each owner on this node updates. All ranks call it."""
        return self.node_pieces()[self.group.node_index] if self.sharded else self.bounds()

    def owned(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the parts that this rank updates: in its piece of its slice, or in the whole slice. All ranks call it."""
        pieces, inter = self.pieces(ranges), self.group.inter
        if pieces is None:
            return self.sliced(ranges)
        return [] if inter is None else pieces[inter.rank]

    def writes(self, length: int, alignment: int = partition.ALIGNMENT) -> tuple[int, int]:
        """Return the range of `length` things that this rank writes when all ranks write them together."""
        rank, size = self._writer
        if rank is None:
            return 0, 0
        return partition.aligned_bounds(length, size, alignment)[rank] if size > 1 else (0, length)


def by_arena(variables: Iterable[Any]) -> dict[Arena, list[Any]]:
    """Return the variables of each arena, without empty ones. Variables and arenas stay in order."""
    members: dict[Arena, list[Any]] = {}
    for variable in variables:
        if variable.arena is not None and variable.size:
            members.setdefault(variable.arena, []).append(variable)
    return members


def padded(arena: Arena, variables: Sequence[Any]) -> dict[int, int]:
    """Return the range of each variable of an arena including its padding, as a dict of start and end."""
    unit = max(1, ALIGNMENT_BYTES // arena.dtype.itemsize)
    return {v.offset: min(-(-(v.offset + v.size) // unit) * unit, arena.size) for v in variables}


def _forms(name: str | None, dtype: np.dtype) -> Callable[[Range, Range], NodeForm] | None:
    """Return what makes the forms of arenas of a dtype for a `StepOptions.wire`; None for numbers as they are."""
    if name is None:
        return None
    from .encoded import forms_of

    return forms_of(name, dtype)


@final
class ArenaAllocator:
    """An allocator of variables in arenas, in the same order on every rank. One per strategy.

    A slab holds variables of one dtype, trainable or not. The first has 64 MiB, each next one twice as much up to 1 GiB, at most
    a quarter of the free memory, and at least the variable. Unused pages cost nothing. On a GPU they do: there the next slab has
    a quarter of all before it. `close()` frees the memory; a dead variable does not, because other ranks might still use it.

    Args:
        group: the strategy's ranks.
        devices: the devices of variables; default this rank's. All "gpu:k", or none.
        central: the first rank of a node writes and updates all variables, instead of each rank its part.
        step: the options in effect, for the forms of `Arena`s and the memory of their gradients.

    Attributes:
        keeps_gradients: whether the gradients of replicas stay in memory until the step; else see `Gradients`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        devices: Sequence[str] | None = None,
        central: bool = False,
        step: StepOptions | None = None,
    ) -> None:
        self.group, self.step = group, step or StepOptions()
        self.central, self.sharded = central, bool(self.step.sharded_slots)
        self.keeps_gradients = not self.step.sharded_gradients
        self.devices = tuple(group.topology.devices if devices is None else devices)
        on_gpu = [parse(device)[0] == "gpu" for device in self.devices]
        if any(on_gpu) and not all(on_gpu):
            text = explain("ArenaAllocator", "devices", expected="all CPUs or all GPUs", got=", ".join(self.devices))
            raise DeviceError(text)
        self.on_gpu = all(on_gpu)
        self.arenas: list[Arena] = []
        self._open: dict[tuple[np.dtype, bool], Arena] = {}
        self._slabs: defaultdict[tuple[np.dtype, bool], list[int]] = defaultdict(list)  # bytes of each
        self._blocks: dict[Arena, list[SharedBlock]] = {}

    def allocate(self, size: int, dtype: np.dtype, trainable: bool, name: str) -> tuple[Arena, int]:
        """Return an arena and the offset in it of `size` zeroed elements. Collective, inside a collective.

        Raises:
            SharedMemoryError: on every rank, if the shared memory of a node cannot hold them.
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

    def add_gradients(self, arena: Arena, offset: int, size: int, name: str) -> None:
        """Allocate gradients for a variable that was created without. Collective, inside a collective.

        Raises:
            SharedMemoryError: on every rank, if the shared memory of a node cannot hold them.
        """
        what = f"the gradients of variable {name!r}"
        if arena.gradients is None:
            arena.gradients = self._new_gradients(arena, what)
        if not self.on_gpu:
            self.group.node.agree_populated(self._populate_gradients(arena, offset, size), what)

    def close(self) -> None:
        """Free all memory; views that the user holds stay valid."""
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
                arena.gradients = self._new_gradients(arena, what)
            return arena
        node = self.group.node
        values = node.allocate([size if rank == 0 else 0 for rank in range(node.size)], what)
        weights = [values.segments[0].view(dtype)]
        sharded = self.sharded and trainable
        forms = _forms(self.step.wire, dtype)
        arena = Arena(self.group, self._key(key), weights, True, self.central, sharded, forms)
        self._blocks[arena] = [values]
        if trainable:
            kept = self.keeps_gradients
            arena.gradients = self._new_gradients(arena, f"the gradients of {what}") if kept else Gradients(arena)
        return arena

    def _new_gradients(self, arena: Arena, what: str) -> Gradients:
        """Return gradient arrays for an arena; their pages are not touched. Collective, inside a collective."""
        if self.on_gpu:
            return Gradients(arena, [zeros(arena.size, arena.dtype, device) for device in self.devices])
        node, counts = self.group.node, list(self.group.replicas_of_node)
        size = arena.size * arena.dtype.itemsize
        block = node.allocate([size * count for count in counts], what)
        replicas = [
            [block.segments[rank][size * i : size * (i + 1)].view(arena.dtype) for i in range(count)]
            for rank, count in enumerate(counts)
        ]
        every = [array for rank in replicas for array in rank]
        self._blocks[arena].append(block)
        return Gradients(arena, replicas[node.rank], every if node.shared else None)

    def _key(self, key: tuple[np.dtype, bool]) -> str:
        return f"{len(self.arenas)}:{key[0].name}:{'trainable' if key[1] else 'fixed'}"

    def _slab_bytes(self, key: tuple[np.dtype, bool], needed: int, trainable: bool) -> int:
        slabs = self._slabs[key]
        wanted = max(FIRST_SLAB, sum(slabs) // 4) if self.on_gpu else min(FIRST_SLAB << len(slabs), LARGEST_SLAB)
        copies = 1 + (sum(self.group.replicas_of_node) if trainable and self.keeps_gradients else 0)
        limit = self.group.agree(self._free_bytes() // 4 // copies, "min")
        slabs.append(-(-max(needed, min(wanted, limit), 1) // PAGE) * PAGE)
        return slabs[-1]

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
        real = real and self._populate_gradients(arena, offset, size)
        try:
            node.agree_populated(real, what)
        except SharedMemoryError:
            arena.used = offset
            raise

    def _populate_gradients(self, arena: Arena, offset: int, size: int) -> bool:
        """Touch the pages of a variable's gradients on this rank; return False if there is no memory for them."""
        item, rank = arena.dtype.itemsize, self.group.node.rank
        for replica in range(len(arena.gradients.local) if arena.gradients else 0):
            start = (replica * arena.size + offset) * item
            if not self._blocks[arena][1].populate(rank, start, start + size * item):
                return False
        return True
