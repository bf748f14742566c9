"""Arrays of which each rank has a box or nothing: the choice of the ranks that write each box, to a file or to node memory.

A rank writes its own box. A box that no rank of a node has, or no rank that reaches the file, is sent to one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import numpy as np

from ..arena.layout import Box, exchanged
from ..base.agree import fingerprint
from ..comm.process_group import ProcessGroup
from .list import Entry, Writers

__all__ = ["Shards"]

_Ranges = tuple[tuple[int, int], ...]


class _Moves(NamedTuple):
    """The boxes of an array that ranks send each other before they are written.

    Attributes:
        keeps: whether this rank writes its own box.
        targets: the ranks that it sends its box to.
        coming: the ranks that send it a box, and the boxes.
        any: whether some rank of the group sends a box.
    """

    keeps: bool
    targets: Sequence[int]
    coming: Sequence[tuple[int, _Ranges]]
    any: bool


@final
class Shards:
    """The boxes of the ranks of a group, by array. Two boxes are equal, with equal elements, or disjoint."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._texts: list[str] = []
        self._boxes: dict[str, dict[_Ranges, list[int]]] = {}  # the ranks that have each box
        self._moves: dict[tuple[str, tuple[tuple[int, ...], ...]], _Moves] = {}

    def entries(self, own: Sequence[Entry], writers: Writers) -> Iterator[Entry]:
        """Yield the entries that this rank writes. Collective.

        Args:
            own: an entry for each array, the same arrays on all ranks, with this rank's box; without parts if it has none.
            writers: the ranks that write.
        """
        self._update(own)
        for entry in own:
            yield from self._written(entry, writers)

    def _update(self, own: Sequence[Entry]) -> None:
        """Exchange the boxes of all ranks, if a rank has other boxes than last time. Collective."""
        row = list[int]()
        for entry in own:
            row += [int(bool(entry.parts)), *(index for pair in entry.box.ranges for index in pair)]
        text = f"{fingerprint(repr([entry.key for entry in own]))} {fingerprint(repr(row))}"
        texts = self._group.exchange("shards", text, "boxes")
        if texts == self._texts:
            return
        with self._group.collective("shards", "ranges", detail=len(row)):
            table = self._group.all_gather_int(row).tolist()
        self._boxes, self._moves, at = {}, {}, 0
        for entry in own:
            found, end = self._boxes.setdefault(entry.key, {}), at + 1 + 2 * len(entry.box.shape)
            for rank, numbers in enumerate(table):
                if numbers[at]:
                    flat = numbers[at + 1 : end]
                    found.setdefault(tuple(zip(flat[::2], flat[1::2], strict=True)), []).append(rank)
            at = end
        self._texts = texts

    def _written(self, own: Entry, writers: Writers) -> Iterator[Entry]:
        """Yield the entries of an array that this rank writes. Collective, if ranks send boxes of it."""
        key = own.key, writers.sets
        if key not in self._moves:
            self._moves[key] = self._planned(own.key, writers)
        keeps, targets, coming, moved = self._moves[key]
        yield own if keeps else own._replace(parts=[])
        if not moved:
            return
        sent: list[list[np.ndarray]] = [[] for _ in range(self._group.topology.size)]
        counts = [0] * len(sent)
        for target in targets:
            sent[target] += [array for _, array in own.parts]
        boxes = [(source, Box(own.box.shape, ranges)) for source, ranges in coming]
        for source, box in boxes:
            counts[source] = box.size
        with self._group.collective("shards", own.key, own.dtype, own.box.shape):
            data = exchanged(self._group, own.dtype, sent, counts)
        parts = np.split(data, np.cumsum(counts)[:-1])
        for source, box in boxes:
            yield own._replace(box=box, parts=[(0, parts[source])])

    def _planned(self, key: str, writers: Writers) -> _Moves:
        rank, keeps, moved = self._group.topology.rank, False, False
        set_of = {one: index for index, ranks in enumerate(writers.sets) for one in ranks}
        targets, coming = list[int](), list[tuple[int, _Ranges]]()
        for number, (ranges, holders) in enumerate(self._boxes[key].items()):
            first = {set_of[one]: one for one in reversed(holders) if one in set_of}  # of each set that has the box
            keeps |= rank in first.values()
            for index, ranks in enumerate(writers.sets):
                if index in first:
                    continue
                moved, target = True, ranks[number % len(ranks)]
                if rank == holders[0]:
                    targets.append(target)
                if rank == target:
                    coming.append((holders[0], ranges))
        return _Moves(keeps, targets, coming, moved)
