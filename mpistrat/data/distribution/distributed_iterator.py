"""One epoch of a distributed dataset: steps that all ranks take together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from ... import context
from ...global_batch import HandedOut
from ..iterator import PositionReader
from ..spec import batch_spec
from ..stats import InputStats
from .device_prefetch import DevicePrefetch, Loaded
from .optional import Optional
from .steps import Steps

__all__ = ["DistributedIterator", "Drawn", "Passes", "SumOverRanks", "alone"]

SumOverRanks = Callable[[NDArray[np.int64]], NDArray[np.int64]]

Drawn = Callable[[int, int], None]

# A step that was looked at: its rows over all replicas, its element, and each local replica's arrays in it.
_Ahead = tuple[Loaded, int, Any, list[list[Any]]]


def alone(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum over one rank."""
    return counts


class Passes(Protocol):
    """Who is told when a dataset begins and ends to be read: parameter servers serve meanwhile."""

    def begin_pass(self) -> None:
        """Called before the first step is taken."""

    def end_pass(self) -> None:
        """Called once after the last step, or when the iterator is closed or dropped."""


@final
class DistributedIterator(Iterator[Any]):
    """One epoch of a distributed dataset (TF: tf.distribute.DistributedIterator).

    With one local replica each step gives plain arrays, with several PerReplica values in the dataset's structure.
    Taking a step is collective where the dataset's number of rows is not known (see DistributedDataset), else not.

    Attributes:
        global_batch_size: rows of the step handed out last, over all replicas; None before the first and after the end.
    """

    def __init__(
        self,
        reader: PositionReader,
        steps: Steps,
        prefetch: DevicePrefetch,
        sum_over_ranks: SumOverRanks,
        stats: InputStats,
        set_epoch: Callable[[int], None],
        handed_out: HandedOut,
        passes: Passes | None = None,
        drawn: Drawn | None = None,
    ) -> None:
        self._reader = reader
        self._steps = steps
        self._prefetch = prefetch
        self._sum_over_ranks = sum_over_ranks
        self._stats = stats
        self._set_epoch = set_epoch
        self._handed_out, self._drawn = handed_out, drawn
        self._ahead: _Ahead | None = None
        self._answers: dict[int, tuple[int, int]] = {}  # by step: how many workers have rows, and rows in all
        self._ended = False
        self._passes, self._pass_open = passes, False
        self._last: float | None = None  # when the loop last got something
        self.global_batch_size: int | None = None

    @property
    def element_spec(self) -> Any:
        """As `DistributedDataset.element_spec`."""
        spec = self._steps.row_spec
        return None if spec is None else batch_spec(spec, None)

    def __next__(self) -> Any:
        context.expect_outside_steps("DistributedIterator.get_next")
        started = time.perf_counter()
        self._prefetch.reclaim()
        try:
            loaded, total, element, arrays = self._look()
        except StopIteration:
            self._time(started)
            self._last = self.global_batch_size = None
            self._handed_out.end()
            raise
        self._reader.next()
        self._ahead = None
        self._stats.steps += 1
        self._stats.samples += loaded.rows
        self._stats.bytes += loaded.nbytes
        self.global_batch_size = total
        self._handed_out.next(arrays, total)
        if self._drawn is not None:
            self._drawn(self._reader.epoch, self._reader.position - 1)
        self._last = self._time(started)
        return element

    def _look(self) -> _Ahead:
        """The next step; StopIteration at the end of all ranks."""
        if self._ended:
            raise StopIteration
        if self._passes is not None and not self._pass_open:
            self._pass_open = True
            self._passes.begin_pass()
        if self._ahead is None:
            try:
                loaded = self._reader.peek()
            except StopIteration:
                self._ended = True  # asked again, it begins no other pass
                self.close()
                raise
            total = loaded.total
            if total is None:
                having, total = self._ask(loaded)
                if having < self._steps.quorum:
                    self._ended = True
                    self.close()
                    raise StopIteration
            self._ahead = loaded, total, *self._prefetch.hand_out(loaded, self._steps)
        return self._ahead

    def _ask(self, loaded: Loaded) -> tuple[int, int]:
        """How many workers have rows in the next step, and how many rows that is."""
        step = self._reader.position
        if step not in self._answers:
            counts = loaded.counts
            if counts is None:
                counts = np.array([[loaded.parts is not None, loaded.rows]], np.int64)
            answers = self._sum_over_ranks(counts.ravel()).reshape(counts.shape)
            self._answers = {step + i: (int(having), int(rows)) for i, (having, rows) in enumerate(answers)}
        return self._answers[step]

    def _time(self, started: float) -> float:
        """Count the time since then as waiting, and what the loop did before it as the loop's; return the time."""
        now = time.perf_counter()
        self._stats.wait_seconds += now - started
        self._stats.seconds += now - (started if self._last is None else self._last)
        return now

    def get_next(self) -> Any:
        """Return the next step's element, as `next(iterator)` does. Collective where the number of rows is not known.

        Raises:
            StopIteration: at the end, on all ranks together.
            ContextError: in a step.
        """
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """Return the next step's element in an Optional, which is empty at the end. Collective where `get_next` is.

        It has a value on every rank while any replica has a row; replicas without one get zero rows.

        Raises:
            ContextError: in a step.
        """
        try:
            return Optional.from_value(next(self))
        except StopIteration:
            return Optional.empty()

    def peek(self) -> Any:
        """Return the next step's element and stay before it. Collective where `get_next` is.

        Raises:
            StopIteration: at the end, on all ranks together.
            ContextError: in a step.
        """
        context.expect_outside_steps("DistributedIterator.peek")
        return self._look()[2]

    def state(self) -> dict[str, int]:
        """Return the position of what was consumed, the same on every rank: {"epoch", "next", "length"}.

        "length" is the number of steps of an epoch. It is left out where it is not known, and with parameter servers.
        """
        return self._reader.state()

    def restore(self, state: dict[str, int]) -> None:
        """Go to where an iterator of the same dataset stood. Do it on every rank.

        The dataset's next `iter()` begins the epoch after. Under AUTO and DATA the number of replicas may be another
        one. Datasets that read in order make again what comes before; the iterable of a dataset function must be a
        Dataset, or the next step raises ValueError.

        Raises:
            ValueError: for what is no state of this dataset: its epochs have another number of steps, too.
            ShardError: for files that have changed.
        """
        self._reader.restore(state)
        self._set_epoch(self._reader.state()["epoch"] + 1)
        self._ahead = self.global_batch_size = self._last = None
        self._answers, self._ended = {}, False

    def close(self) -> None:
        """End the thread that reads ahead. Dropping the iterator or reading it to its end does so too."""
        self._reader.close()
        if self._pass_open and self._passes is not None:
            self._pass_open = False
            self._passes.end_pass()

    def __del__(self) -> None:
        if self._pass_open:
            self.close()
