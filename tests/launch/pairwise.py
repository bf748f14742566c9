"""A pairwise cover: few of a test's combinations (parameters, MPI, number of ranks), with every pair of interest among them.

Knows nothing of pytest. The choice depends on the combinations alone, never on the date or the process, so a failure repeats.
A new test changes no choice in another file, and in its own file only which function carries a pair that no cover had.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass

PREFERRED_RANKS = (2, 3)  # the first layout with neighbours and the first uneven one; 4 says little more on two cores


@dataclass(frozen=True)
class Combination:
    """One item of a test function: its node id, and where and with what it runs."""

    nodeid: str
    function: str
    mpi: str
    ranks: int
    values: tuple[tuple[str, str], ...] = ()  # of each parameter its name and what its value is called

    @property
    def file(self) -> str:
        return self.function.partition("::")[0]

    def of_function(self) -> set[Hashable]:
        """What is seen of each function: every MPI, every number of ranks, every value of a parameter."""
        return {self.mpi, self.ranks, *self.values}

    def of_file(self) -> set[Hashable]:
        """What is seen in each file: every value of a parameter on every number of ranks."""
        return {(value, self.ranks) for value in self.values}

    def welcome(self) -> set[Hashable]:
        """What a function shall see where that costs no further item."""
        return self.of_file() | {(value, self.mpi) for value in self.values}


def order(text: str) -> int:
    """A number of a text that is the same in every process and on every day."""
    return zlib.crc32(text.encode())


def cover(combinations: Iterable[Combination]) -> set[str]:
    """The node ids of a cover, chosen greedily function by function; then what is missing in a file."""
    everything = sorted(combinations, key=lambda one: order(one.nodeid))
    of_function: dict[str, list[Combination]] = defaultdict(list)
    of_file: dict[str, list[Combination]] = defaultdict(list)
    for one in everything:
        of_function[one.function].append(one)
        of_file[one.file].append(one)
    chosen = {one.nodeid for group in of_function.values() for one in _cover(group, Combination.of_function)}
    for group in of_file.values():
        chosen |= {one.nodeid for one in _cover(group, Combination.of_file, chosen)}
    return chosen


def one_of_each(nodeids: Iterable[tuple[str, str]]) -> set[str]:
    """Of pairs (group, node id) one node id of each group, by its hash: so the groups take MPIs and parameters in turns."""
    of_group: dict[str, list[str]] = defaultdict(list)
    for group, nodeid in nodeids:
        of_group[group].append(nodeid)
    return {min(ids, key=order) for ids in of_group.values()}


def _cover(group: list[Combination], seen_in: Callable, there: Collection[str] = ()) -> list[Combination]:
    """Of a group in the order of preference, those that see everything which those already there do not."""
    given = [one for one in group if one.nodeid in there]
    required = _union(map(seen_in, group)) - _union(map(seen_in, given))
    welcome = _union(one.welcome() for one in group) - _union(one.welcome() for one in given)
    left, chosen = [one for one in group if one.nodeid not in there], []
    while required:
        best = max(
            left,
            key=lambda one: (len(required & seen_in(one)), one.ranks in PREFERRED_RANKS, len(welcome & one.welcome())),
        )
        chosen.append(best)  # the first of equals, so by the hash
        left.remove(best)
        required -= seen_in(best)
        welcome -= best.welcome()
    return chosen


def _union(sets: Iterable[set[Hashable]]) -> set[Hashable]:
    return set().union(*sets)
