"""The optimizers whose steps workers push: found by their key, applied on servers, known alike on all ranks."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, final

from ..errors import MpistratError, explain
from ..optimizers.local_updates import LocalUpdates
from ..optimizers.optimizer import find, known
from ..variables.placement import ORDINAL_STEP

if TYPE_CHECKING:
    from ..optimizers.optimizer import Optimizer
    from .strategy import Strategy

__all__ = ["ServedOptimizers", "optimizer_key"]

_ORDINALS = 1 << 24
_OUTSIDE = 1 << 20  # before the numbers of optimizers that were made outside of the scope

_strategies = itertools.count()


def optimizer_key(optimizer: Optimizer) -> int:
    """Return the number by which worker and server name an optimizer: which one was made, and what it is like.

    The same program makes the same optimizers in the same order on every rank.
    """
    return optimizer.ordinal % _ORDINALS + _ORDINALS * (zlib.crc32(optimizer.describe().encode()) & 0x7FFF)


@final
class ServedOptimizers:
    """The optimizers of a strategy with servers.

    Args:
        strategy: whose variables they update.

    Attributes:
        ordinals: for the optimizers that are made in the strategy's scope.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        # The multiples of ORDINAL_STEP are those of optimizers that are made outside of scopes.
        self._series = next(_strategies) % (ORDINAL_STEP - 1) + 1
        self.ordinals = itertools.count(self._series, ORDINAL_STEP)
        self._updates: dict[Optimizer, LocalUpdates] = {}
        self._found: dict[int, tuple[Optimizer, int, LocalUpdates]] = {}  # by key, while the optimizer is as it was

    def find(self, key: int) -> LocalUpdates:
        """Return what applies the optimizer that a worker names, on this server.

        Raises:
            MpistratError: there is none like it here.
        """
        known = self._found.get(key)
        if known is not None and known[0].revision == known[1]:
            return known[2]
        optimizer = self._made(key % _ORDINALS)
        updates = self.updates(optimizer)  # which takes over what was restored
        if optimizer_key(optimizer) != key:
            self._refuse(key % _ORDINALS, f"another one: {optimizer.describe()}")
        self._found[key] = optimizer, optimizer.revision, updates
        return updates

    def updates(self, optimizer: Optimizer) -> LocalUpdates:
        """Return what applies an optimizer on this server."""
        if optimizer not in self._updates:
            self._updates[optimizer] = LocalUpdates(optimizer)
            optimizer.join(self._strategy)
        return self._updates[optimizer]

    def of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer in files: which one the program has made, in the scope or outside."""
        count, series = divmod(optimizer.ordinal, ORDINAL_STEP)
        return count if series else _OUTSIDE + count

    def made(self) -> list[Optimizer]:
        """Return the optimizers that the program has made in the scope or outside of all scopes."""
        return [one for one in known() if one.ordinal % ORDINAL_STEP in (0, self._series)]

    def named(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the first optimizers of these names that the program has made."""
        made = sorted((self.of(one), one.name) for one in known() if one.may_join(self._strategy))
        found: list[int] = []
        for index, name in enumerate(names):
            fitting = (number for number, own in made if own == name and number not in found)
            found.append(next(fitting, index))  # of one that is yet to be made
        return found

    def agree(self, function: str, path: str | os.PathLike[str]) -> None:
        """Let every rank know all optimizers that any rank has applied, in the order in which they were made. Collective.

        Args:
            function, path: of the file for which they do it: what others must call, too.
        """
        extended = self._strategy.extended
        with extended.process_group.collective(function, "optimizers", detail=os.fspath(path)):
            mine = " ".join(str(optimizer.ordinal) for optimizer in extended.optimizers)
            told = extended.process_group.all_gather_text(mine)
        for ordinal in sorted({int(word) for text in told for word in text.split()}):
            self._made(ordinal).join(self._strategy)
        extended.optimizers.sort(key=lambda optimizer: optimizer.ordinal)

    def _made(self, ordinal: int) -> Optimizer:
        optimizer = find(ordinal)
        if optimizer is None or not optimizer.may_join(self._strategy):
            self._refuse(ordinal, "none")
        return optimizer

    def _refuse(self, ordinal: int, got: str) -> NoReturn:
        remedy = "Run the same program on every rank: make optimizers, and change their numbers, on servers too"
        rank = self._strategy.rank
        expected = f"on rank {rank} the optimizer that a worker applies, number {ordinal} in its program"
        raise MpistratError(explain("apply_gradients", "optimizer", expected=expected, got=got, remedy=remedy))
