"""Gather: the arrays of all replicas concatenated along an axis, along which their lengths may differ."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from ..arena.arithmetic import Arithmetic, finish
from ..base.buffers import BufferPool
from ..base.errors import CollectiveMismatchError, explain
from ..base.types import IndexedSlices
from ..comm.arrays import array_module, as_array, check_movable, dtype_name, on_device_of, to_host
from ..comm.call import Call
from ..comm.exchange import MessageExchange, SmallExchange, gather_parts
from ..comm.node import SMALL
from ..comm.packing import Forms, num_bytes, of_bytes, to_bytes
from ..comm.process_group import ProcessGroup
from .parts import keep
from .values import beside, counted_axis, local_values, row_size

__all__ = ["Gather", "reduce_slices", "to_gather"]

_LARGE = 1 << 30  # bytes; above, the counts of one call might exceed MPI's limit
_POOL = BufferPool(kept=2)
_SMALL = 1 << 16  # bytes on all ranks; smaller arrays share one message, which costs a copy on either side
_IN_ONE = 1 << 17  # bytes of all ranks that are sent between nodes together with their lengths


def to_gather(value: Any, group: ProcessGroup, function: str, path: str) -> list[Any]:
    """Return the local replicas' arrays at a path of a nest.

    Raises:
        TypeError: it has IndexedSlices, or a value that is not an array.
    """
    values = local_values(value, group, function, repeat=False)
    if any(isinstance(each, IndexedSlices) for each in values):
        raise TypeError(explain(function, f"value{path}", expected="arrays", got="IndexedSlices"))
    return [as_array(each, function, f"value{path}") for each in values]


class _Found(NamedTuple):
    """Values derived from the lengths of all ranks.

    Attributes:
        totals: of each value the length of each rank along the axis.
        largest: the most bytes of a rank.
        parts: for each half of the exchange memory, of each value the arrays of the ranks; empty for large arrays.
    """

    totals: list[list[int]]
    largest: int
    parts: tuple[list[list[np.ndarray]], ...]


@final
class Gather:
    """The gather of values for which the forms of the local replicas' arrays are known.

    On a node the ranks' lengths and small arrays are exchanged in the barrier that compares the call. Between nodes they are one
    message, with room for as much data as a rank had in the last gathers.

    Args:
        group: the ranks.
        leaves: of each value one array for each local replica; only lengths along `axis` may differ.
        axis: from 0, or from the end if it is negative.
        paths: the path of each value in the nest, for errors.
        function: name of the public caller, for errors.
        equal: True if the call has the forms of all arrays, which are equal on all ranks.

    Attributes:
        synchronizes: True if `gather` first waits for all ranks of the node, and compares the call.
    """

    def __init__(
        self,
        group: ProcessGroup,
        leaves: Sequence[Sequence[Any]],
        axis: int,
        paths: Sequence[str],
        function: str,
        equal: bool = False,
    ) -> None:
        self._group, self._paths, self._function = group, paths, function
        self._axes = [counted_axis(axis, values[0].ndim) for values in leaves]
        self._first = [(values[0].shape, values[0].dtype) for values in leaves]
        self._lengths = [
            sum(v.shape[own] for v in values if _is_axis(own, v.ndim))
            for values, own in zip(leaves, self._axes, strict=True)
        ]
        self._shown = [
            " and ".join(dict.fromkeys(f"{dtype_name(v.dtype)} {tuple(v.shape)}" for v in values)) for values in leaves
        ]
        prints = [_print(values, own) for values, own in zip(leaves, self._axes, strict=True)]
        self._numbers = [] if equal else [*prints, *self._lengths]
        self._head = np.array(self._numbers, np.int64).tobytes()
        self._found: dict[bytes, _Found] = {}
        form = self._own_form()
        self._has_data = form is not None
        self.synchronizes = group.num_nodes == 1 < group.topology.size and len(self._head) <= SMALL
        if self.synchronizes:
            self._exchange = SmallExchange(group.node, len(self._head))
            self._place = None if form is None else self._exchange.place(*form)
        else:
            self._messages, self._last_room = MessageExchange(group, len(self._head), form), 0

    def _own_form(self) -> tuple[tuple[int, ...], np.dtype] | None:
        """Return the form of this rank's data; None if it is large, or if all ranks will raise an error."""
        try:
            for index in range(len(self._axes)):
                self._check(index)
        except (ValueError, TypeError):  # raised after all ranks have arrived
            return None
        forms = self._forms(self._lengths)
        nbytes = num_bytes(forms)
        if -1 in self._numbers or nbytes > SMALL:
            return None
        return forms[0] if len(forms) == 1 else ((nbytes,), np.dtype(np.uint8))

    def __call__(self, array: np.ndarray, call: Call) -> np.ndarray:
        """Return the concatenated array of a single value, given the local replica's. Collective, inside one."""
        found, turn = self._meet(array, call)
        if not found.parts:
            return self._by_messages([[array]], found.totals)[0]
        return np.concatenate(found.parts[turn][0], axis=self._axes[0])

    def gather(self, leaves: Sequence[Sequence[Any]], call: Call) -> list[Any]:
        """Return the concatenated array of each value. Collective, inside one.

        Raises:
            CollectiveMismatchError: on every rank, naming a rank and both shapes, before any data is sent.
            ValueError: a scalar, or an axis out of range.
            TypeError: Python objects or structured arrays.
        """
        data = None
        if self._has_data:
            hosts = self._hosts(leaves)
            data = hosts[0] if len(hosts) == 1 else to_bytes(hosts)
        found, turn = self._meet(data, call)
        if not found.parts:
            return self._by_messages(leaves, found.totals)
        return [
            beside(np.concatenate(parts, axis=axis), values[0])
            for parts, axis, values in zip(found.parts[turn], self._axes, leaves, strict=True)
        ]

    def _meet(self, data: np.ndarray | None, call: Call) -> tuple[_Found, int]:
        """Exchange the lengths, and small data. Return the half of the memory that has it."""
        if self.synchronizes:
            room, heads = SMALL, self._exchange.move(call, self._place, data, self._head)
            turn = self._exchange.turn
        else:
            room, turn, heads = self._room(), 0, self._head
            if room != self._last_room:  # cached parts refer to the old memory
                self._last_room = room
                self._found.clear()
            if room or (heads and self._group.topology.size > 1):
                heads = self._messages.move(room, data, heads)
        found = self._found.get(heads)
        if found is None:
            found = self._look(np.frombuffer(heads, np.int64).reshape(self._group.topology.size, -1), room)
            keep(self._found, heads, found)
        if self._numbers:
            self._group.gathered = (*self._group.gathered[1:], found.largest)
        return found, turn

    def _room(self) -> int:
        """Return the data per rank that is sent with the lengths: all, or as much as a rank had in the last small gathers."""
        size = self._group.topology.size
        needed = self._group.gathered if self._numbers else [num_bytes(self._forms(self._lengths)) * self._has_data]
        return max(each if size > 1 and each * size <= _IN_ONE else 0 for each in needed)

    def _look(self, table: np.ndarray, room: int) -> _Found:
        """Check the forms of all ranks, and locate their data."""
        count = len(self._axes)
        for index in range(count):
            hashes = table[:, index].tolist() if self._numbers else []
            if -1 in hashes or len(set(hashes)) > 1:
                shapes = self._group.all_gather_text(self._shown[index])
                raise CollectiveMismatchError(_mismatch(self._function, f"value{self._paths[index]}", shapes, hashes))
            self._check(index)
        lengths = table[:, count:] if self._numbers else np.array([self._lengths] * len(table))
        totals = [[int(n) for n in lengths[:, index]] for index in range(count)]
        every = [self._forms(own) for own in lengths.tolist()]
        nbytes = [num_bytes(forms) for forms in every]
        if not 0 < room >= max(nbytes):
            return _Found(totals, max(nbytes), ())
        halves = []
        for turn in (0, 1) if self.synchronizes else (0,):
            rows = []
            for rank, forms in enumerate(every):
                args = rank, nbytes[rank]
                data = self._exchange.data(turn, *args) if self.synchronizes else self._messages.data(*args)
                rows.append(of_bytes(data, forms))
            halves.append([list(parts) for parts in zip(*rows, strict=True)])
        return _Found(totals, max(nbytes), tuple(halves))

    def _check(self, index: int) -> None:
        """Raise an error if arrays of one value cannot be gathered."""
        (shape, dtype), axis, function = self._first[index], self._axes[index], self._function
        argument = f"value{self._paths[index]}"
        if not shape:
            remedy = "Reduce it, or give it a dimension: value.reshape(1)"
            expected = "at least one dimension"
            raise ValueError(explain(function, argument, expected=expected, got="a scalar", remedy=remedy))
        if not _is_axis(axis, len(shape)):
            expected = f"-{len(shape)} <= axis < {len(shape)}, a dimension of an array of shape {tuple(shape)}"
            raise ValueError(explain(function, "axis", expected=expected, got=repr(axis)))
        check_movable(dtype, function, argument)

    def _forms(self, lengths: Sequence[int]) -> Forms:
        """Return shape and dtype of each value on a rank with these lengths."""
        return [
            ((*shape[:axis], length, *shape[axis + 1 :]), dtype)
            for (shape, dtype), axis, length in zip(self._first, self._axes, lengths, strict=True)
        ]

    def _hosts(self, leaves: Sequence[Sequence[Any]]) -> list[np.ndarray]:
        """Return this rank's array of each value, in the host's memory."""
        return [to_host(_join(values, axis)) for values, axis in zip(leaves, self._axes, strict=True)]

    def _by_messages(self, leaves: Sequence[Sequence[Any]], totals: Sequence[Sequence[int]]) -> list[Any]:
        """Return the arrays concatenated by calls of MPI; small ones share one message."""
        group, axes = self._group, self._axes
        hosts = [np.ascontiguousarray(host) for host in self._hosts(leaves)]
        if group.topology.size == 1:
            return [
                beside(host.copy() if host is values[0] else host, values[0])
                for host, values in zip(hosts, leaves, strict=True)
            ]
        whole = [
            sum(total) * row_size(host, own) * host.itemsize
            for host, total, own in zip(hosts, totals, axes, strict=True)
        ]
        small = [index for index, nbytes in enumerate(whole) if nbytes <= _SMALL and len(leaves) > 1]
        joined: list[Any] = [None] * len(leaves)
        if small:
            chosen = [hosts[i] for i in small], [axes[i] for i in small], [totals[i] for i in small]
            for index, result in zip(small, _exchange_together(group, *chosen), strict=True):
                joined[index] = result
        for index, host in enumerate(hosts):
            if joined[index] is None:
                joined[index] = _exchange(group, host, axes[index], totals[index])
        return [beside(result, values[0]) for result, values in zip(joined, leaves, strict=True)]


def _join(values: Sequence[Any], axis: int) -> Any:
    if len(values) == 1:
        return values[0]
    module = array_module(values[0])
    with on_device_of(values[0]):
        return module.concatenate(
            [module.asarray(value) for value in values], axis=axis
        )  # copied to this GPU from others


def _print(values: Sequence[Any], axis: Any) -> int:
    """Return a hash of the form that all replicas must share, without the length along the axis; -1 if the local ones differ."""
    forms = set()
    for value in values:
        shape = ["*" if dim == axis else str(size) for dim, size in enumerate(value.shape)]
        forms.add(f"{dtype_name(value.dtype)} of shape ({', '.join(shape)})")
    return zlib.crc32(forms.pop().encode()) if len(forms) == 1 else -1


def _is_axis(axis: Any, ndim: int) -> bool:
    return isinstance(axis, (int, np.integer)) and bool(0 <= axis < ndim)


def _mismatch(function: str, argument: str, shapes: list[str], hashes: list[int]) -> str:
    common = max(set(hashes), key=lambda h: (hashes.count(h), -hashes.index(h)))
    odd = next((rank for rank, h in enumerate(hashes) if h != common), 0)
    usual = hashes.index(common)
    if odd == usual:  # one rank, or every rank in the same way
        return explain(
            function, argument, expected="equal shapes but for the axis on every replica", got=shapes[0], rank=0
        )
    return explain(
        function,
        argument,
        expected=f"{shapes[usual]} as on rank {usual}, but for the length along the axis",
        got=shapes[odd],
        rank=odd,
    )


def _exchange(group: ProcessGroup, local: np.ndarray, axis: int, totals: Sequence[int]) -> np.ndarray:
    rest = local.shape[:axis] + local.shape[axis + 1 :]
    row = row_size(local, axis)
    ends = np.cumsum([total * row for total in totals]).tolist()
    flat = _POOL.empty(ends[-1], local.dtype)
    _all_gather(group, local.reshape(-1), flat, [0, *ends])
    if axis == 0:
        return flat.reshape(ends[-1] // row if row else sum(totals), *rest)
    parts = []
    for rank, total in enumerate(totals):
        shape = (*local.shape[:axis], total, *local.shape[axis + 1 :])
        parts.append(flat[ends[rank] - total * row : ends[rank]].reshape(shape))
    return np.concatenate(parts, axis=axis)


def _exchange_together(
    group: ProcessGroup, local: Sequence[np.ndarray], axes: Sequence[int], totals: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Exchange several arrays like `_exchange`, in one message of each rank."""
    forms = [
        [
            ((*array.shape[:axis], lengths[rank], *array.shape[axis + 1 :]), array.dtype)
            for array, axis, lengths in zip(local, axes, totals, strict=True)
        ]
        for rank in range(group.topology.size)
    ]
    ends = np.cumsum([num_bytes(form) for form in forms]).tolist()
    flat = np.empty(ends[-1], np.uint8)
    _all_gather(group, to_bytes(local), flat, [0, *ends])
    rows = [of_bytes(part, form) for part, form in zip(np.split(flat, ends[:-1]), forms, strict=True)]
    return [np.concatenate(parts, axis=axis) for axis, parts in zip(axes, zip(*rows, strict=True), strict=True)]


def _all_gather(group: ProcessGroup, local: np.ndarray, flat: np.ndarray, borders: list[int]) -> None:
    """Fill `flat` with every rank's elements; rank r's are between borders r and r + 1."""
    if flat.nbytes > _LARGE:
        for rank, low in enumerate(borders[:-1]):
            part = flat[low : borders[rank + 1]]
            if rank == group.topology.rank:
                part[...] = local
            if part.size:
                group.broadcast(part, root=rank)
        return
    low, high = borders[group.topology.rank : group.topology.rank + 2]
    flat[low:high] = local
    gather_parts(group.topology.comm, flat, [end - begin for begin, end in itertools.pairwise(borders)])


# IndexedSlices


def reduce_slices(
    group: ProcessGroup, call: Call, how: Arithmetic, values: Sequence[IndexedSlices], function: str
) -> IndexedSlices:
    """Return the rows and indices of all replicas in replica order; MEAN divides the rows. Collective, inside the call.

    `values` come from `checked_slices`.
    """
    rows, indices = (
        Gather(group, [leaf], 0, [""], function).gather([leaf], call)[0]
        for leaf in ([value.values for value in values], [value.indices for value in values])
    )
    return IndexedSlices(_divide(rows, how), indices, values[0].dense_shape)


def _divide(rows: Any, how: Arithmetic) -> Any:
    if how.divisor == 1:
        return rows
    with on_device_of(rows):
        return finish(array_module(rows).asarray(rows, how.accumulate), how)
