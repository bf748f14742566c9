"""The store of a strategy with servers, instead of arenas: variables, the optimizers of workers' pushes, their slots."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from ..base.errors import MpistratError, explain
from ..base.types import VariableSynchronization
from ..comm.arrays import accumulation_dtype
from ..comm.process_group import ProcessGroup
from ..optimizers.core import find, known
from ..optimizers.slots import own_slots
from ..variables import Placement, Variable
from ..variables.create import make_here
from ..variables.placement import ORDINAL_STEP, Description, OptimizerMemory, SlotsHere, Target
from .connections import ParameterServers
from .layout import PLACEMENTS, VariableSpec
from .operations import ORDINALS, optimizer_key
from .roles import Settings
from .server.local_updates import LocalUpdates
from .server.updates import SynchronousUpdates, Updates
from .variable import CopiesOfWorkers, ParameterServerVariable
from .worker.access import Access, ServerAccess, WorkerAccess
from .worker.push import PushStep

if TYPE_CHECKING:
    from ..optimizers.optimizer import Optimizer
    from ..strategy.strategy import Strategy

__all__ = ["ServerStore"]

_OUTSIDE = 1 << 20  # offset of the numbers of optimizers made outside of the scope

_series = 0  # of this process's last strategy with servers


def _next_series(group: ProcessGroup) -> int:
    """Return a number that no rank has given a strategy before; ranks may have created different numbers of them. Collective."""
    global _series
    with group.collective("ParameterServerStrategy", "series"):
        _series = max(map(int, group.all_gather_text(str(_series)))) + 1
    return _series


@final
class ServerStore(OptimizerMemory):
    """The variables of a strategy on its servers, and their optimizers and slots. Creation is collective over all ranks.

    Args:
        strategy: of the variables.
        connections: of all workers and servers. A server starts to serve.
        sync_group: the ranks that step together with this one.
        settings: of the strategy.

    Attributes:
        access: this rank's access to the variables.
        dropped: on a server, the number of late steps of each worker.
    """

    not_whole = "parameters that servers keep"

    def __init__(
        self, strategy: Strategy, connections: ParameterServers, sync_group: ProcessGroup, settings: Settings
    ) -> None:
        self.group = connections.group
        self.dropped: Sequence[int] = ()
        self._strategy, self._connections = strategy, connections
        self._check_numerics = settings.check_numerics
        options = settings.communication_options
        self._wire = None if options is None else options.wire
        self._variables: dict[int, ParameterServerVariable] = {}
        self._assign_server = PLACEMENTS[settings.placement](len(connections.servers))
        # The multiples of ORDINAL_STEP are for optimizers made outside of scopes.
        self._series = _next_series(self.group) % (ORDINAL_STEP - 1) + 1
        self._ordinals = itertools.count(self._series, ORDINAL_STEP)
        self._updates: dict[Optimizer, LocalUpdates] = {}
        self._found: dict[int, tuple[Optimizer, int, LocalUpdates]] = {}  # by key, while the optimizer is unchanged
        self._early: list[Optimizer] = []
        self.access = self._open(sync_group, settings)

    def _open(self, sync_group: ProcessGroup, settings: Settings) -> Access:
        """Start to serve, on a server; return this rank's access to the variables."""
        connections, server = self._connections, self._connections.server
        if server is None:
            access = WorkerAccess(connections, sync_group, settings.max_staleness)
            connections.group.attach(access)
            return access
        if settings.max_staleness == 0:
            together = SynchronousUpdates(server, self.find, self._variables.__getitem__, settings.backup_workers)
            self.dropped = together.dropped
            server.start(together, together.on_leave, together.retry)
        else:
            updates = Updates(server, self.find, self._variables.__getitem__)
            server.start(updates, retry=updates.retry)
        return ServerAccess(server, connections)

    # variables and steps

    def make(self, placement: Placement, what: Description) -> tuple[Variable, list[Target]]:
        """Allocate a variable on a server, or copies on workers. Collective. See `Placement.make`."""
        if what.synchronization is VariableSynchronization.ON_READ:
            return make_here(placement, what, CopiesOfWorkers)
        connections = self._connections
        beside = None if what.beside is None else getattr(placement.variables[what.beside], "server", None)
        server = self._assign_server(what.shape, what.dtype, beside)
        (number,) = connections.add_variables([VariableSpec(what.name, what.shape, what.dtype, server)])
        variable = self._variables[number] = ParameterServerVariable(placement, what, number, server, self.access)
        if connections.server is None or not self.access.holds(number):
            return variable, []
        with connections.server.writing(number) as memory:  # no rank can read it yet
            flat = memory.reshape(-1)
        return variable, [(flat, 0, flat.size)]

    def make_step(self, optimizer: Optimizer, variables: Sequence[Any], left_out: Sequence[Any]) -> PushStep:
        """Return the step of an optimizer. On workers: it is called in `run`, which is theirs."""
        assert isinstance(self.access, WorkerAccess)
        return PushStep(optimizer, self._strategy, variables, self.access, self._check_numerics, self._wire)

    # optimizers

    def next_ordinal(self) -> int:
        return next(self._ordinals)

    def find(self, key: int) -> LocalUpdates:
        """Return the updater of a worker's optimizer, on this server.

        Raises:
            MpistratError: there is no equal optimizer here.
        """
        known = self._found.get(key)
        if known is not None and known[0]._core.revision == known[1]:
            return known[2]
        optimizer = self._find_made(key % ORDINALS)
        updates = self.updates(optimizer)  # this takes a restored state
        if optimizer_key(optimizer) != key:
            self._refuse(key % ORDINALS, f"another one: {optimizer!r}")
        self._found[key] = optimizer, optimizer._core.revision, updates
        return updates

    def updates(self, optimizer: Optimizer) -> LocalUpdates:
        """Return the updater of an optimizer on this server."""
        if optimizer not in self._updates:
            server = self._connections.server
            made = LocalUpdates(optimizer) if server is None else LocalUpdates(optimizer, server.move)
            optimizer._core.join(self._strategy)
            self._updates.setdefault(optimizer, made)  # the program and the service thread may both come
        return self._updates[optimizer]

    def number_of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer in files: its place among those of the scope, or of those made outside."""
        count, series = divmod(optimizer._core.ordinal, ORDINAL_STEP)
        return count if series else _OUTSIDE + count

    def free_number(self, number: int | None, taken: set[int | None], least: int = 0) -> int:
        """Return the optimizer's own number: ranks use optimizers in different orders."""
        assert number is not None
        return number

    def made(self) -> list[Optimizer]:
        """Return the optimizers made in the scope or outside of all scopes."""
        return [one for one in known() if one._core.ordinal % ORDINAL_STEP in (0, self._series)]

    def made_everywhere(self) -> list[Optimizer]:
        return self._early  # `agree` finds them

    def numbers_made(self, names: Sequence[str], made: Sequence[int | None]) -> Sequence[int | None]:
        """Return the numbers in a file; if it lacks some, those of the program's first optimizers of these names."""
        if None not in made:
            return made
        here = sorted((self.number_of(one), one.name) for one in known() if one._core.may_join(self._strategy))
        found: list[int] = []
        for index, name in enumerate(names):
            fitting = (number for number, own in here if own == name and number not in found)
            found.append(next(fitting, index))  # of one not created yet
        return found

    def agree(self, function: str, path: str | os.PathLike[str]) -> None:
        """Register all optimizers that any rank has applied on every rank, in the order of creation. Collective.

        Args:
            function, path: the file operation, which ranks compare.
        """
        extended = self._strategy.extended
        made = [one._core.ordinal for one in extended.placement.made if one._core.may_join(self._strategy)]
        with extended.process_group.collective(function, "optimizers", detail=os.fspath(path)):
            mine = json.dumps([[one._core.ordinal for one in extended.optimizers], made])
            found = [json.loads(text) for text in extended.process_group.all_gather_text(mine)]
        applied = {ordinal for ordinals, _ in found for ordinal in ordinals}
        for ordinal in sorted(applied):
            self._find_made(ordinal)._core.join(self._strategy)
        extended.optimizers.sort(key=lambda optimizer: optimizer._core.ordinal)
        everywhere = set.intersection(*(set(ordinals) for _, ordinals in found))  # a coordinator sends some later
        self._early = [self._find_made(ordinal) for ordinal in sorted(everywhere - applied)]

    def _find_made(self, ordinal: int) -> Optimizer:
        optimizer = find(ordinal)
        if optimizer is None or not optimizer._core.may_join(self._strategy):
            self._refuse(ordinal, "none")
        return optimizer

    def _refuse(self, ordinal: int, got: str) -> NoReturn:
        remedy = "Run the same program on every rank: create optimizers, and change their numbers, on servers too"
        rank = self._strategy.rank
        expected = f"on rank {rank} the optimizer that a worker applies, number {ordinal} in its program"
        raise MpistratError(explain("apply_gradients", "optimizer", expected=expected, got=got, remedy=remedy))

    # slots; reads include all earlier pushes of workers

    def each_slots(self, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Yield the name and the slots of each variable that the optimizer has updated. Collective."""
        for variable in self._with_slots(optimizer):
            yield variable.name, self._read(optimizer, variable)

    def _with_slots(self, optimizer: Optimizer) -> list[ParameterServerVariable]:
        """Return the variables that the optimizer has updated, including all earlier pushes. Collective."""
        variables = list(self._variables.values())
        self._settle()
        mine = [int(self._has_slots(optimizer, variable)) for variable in variables]
        with self.group.collective("optimizer.slots", optimizer.name, detail=len(variables)):
            having: list[int] = self.group.all_gather_int(mine).max(axis=0).tolist()
        return [variable for variable, has in zip(variables, having, strict=True) if has]

    def slots_here(
        self, optimizer: Optimizer, writers: Collection[int] | None, all_else: bool, each_node: bool
    ) -> Iterator[SlotsHere]:
        """Yield this rank's part of the slots of each variable: on its server, or on rank 0, or on each node. Collective."""
        topology = self.group.topology
        leads = topology.local_rank == 0 if each_node else topology.rank == 0
        at_home = writers is None and not (each_node and topology.num_nodes > 1)
        for variable in self._with_slots(optimizer):
            dtype = accumulation_dtype(variable.dtype)
            if at_home:
                here, found = self._here(variable), self._slots_here(optimizer, variable)
                slots = {name: found.get(name, np.zeros(variable.shape, dtype)) for name in optimizer.slot_names}
            else:
                here, slots = leads, self._read(optimizer, variable)
            parts = {name: [(0, array)] if here else [] for name, array in slots.items()}
            yield variable.name, variable.shape, dtype, parts

    def read_slots(self, optimizer: Optimizer, variable: ParameterServerVariable) -> dict[str, np.ndarray]:
        """Return new arrays with a variable's slots on every rank; {} if it was never updated. Collective."""
        self._settle()
        with self.group.collective("optimizer.slots", variable.name, detail="there"):
            there = self.group.agree(int(self._has_slots(optimizer, variable)), "max")
        return self._read(optimizer, variable) if there else {}

    def _read(self, optimizer: Optimizer, variable: ParameterServerVariable) -> dict[str, np.ndarray]:
        dtype, result = accumulation_dtype(variable.dtype), {}
        with self.group.collective("optimizer.slots", variable.name, dtype, variable.shape, optimizer.slot_names):
            found = self._slots_here(optimizer, variable)
            for name in optimizer.slot_names:
                array = found[name] if name in found else np.zeros(variable.shape, dtype)
                self.group.broadcast(array, self._connections.servers[variable.server])
                result[name] = array
        return result

    def _settle(self) -> None:
        """Wait until all pushes of the workers are applied. Collective."""
        self.access.flush()
        self.group.barrier("optimizer.slots")

    def write_slots(self, optimizer: Optimizer, variable: ParameterServerVariable, values: Mapping[str, Any]) -> None:
        """Overwrite a variable's slots on its server. Call it on every rank."""
        values = own_slots(optimizer.slot_names, variable, values)
        if self._here(variable):
            self.updates(optimizer).set_slots(variable, values)

    def forget_slots(self, optimizer: Optimizer, variables: Collection[ParameterServerVariable] | None) -> None:
        updates = self._updates.get(optimizer)
        if updates is not None:
            updates.forget_slots(variables)

    def iterations(self, optimizer: Optimizer) -> int:
        """Return the servers' number of steps of an optimizer, the largest one. Collective."""
        self._settle()
        with self.group.collective("optimizer.iterations", optimizer.name):
            return self.group.agree(0 if self._connections.server is None else optimizer.iterations, "max")

    def _here(self, variable: ParameterServerVariable) -> bool:
        return self._connections.servers[variable.server] == self.group.topology.rank

    def _slots_here(self, optimizer: Optimizer, variable: ParameterServerVariable) -> Mapping[str, np.ndarray]:
        return self.updates(optimizer).slots(variable) if self._here(variable) else {}

    def _has_slots(self, optimizer: Optimizer, variable: ParameterServerVariable) -> bool:
        return self._here(variable) and self.updates(optimizer).has_slots(variable)
