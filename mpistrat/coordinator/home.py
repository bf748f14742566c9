"""What tokens stand for on this rank: its own variables, strategy, optimizers and per-worker values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from ..errors import explain
from ..optimizers import Optimizer
from ..optimizers import optimizer as optimizers
from ..variables import Variable
from ..variables.sharded import ShardedVariable
from .closure import RemoteValue
from .per_worker import PerWorkerValues
from .pickling import Reduced, Reducer, loads, plain, token

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Home"]


@final
class Home:
    """Makes tokens, and finds what they stand for.

    Args:
        strategy: whose things they are.

    Attributes:
        coordinator: what the token of a coordinator stands for.
        resources: on a worker its own per-worker values, by number.
        used: the optimizers whose tokens were made since this was emptied.
        kept: the per-worker values whose tokens were made since this was emptied.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.coordinator: Any = None
        self.resources: dict[int, Any] = {}
        self.used: list[Optimizer] = []
        self.kept: list[PerWorkerValues] = []
        self._noted: dict[int, str] = {}
        self._inputs: Mapping[int, memoryview] = {}

    # on the sender

    def reduce(self, thing: Any) -> Reduced | None:
        """Return the token of something that every rank has, or None.

        Raises:
            TypeError: it belongs to another strategy or coordinator.
        """
        if isinstance(thing, Variable):
            return token("variable", _position(thing, self._strategy.extended.variables))
        if isinstance(thing, ShardedVariable):
            return token("sharded", _position(thing, self._strategy.extended.placement.sharded))
        if isinstance(thing, Optimizer):
            self.used.append(thing)
            return token("optimizer", thing.ordinal)
        if isinstance(thing, PerWorkerValues):
            self._check_own(thing._coordinator, "a per-worker value")
            self.kept.append(thing)
            return token("per_worker", thing._number)
        if thing is self:
            return token("home", 0)
        if thing is self._strategy:
            return token("strategy", 0)
        if thing is self._strategy.extended:
            return token("extended", 0)
        if thing is self.coordinator and thing is not None:
            return token("coordinator", 0)
        return None

    def reduce_with(self, inputs: dict[int, RemoteValue]) -> Reducer:
        """Return what makes tokens, of RemoteValues too, and notes these."""

        def reduce(thing: Any) -> Reduced | None:
            if not isinstance(thing, RemoteValue):
                return self.reduce(thing)
            self._check_own(thing._coordinator, "a RemoteValue")
            inputs[thing._number] = thing
            return token("remote", thing._number)

        return reduce

    def reduce_result(self, thing: Any) -> Reduced | None:
        """Return what is sent to the chief in the place of something: of a variable its value."""
        return plain(thing.numpy()) if isinstance(thing, (Variable, ShardedVariable)) else self.reduce(thing)

    def reduce_order(self, thing: Any) -> Reduced | None:
        """Return a token, but of no optimizer: an order makes it."""
        return None if isinstance(thing, Optimizer) else self.reduce(thing)

    def note_optimizer(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is new, or has other numbers than the last time."""
        what = optimizer.describe()
        new = self._noted.get(optimizer.ordinal) != what
        self._noted[optimizer.ordinal] = what
        return new

    def note_optimizers(self) -> None:
        """Note all that this program has made."""
        for optimizer in optimizers.known():
            self.note_optimizer(optimizer)

    def _check_own(self, coordinator: Any, what: str) -> None:
        if coordinator is not self.coordinator:
            raise TypeError(f"{what} of another coordinator")

    # on the receiver

    def resolve(self, kind: str, key: int) -> Any:
        """Return what a token stands for here."""
        if kind == "remote":
            return loads(self._inputs[key], self.resolve)
        if kind == "variable":
            return self._strategy.extended.variables[key]
        if kind == "sharded":
            return self._strategy.extended.placement.sharded[key]
        if kind == "per_worker":
            return self._resource(key)
        if kind == "optimizer":
            return self._optimizer(key)
        known = {
            "home": self,
            "strategy": self._strategy,
            "extended": self._strategy.extended,
            "coordinator": self.coordinator,
        }
        return known[kind]

    def _resource(self, key: int) -> Any:
        if key not in self.resources:
            raise RuntimeError("a per-worker value that could not be made on this worker")
        return self.resources[key]

    def _optimizer(self, ordinal: int) -> Optimizer:
        found = optimizers.find(ordinal)
        if found is None:
            remedy = "Run the same program on every rank until the coordinator is made"
            expected, got = "the optimizer that the chief has", f"none with the ordinal {ordinal}"
            raise RuntimeError(explain("ClusterCoordinator", "", expected=expected, got=got, remedy=remedy))
        return found

    @contextlib.contextmanager
    def with_inputs(self, inputs: Mapping[int, memoryview]) -> Iterator[None]:
        """While the context lasts these are the values of other functions."""
        self._inputs = inputs
        try:
            yield
        finally:
            self._inputs = {}


def _position(thing: Any, things: Sequence[Any]) -> int:
    for index, own in enumerate(things):
        if own is thing:
            return index
    raise TypeError(f"a {type(thing).__name__} that was not made in the scope of the coordinator's strategy")
