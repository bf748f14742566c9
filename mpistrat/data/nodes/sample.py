"""Elements drawn from several datasets by weight, as a pure function of (seed, epoch, position).

Of the first t draws, each dataset gets its share by weight, rounded to whole draws, by a formula without a table. Draws
are in blocks of 256; within a block the seed and the epoch permute them. When a dataset is exhausted, a new phase starts
with the others.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ...base.arguments import integer
from ...base.errors import explain
from ..permutation import DEFAULT_SEED, permute
from .combine import Choices, Join, Joined, total
from .node import INFINITE, UNKNOWN, Node

__all__ = ["Sample", "sampled"]

BLOCK = 256  # draws that are permuted together


class Phase(NamedTuple):
    """Draws from some datasets until one of them is exhausted.

    Attributes:
        number: the index of the phase.
        start: the number of draws before it.
        length: its number of draws; None for no end.
        used: elements of each dataset drawn before it.
        weights: each dataset's weight; 0 if exhausted.
    """

    number: int
    start: int
    length: int | None
    used: tuple[int, ...]
    weights: tuple[Fraction, ...]


def quotas(weights: Sequence[Fraction], draws: int) -> list[int]:
    """Return each dataset's count among the first draws. Counts never decrease with more draws, and add up to `draws`.

    Each count is the rounded share of the draws that the datasets before it left, so it is off by less than one draw per dataset.
    """
    counts = []
    rest, left = sum(weights, Fraction(0)), draws
    for weight in weights:
        share = weight / rest if rest else Fraction(0)
        count = (2 * left * share.numerator + share.denominator) // (2 * share.denominator) if weight else 0
        counts.append(count)
        left, rest = left - count, rest - weight
    return counts


def _longest(weights: Sequence[Fraction], room: Sequence[int | None]) -> int | None:
    """Return the largest number of draws that fits into each dataset's room; None for no end."""
    finite = [have for have, weight in zip(room, weights, strict=True) if weight and have is not None]
    if not finite:
        return None

    def fits(draws: int) -> bool:
        return all(have is None or count <= have for count, have in zip(quotas(weights, draws), room, strict=True))

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@functools.lru_cache(maxsize=64)
def _block(seed: int, epoch: int, phase: Phase, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the draws of one block of a phase: the dataset of each, and the index of its element."""
    low = number * BLOCK
    high = low + BLOCK if phase.length is None else min(low + BLOCK, phase.length)
    before = np.array(quotas(phase.weights, low), np.int64)
    counts = np.array(quotas(phase.weights, high), np.int64) - before
    sorted_draws = np.repeat(np.arange(counts.size), counts)
    digest = hashlib.blake2b(f"mpistrat.sample/1:{seed}:{phase.number}:{number}".encode(), digest_size=8).digest()
    order = permute(np.arange(high - low), high - low, seed=int.from_bytes(digest, "little"), epoch=epoch)
    which = sorted_draws[order]
    inside = np.empty(which.size, np.int64)
    for dataset in np.flatnonzero(counts):
        first = phase.used[dataset] + before[dataset]
        inside[which == dataset] = np.arange(first, first + counts[dataset])
    return which, inside


def _draws(seed: int, epoch: int, phase: Phase) -> Iterator[int]:
    for number in itertools.count():
        if phase.length is not None and number * BLOCK >= phase.length:
            return
        yield from _block(seed, epoch, phase, number)[0].tolist()


@final
class Sample(Join):
    """Weighted draws from several datasets."""

    def __init__(self, weights: Sequence[float], seed: int, stop_on_empty: bool) -> None:
        self._given = tuple(weights)
        self._weights = tuple(Fraction(weight) for weight in weights)
        self._seed = seed
        self._stop_on_empty = stop_on_empty
        self._phases = functools.lru_cache(maxsize=4)(self._make_phases)

    def _counted(self, below: Sequence[int]) -> tuple[int, ...]:
        """Return the number of elements of each dataset; 0 for datasets of weight 0."""
        return tuple(have if weight else 0 for have, weight in zip(below, self._weights, strict=True))

    def _make_phases(self, below: tuple[int, ...]) -> list[Phase]:
        phases: list[Phase] = []
        weights, start, used = self._weights, 0, tuple(0 for _ in below)
        while any(weights):
            room = [None if have == INFINITE else have - taken for have, taken in zip(below, used, strict=True)]
            length = _longest(weights, room)
            phases.append(Phase(len(phases), start, length, used, weights))
            if length is None or self._stop_on_empty:
                break
            drawn = quotas(weights, length)
            used = tuple(taken + count for taken, count in zip(used, drawn, strict=True))
            beyond = quotas(weights, length + 1)  # a dataset with fewer elements than its next quota is exhausted
            weights = tuple(
                Fraction(0) if have is not None and count > have else weight
                for weight, have, count in zip(weights, room, beyond, strict=True)
            )
            start += length
        return phases

    def cardinality(self, below: Sequence[int]) -> int:
        counted = self._counted(below)
        if UNKNOWN in counted:
            return UNKNOWN if self._stop_on_empty else total(counted)
        if not self._stop_on_empty:
            return total(counted)
        length = self._phases(counted)[0].length
        return INFINITE if length is None else length

    def choices(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: Sequence[int]) -> Choices:
        phases = self._phases(self._counted(below))
        starts = np.array([phase.start for phase in phases], np.int64)
        phase_of = np.searchsorted(starts, positions, side="right") - 1
        draws = positions - starts[phase_of]
        keys = np.stack([epochs, phase_of, draws // BLOCK])
        which, inside = np.empty_like(positions), np.empty_like(positions)
        order = np.lexsort(keys[::-1])
        cuts = np.flatnonzero((np.diff(keys[:, order], axis=1) != 0).any(axis=0)) + 1
        for places in np.split(order, cuts):
            if places.size:
                epoch, phase, block = (int(key) for key in keys[:, places[0]])
                chosen = _block(self._seed, epoch, phases[phase], block)
                which[places], inside[places] = (column[draws[places] - block * BLOCK] for column in chosen)
        return which, epochs, inside

    def elements(self, parents: Sequence[Node], epoch: int, start: int) -> Iterator[Any]:
        return itertools.islice(self._drawn(parents, epoch), start, None)

    def _drawn(self, parents: Sequence[Node], epoch: int) -> Iterator[Any]:
        """Yield elements as in `choices` if all lengths are known; else end a phase when a dataset turns out to be exhausted."""
        counts = self._counted([parent.cardinality() for parent in parents])
        iterators = [parent.elements(epoch) for parent in parents]
        if UNKNOWN not in counts:
            for phase in self._phases(counts):
                yield from map(next, map(iterators.__getitem__, _draws(self._seed, epoch, phase)))
            return
        weights, nothing = self._weights, tuple(0 for _ in parents)
        for number in itertools.count():
            for draw in _draws(self._seed, epoch, Phase(number, 0, None, nothing, weights)):
                try:
                    element = next(iterators[draw])
                except StopIteration:
                    weights = tuple(Fraction(0) if i == draw else weight for i, weight in enumerate(weights))
                    break
                yield element
            if self._stop_on_empty or not any(weights):
                return

    def __str__(self) -> str:
        return f"sample_from_datasets(weights={list(self._given)}, seed={self._seed})"


def sampled(
    parents: Sequence[Node], weights: Sequence[float] | None, seed: int | None, stop_on_empty_dataset: bool
) -> Node:
    """Return a node of elements drawn from several nodes; see `sample_from_datasets`."""
    if weights is None:
        weights = [1.0] * len(parents)
    values = [float(weight) for weight in weights]
    if len(values) != len(parents):
        expected = f"one weight for each of the {len(parents)} datasets"
        raise ValueError(explain("sample_from_datasets", "weights", expected=expected, got=len(values)))
    if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values):
        expected = "finite numbers of at least 0, not all 0"
        raise ValueError(explain("sample_from_datasets", "weights", expected=expected, got=repr(values)))
    seed = integer("sample_from_datasets", "seed", DEFAULT_SEED if seed is None else seed)
    return Joined(parents, Sample(values, seed, bool(stop_on_empty_dataset)))
