"""What optimizers keep on parameter servers: the slots beside the variables, brought to whoever saves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..comm.arrays import accumulation_dtype
from ..comm.process_group import ProcessGroup
from ..optimizers.local_updates import LocalUpdates

if TYPE_CHECKING:
    from ..optimizers.optimizer import Optimizer
    from ..parameter_server.parameter_server_variable import ParameterServerVariable

__all__ = ["ServerSlots"]


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
