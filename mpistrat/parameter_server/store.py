"""What a strategy with servers has in the place of arenas: the optimizers whose steps workers push, and their slots."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from ..comm.arrays import accumulation_dtype
from ..comm.process_group import ProcessGroup
from ..errors import MpistratError, explain
from ..optimizers.optimizer import find, known
from ..variables.placement import ORDINAL_STEP
from .server.local_updates import LocalUpdates

if TYPE_CHECKING:
    from ..optimizers.optimizer import Optimizer
    from ..strategy.strategy import Strategy
    from .variable import ParameterServerVariable

__all__ = ["ServedOptimizers", "ServerSlots", "optimizer_key"]

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


@final
class ServerSlots:
    """Reads and writes slots that lie on servers. Collective over all ranks, but for `write`.

    What is read has in it all that workers had pushed when they came here.

    Args:
        group: all ranks.
        servers: the ranks of the servers.
        updates: on a server, returns what applies an optimizer here; None elsewhere.
        variables: returns the strategy's variables.
        flush: waits until all that this rank has pushed is applied.
    """

    def __init__(
        self,
        group: ProcessGroup,
        servers: tuple[int, ...],
        updates: Callable[[Optimizer], LocalUpdates] | None,
        variables: Callable[[], list[Any]],
        flush: Callable[[], None],
    ) -> None:
        self._group, self._servers, self._updates, self._variables = group, servers, updates, variables
        self._flush = flush

    def each(self, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Yield the name and the slots of each variable that the optimizer has updated. Collective."""
        variables = self._served()
        self._settle()
        mine = [int(self._has_slots(optimizer, variable)) for variable in variables]
        with self._group.collective("optimizer.slots", optimizer.name, detail=len(variables)):
            having: list[int] = self._group.all_gather_int(mine).max(axis=0).tolist()
        for variable, has in zip(variables, having, strict=True):
            if has:
                yield variable.name, self._read(optimizer, variable)

    def read(self, optimizer: Optimizer, variable: ParameterServerVariable) -> dict[str, np.ndarray]:
        """Return new arrays with a variable's slots on every rank. Collective."""
        self._settle()
        return self._read(optimizer, variable)

    def _read(self, optimizer: Optimizer, variable: ParameterServerVariable) -> dict[str, np.ndarray]:
        dtype, result = accumulation_dtype(variable.dtype), {}
        with self._group.collective("optimizer.slots", variable.name, dtype, variable.shape, optimizer.slot_names):
            found = self._slots_here(optimizer, variable)
            for name in optimizer.slot_names:
                array = found[name] if name in found else np.zeros(variable.shape, dtype)
                self._group.broadcast(array, self._servers[variable.server])
                result[name] = array
        return result

    def _settle(self) -> None:
        """Wait until all that the workers have pushed is applied. Collective."""
        self._flush()
        self._group.barrier("optimizer.slots")

    def write(self, optimizer: Optimizer, variable: ParameterServerVariable, values: Mapping[str, Any]) -> None:
        """Overwrite a variable's slots where it lies. Every rank must do it."""
        if self._updates is not None and self._here(variable):
            self._updates(optimizer).set_slots(variable, values)

    def iterations(self, optimizer: Optimizer) -> int:
        """Return how many steps the servers have taken with an optimizer, the largest number. Collective."""
        self._settle()
        with self._group.collective("optimizer.iterations", optimizer.name):
            return self._group.agree(optimizer.iterations if self._updates is not None else 0, "max")

    def _served(self) -> list[ParameterServerVariable]:
        return [variable for variable in self._variables() if hasattr(variable, "server")]

    def _here(self, variable: ParameterServerVariable) -> bool:
        return self._servers[variable.server] == self._group.topology.rank

    def _slots_here(self, optimizer: Optimizer, variable: ParameterServerVariable) -> Mapping[str, np.ndarray]:
        if self._updates is None or not self._here(variable):
            return {}
        return self._updates(optimizer).slots(variable)

    def _has_slots(self, optimizer: Optimizer, variable: ParameterServerVariable) -> bool:
        return self._updates is not None and self._here(variable) and self._updates(optimizer).has_slots(variable)
