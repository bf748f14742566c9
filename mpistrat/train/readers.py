"""The ranks that read the batches of a Trainer: all ranks the same ones, or each worker of parameter servers its own."""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, final

from ..base import log
from .callbacks import Loop
from .checkpoints import Checkpoints

__all__ = ["Readers", "readers_of"]

_NOT_IN_TURN = (
    "Trainer: there are other workers than when this was saved, and those had stopped at different steps: of epoch %d some "
    "batches are taken twice, and others are left out"
)


class Readers(ABC):
    """The readers of a Trainer's batches, to which these are dealt in turn.

    Attributes:
        alone: whether each reader has batches of its own, and steps by itself.
        first: the index of the first reader that takes batches, in the list of `gather`.
    """

    alone: bool
    first = 0

    @abstractmethod
    def draw(self, batches: Any, wanted: int | None) -> Generator[Any, None, int]:
        """Yield batches of an epoch, `wanted` or all that are left, and return their number."""

    @abstractmethod
    def gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the state of every reader. Collective."""

    @abstractmethod
    def dealt(self) -> list[int]:
        """Return the indices, in the list of `gather`, of the readers to which batches are dealt in turn."""

    def places(self, notes: dict[str, Any], endless: bool) -> tuple[int, int, Any]:
        """Return how far an epoch was when a checkpoint was saved.

        Args:
            notes: the checkpoint's.
            endless: whether the data go on over the end of an epoch.

        Returns:
            The number of batches that the first reader has taken of the epoch, the number that this one has, and this one's
            position: a state of its iterator, or a number of batches to skip.
        """
        readers = notes["readers"]
        number, index, turn = self._standing()
        # The batches of earlier epochs, of each reader.
        before = notes["step"] - readers[self.first if notes["alone"] else 0]["taken"] if endless else 0
        if notes["alone"] == self.alone and len(readers) == number:
            mine = readers[index]
            return readers[self.first]["taken"], mine["taken"], mine["position"] or before + mine["taken"]
        # There are other readers than then: the rest of the batches is dealt among these.
        dealt = [readers[one]["taken"] for one in notes.get("dealt") or range(len(readers))]
        total, past = sum(dealt), before * len(dealt)
        if dealt != [_dealt_to(one, len(dealt), total) for one in range(len(dealt))]:
            log.once(logging.WARNING, _NOT_IN_TURN % notes["epoch"])
        count = len(self.dealt())
        first = _dealt_to(0, count, past + total) - _dealt_to(0, count, past)
        if turn is None:
            return first, 0, 0
        skipped = _dealt_to(turn, count, past + total)
        return first, skipped - _dealt_to(turn, count, past), skipped

    @abstractmethod
    def _standing(self) -> tuple[int, int, int | None]:
        """Return the length of the list of `gather`, this rank's index in it, and in `dealt`; None if it takes no batches."""


@final
class CommonReaders(Readers):
    """All ranks, which step together on the same batches, and count as one reader."""

    alone = False

    def draw(self, batches: Any, wanted: int | None) -> Generator[Any, None, int]:
        """Yield batches of an epoch, `wanted` or all that are left, and return their number."""
        return _draw(batches, wanted)

    def gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the state of the one reader. Local."""
        return [mine]

    def dealt(self) -> list[int]:
        """Return the index of the one reader."""
        return [0]

    def _standing(self) -> tuple[int, int, int]:
        return 1, 0, 0


@final
class WorkerReaders(Readers):
    """The ranks of parameter servers: each worker has batches of its own, and a server has none."""

    alone = True

    def __init__(self, loop: Loop, checkpoints: Checkpoints | None, notes: Callable[[], dict[str, Any]]) -> None:
        self._loop, self._checkpoints, self._notes = loop, checkpoints, notes
        self._strategy, self.first = loop.strategy, loop.first

    def draw(self, batches: Any, wanted: int | None) -> Generator[Any, None, int]:
        """Yield batches of an epoch; when a checkpoint is due, all ranks leave the pass and meet to save it. Collective."""
        loop, strategy, checkpoints = self._loop, self._strategy, self._checkpoints
        drawn, waited = 0, 0.0
        while True:
            step, found = loop.step, 0
            due = None if checkpoints is None else checkpoints.steps_until_due(step)
            left = None if wanted is None else wanted - drawn
            arrived = time.monotonic()
            if strategy.is_server:
                strategy.serve()
            else:
                strategy.resume_pass()  # one that the data outlast
                try:
                    found = yield from _draw(batches, min((n for n in (left, due) if n is not None), default=None))
                finally:
                    arrived = time.monotonic()
                    strategy.suspend_pass()
            drawn += found
            if checkpoints is None or due is None:
                break
            more = found == due and drawn != wanted
            if strategy.should_stop():
                return drawn if wanted is None else wanted  # the data have not ended
            met = strategy.all_gather_object((more, waited))
            if not any(more for more, _ in met):
                break
            waited = 0.0 if strategy.is_server else time.monotonic() - arrived
            loop.step = step + due
            checkpoints.step(loop.step, self._notes, sum(seconds for _, seconds in met) / len(strategy.workers))
        return wanted if strategy.is_server and wanted is not None else drawn

    def gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the state of every rank. Collective."""
        states: list[dict[str, Any]] = self._strategy.all_gather_object(mine)
        return states

    def dealt(self) -> list[int]:
        """Return the first rank of each group of workers that step together."""
        return list(self._strategy.workers[:: self._strategy.workers_in_sync])

    def _standing(self) -> tuple[int, int, int | None]:
        strategy = self._strategy
        turn = None if strategy.is_server else (strategy.worker_index or 0) // strategy.workers_in_sync
        return strategy.size, strategy.rank, turn


def readers_of(loop: Loop, checkpoints: Checkpoints | None, notes: Callable[[], dict[str, Any]]) -> Readers:
    """Return the readers of a loop's batches.

    Args:
        loop: the loop.
        checkpoints: where it saves, if it does.
        notes: returns the notes of a checkpoint. Collective.
    """
    if loop.strategy.extended.placement.store is None:
        return CommonReaders()
    return WorkerReaders(loop, checkpoints, notes)


def _draw(batches: Any, wanted: int | None) -> Generator[Any, None, int]:
    drawn = 0
    for batch in itertools.islice(batches, wanted):
        yield batch
        drawn += 1
    return drawn


def _dealt_to(index: int, count: int, batches: int) -> int:
    """Return how many of the first batches the reader of an index gets, when they are dealt to `count` readers in turn."""
    return max(0, -(-(batches - index) // count))
