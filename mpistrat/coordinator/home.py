"""What tokens stand for on this rank: its own variables, strategy, optimizers and per-worker values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

from ..optimizers import Optimizer
from ..variables import Variable
from .closure import RemoteValue
from .per_worker import PerWorkerValues
from .pickling import Reduced, Reducer, loads, plain, token

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Home"]


@final
class Home:
    """Makes tokens, and finds what they stand for. Not collective.

    Args:
        strategy: whose things they are.

    Attributes:
        coordinator: what the token of a coordinator stands for.
        resources: on a worker its own per-worker values, by number.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.coordinator: Any = None
        self.resources: dict[int, Any] = {}
        self._inputs: Mapping[int, memoryview] = {}

    # on the sender

    def reduce(self, thing: Any) -> Reduced | None:
        """Return the token of something that every rank has, or None. Not collective.

        Raises:
            TypeError: it belongs to another strategy or coordinator.
        """
        if isinstance(thing, Variable):
            return token("variable", self._index(thing))
        if isinstance(thing, Optimizer):
            return token("optimizer", thing.ordinal)
        if isinstance(thing, PerWorkerValues):
            self._check_own(thing._coordinator, "a per-worker value")
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
        """Return what makes tokens, of RemoteValues too, and notes these. Not collective."""

        def reduce(thing: Any) -> Reduced | None:
            if not isinstance(thing, RemoteValue):
                return self.reduce(thing)
            self._check_own(thing._coordinator, "a RemoteValue")
            inputs[thing._number] = thing
            return token("remote", thing._number)

        return reduce

    def reduce_result(self, thing: Any) -> Reduced | None:
        """Return what is sent to the chief in the place of something: of a variable its value. Not collective."""
        return plain(thing.numpy()) if isinstance(thing, Variable) else self.reduce(thing)

    def _index(self, variable: Variable) -> int:
        for index, own in enumerate(self._strategy.extended.variables):
            if own is variable:
                return index
        raise TypeError("a variable that was not made in the scope of the coordinator's strategy")

    def _check_own(self, coordinator: Any, what: str) -> None:
        if coordinator is not self.coordinator:
            raise TypeError(f"{what} of another coordinator")

    # on the receiver

    def resolve(self, kind: str, key: int) -> Any:
        """Return what a token stands for here. Not collective."""
        if kind == "remote":
            return loads(self._inputs[key], self.resolve)
        if kind == "variable":
            return self._strategy.extended.variables[key]
        if kind == "per_worker":
            return self._resource(key)
        if kind == "optimizer":
            return _optimizer(key)
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

    @contextlib.contextmanager
    def with_inputs(self, inputs: Mapping[int, memoryview]) -> Iterator[None]:
        """While the context lasts these are the values of other functions. Not collective."""
        self._inputs = inputs
        try:
            yield
        finally:
            self._inputs = {}


def _optimizer(ordinal: int) -> Optimizer:
    from ..optimizers import optimizer

    return optimizer.find(ordinal)
