"""The state of a job as one list of entries: an array's name, this rank's box of it, and the elements of the box.

`entries` lists all variables and optimizer slots. Files, snapshots and exports are written from this list, in flat slices.
`Writers` selects the elements that each rank writes. `locations` gives the same boxes of variables to a restore, whose ranks
may have other boxes. Any array with a box can be an entry, not only a variable's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from ..arena.layout import Box
from ..arena.values import parse_dtype
from ..base.files import PAGE
from ..base.partition import aligned_block
from ..comm.arrays import accumulation_dtype, to_host
from ..comm.process_group import ProcessGroup
from ..variables import Placement
from ..variables.variable import box_of, parts_for_file
from .optimizer_states import Kept, OptimizerStates

__all__ = [
    "Entry",
    "Form",
    "Location",
    "Slice",
    "Writers",
    "entries",
    "key_of",
    "link_of",
    "locations",
    "name_of",
    "slices_of",
    "variable_entries",
    "wholes",
]


class Form(NamedTuple):
    """The shape and dtype of a whole array. The dtype is a name: files may have dtypes that NumPy lacks."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def kind(self) -> np.dtype:
        """The dtype."""
        return parse_dtype(self.dtype)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.kind.itemsize


class Slice(NamedTuple):
    """Elements of an array that this rank writes."""

    key: str
    start: int
    array: np.ndarray  # flat, contiguous


class Entry(NamedTuple):
    """An array of the state, and this rank's share of it.

    Attributes:
        key: the array's name in files.
        dtype: of its elements.
        box: the range of the whole array.
        parts: this rank's elements of the box: the number of the first one, and a flat array.
        everywhere: whether all ranks have the box; else each element is on one rank.
    """

    key: str
    dtype: np.dtype
    box: Box
    parts: Sequence[tuple[int, Any]]
    everywhere: bool = False


class Location(NamedTuple):
    """The location of a variable: a whole array, rows of a ShardedVariable, or on each rank of a mesh a box.

    Attributes:
        name: of the array.
        box: the variable in it.
    """

    name: str
    box: Box


def locations(placement: Placement) -> dict[str, Location]:
    """Return the location of each variable, by its name."""
    found = {}
    for variable in placement.variables:
        found[variable.name] = Location(variable.name, box_of(variable))
    for whole in placement.sharded:
        for shard, start in zip(whole.variables, whole.offsets, strict=True):
            found[shard.name] = Location(whole.name, Box(whole.shape, [(start, start + shard.shape[0])]))
    return found


def entries(placement: Placement, states: OptimizerStates, writers: Writers) -> Iterator[Entry]:
    """Yield all variables, and the slots of all optimizers. Collective: take the slices of each before the next."""
    found = locations(placement)
    yield from variable_entries(placement, found, writers)
    dtypes = {variable.name: accumulation_dtype(variable.dtype) for variable in placement.variables}
    for index, kept in enumerate(states.kept()):
        yield from _slot_entries(placement, found, dtypes, index, kept, writers)


def variable_entries(placement: Placement, found: Mapping[str, Location], writers: Writers) -> Iterator[Entry]:
    """Yield all variables, by their locations. Collective."""
    for variable in placement.variables:
        where, dtype = found[variable.name], variable.dtype
        key = f"variables/{key_of(where.name)}"
        if variable.arena is not None:
            own = variable.arena.values[variable.offset : variable.offset + variable.size]
            yield Entry(key, dtype, where.box, [(0, own)], True)
        else:
            yield Entry(key, dtype, where.box, parts_for_file(variable, writers.leads, writers.reach_servers))


def _slot_entries(
    placement: Placement,
    found: Mapping[str, Location],
    dtypes: Mapping[str, np.dtype],
    index: int,
    kept: Kept,
    writers: Writers,
) -> Iterator[Entry]:
    """Yield the slots of an optimizer; the first rank has those of shards that were never updated. Collective."""
    covered: dict[tuple[str, str, np.dtype, tuple[int, ...]], list[tuple[int, int]]] = {}
    ranks = None if writers.all else writers.ranks
    for name, shape, dtype, slots in kept.slots_here(ranks, writers.leads, writers.each_node):
        whole_name, box = found.get(name) or Location(name, Box(shape))
        dtype = dtypes.get(name, dtype)
        # Of a mesh all ranks of a replica have what is not divided.
        none = bool(placement.replica_ranks) and box.elements is None and not writers.leads
        first, size = (box.first, math.prod(shape)) if box.elements is None else (0, box.whole_size)
        for slot, parts in slots.items():
            key = f"optimizers/{index}/slots/{key_of(whole_name)}/{key_of(slot)}"
            yield Entry(key, dtype, box, [] if none else parts)
            covered.setdefault((key, slot, dtype, box.shape), []).append((first, first + size))
    for (key, slot, dtype, shape), ranges in covered.items() if writers.leads else ():
        low = 0
        for begin, end in [*sorted(ranges), (math.prod(shape),) * 2]:
            if begin > low:
                yield Entry(key, dtype, Box(shape), [(low, np.full(begin - low, kept.start_of(slot), dtype))])
            low = end


@final
class Writers:
    """The ranks that write, and the elements that each writes of arrays on several ranks.

    Nodes have equal copies of most arrays: all writers write a share, with borders at pages of the file. Elements on one rank
    are written there, or by the first writer if that rank does not write.

    Args:
        group: all ranks.
        replica: the ranks of this rank's replica, if they may divide arrays.

    Attributes:
        ranks: the writers.
        each_node: whether the ranks of each node write all, divided among them.
        leads: whether this rank writes what is not divided: rank 0, or the first of each node.
        all: whether all ranks write.
        reach_servers: whether each parameter server writes its own variables.
        sets: the sets of ranks that write everything once: the ranks of each node, or all writers.
    """

    def __init__(
        self, group: ProcessGroup, replica: Sequence[int], ranks: Sequence[int], each_node: bool = False
    ) -> None:
        topology = group.topology
        self.ranks, self.each_node, self._rank = ranks, each_node, topology.rank
        self.leads = group.node.rank == 0 if each_node else topology.rank == 0
        self.all = len(ranks) == topology.size
        self.reach_servers = self.all and not (each_node and topology.num_nodes > 1)
        self._replica = replica or [topology.rank]
        self.sets = tuple(tuple(group.ranks_of(i)) for i in range(group.num_nodes)) if each_node else (tuple(ranks),)
        self._shares: dict[int, tuple[int, int]] = {}
        for rank in self._replica:
            among = next((one for one in self.sets if rank in one), ())
            self._shares[rank] = (among.index(rank), len(among)) if among else (0, 0)

    def slices(self, entry: Entry) -> list[Slice]:
        """Return the slices of an entry that this rank writes. Collective over a replica that divides the array."""
        key, dtype, box, parts, everywhere = entry
        if box.elements is not None:  # each rank of the replica sends its box, and receives the elements it writes
            wanted = [self._share(box.whole_size, dtype, rank) for rank in self._replica]
            start, _ = self._share(box.whole_size, dtype, self._rank)
            return [Slice(key, start, _flat(box.elements(_flat(parts[0][1], dtype), wanted), dtype))]
        if everywhere:
            low, high = self._share(box.size, dtype, self._rank)
            parts = [(low, array[low:high]) for _, array in parts]
        if box.contiguous:
            return [Slice(key, box.first + first, _flat(array, dtype)) for first, array in parts]
        return [
            Slice(key, start, array[mine - first : mine - first + count])
            for first, array in ((first, _flat(array, dtype)) for first, array in parts)
            for start, mine, count in box.spans(0, box.whole_size, first, first + array.size)
        ]

    def _share(self, size: int, dtype: np.dtype, rank: int) -> tuple[int, int]:
        """Return the range that a rank writes of elements that all ranks have."""
        index, count = self._shares[rank]
        return aligned_block(size, count, index, PAGE // dtype.itemsize) if count else (0, 0)


def slices_of(found: Iterable[Entry], writers: Writers) -> tuple[dict[str, Form], list[Slice]]:
    """Return the forms of all arrays of a list, and this rank's slices; each element is on one rank. Collective."""
    forms: dict[str, Form] = {}
    slices: list[Slice] = []
    for entry in found:
        if entry.key not in forms:
            forms[entry.key] = Form(entry.box.shape, _dtype_name(entry.dtype))
        slices += (one for one in writers.slices(entry) if one.array.size)
    return forms, slices


def wholes(forms: dict[str, Form], slices: Iterable[Slice]) -> dict[str, np.ndarray]:
    """Return whole arrays by key from slices with all their elements: views where one slice has all."""
    found: dict[str, np.ndarray] = {}
    for key, start, array in slices:
        form = forms[key]
        if array.size == form.size:
            found[key] = array.reshape(form.shape)
        else:
            whole = found.setdefault(key, np.empty(form.shape, form.kind))
            whole.reshape(-1)[start : start + array.size] = array
    return {key: found.get(key, np.empty(form.shape, form.kind)) for key, form in forms.items()}


@functools.cache
def _dtype_name(dtype: np.dtype) -> str:
    """Return NumPy's name of a dtype, cached: NumPy builds it on each call."""
    return dtype.name


def _flat(array: Any, dtype: np.dtype) -> np.ndarray:
    """Return flat elements in the dtype of files: a program may have set slots of another dtype."""
    return np.ascontiguousarray(to_host(array), dtype).reshape(-1)


# names


def key_of(name: str) -> str:
    """Return a name as one link of HDF5, which splits at slashes and reads "." as the group itself."""
    quoted = name.replace("%", "%25").replace("/", "%2F")
    return quoted.replace(".", "%2E") if set(quoted) == {"."} else quoted


def name_of(key: str) -> str:
    """Return the name of a key: the inverse of `key_of`."""
    return key.replace("%2E", ".").replace("%2F", "/").replace("%25", "%")


def link_of(key: str) -> str:
    """Return the link of the variable of an array in files: of itself, or of the slot's variable."""
    words = key.split("/")
    return words[1 if words[0] == "variables" else 3]
