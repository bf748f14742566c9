"""Updates: a server applies pushes, writes at once and gradients through an optimizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import numpy as np

from ..comm.arrays import accumulation_dtype
from ..errors import MpistratError
from ..variables.values import as_flat, read_only
from .operations import Operation, apply_operation, unpack
from .push import Push
from .server import Server

__all__ = ["Updater", "Updates"]


class Updater(Protocol):
    """An optimizer on this server. `variable` is what `Updates` found for the number of a variable."""

    @property
    def iterations(self) -> int:
        """Number of steps that are complete."""

    def count_step(self) -> None:
        """Count a step that is complete."""

    def dense(
        self,
        variable: Any,
        weights: np.ndarray,
        gradients: Sequence[np.ndarray],
        step: int,
        old: np.ndarray | None = None,
    ) -> None:
        """Make weights of old ones, if they lie elsewhere, by the sum of gradients of all of a variable."""

    def rows(self, variable: Any, weights: np.ndarray, rows: np.ndarray, values: np.ndarray, step: int) -> None:
        """Update rows of a variable, each of which is named once."""


@final
class Updates:
    """The handler of a server's pushes: all are applied as they come.

    The gradients of a worker's step, from its first push to its commit, are all applied as step n + 1, where n steps of all
    workers were complete when it began. Each commit completes one. A variable's constraint is applied to all of it after
    every gradient, of some rows too.

    A worker may be in a pass that this server's program has yet to come to, with an optimizer that it has yet to make or to
    change. What such a worker pushes is kept until then, in its order; `retry` looks whether it can be applied. Of more
    than a few pushes of a worker the server takes none until then.

    Args:
        server: whose variables are written.
        find: returns what applies the optimizer of a key, or raises MpistratError; asked for each step of a worker.
        variable: returns what is known of a variable, by number: an object with a `constraint`, for the updaters.
    """

    def __init__(self, server: Server, find: Callable[[int], Updater], variable: Callable[[int], Any]) -> None:
        self._server, self._find, self._variable = server, find, variable
        self._variables: dict[int, Any] = {}
        self._steps: list[dict[int, tuple[Updater, int]]] = [{} for _ in server.applied]
        self._later: dict[int, deque[Push]] = {}  # what is kept, by worker

    def __call__(self, push: Push) -> bool:
        """Do what a push says; return whether it is done, or kept."""
        later = self._later.get(push.worker)
        if later is None and self._apply(push):
            return True
        if later is None:
            later = self._later[push.worker] = deque()
        later.append(push._replace(rows=_copy(push.rows), values=_copy(push.values)))
        return False

    def retry(self) -> bool:
        """Do what was kept, as far as it can be done now. Return whether anything was done."""
        done = False
        for worker, later in list(self._later.items()):
            while later and self._apply(later[0]):
                push, done = later.popleft(), True
                if not later or later[0].number > push.number:  # its commit has the same number
                    self._server.acknowledge(worker, push.number)
            if not later:
                del self._later[worker]
        return done

    def _apply(self, push: Push) -> bool:
        """Do what a push says; return False if this server's program has yet to come to it."""
        operation, key = unpack(push.what)
        if operation is not Operation.GRADIENT:
            self.write(push)
            return True
        steps = self._steps[push.worker]
        begun = steps.get(key) or self.begin(key, (push.worker,))
        if begun is None:
            return False
        updater, step = begun
        if push.variable < 0:
            steps.pop(key, None)
            updater.count_step()
        else:
            steps[key] = updater, step
            self.apply(updater, step, [push])
        return True

    def begin(self, key: int, workers: Sequence[int]) -> tuple[Updater, int] | None:
        """Return what applies the optimizer of a key, and the number of the step that begins.

        None if this server's program has yet to come to the pass that the workers are in.
        """
        try:
            updater = self._find(key)
        except MpistratError:
            if any(self._server.expects(worker) for worker in workers):
                raise
            return None
        return updater, updater.iterations + 1

    def write(self, push: Push) -> None:
        """Assign, add or scatter."""
        assert push.values is not None
        operation = unpack(push.what)[0]
        if push.rows is not None:
            with self._server.writing(push.variable) as array:
                apply_operation(operation, array, push.rows, push.values)
            return
        with self._server.replacing(push.variable) as (old, new):
            if new is not old and operation is not Operation.ASSIGN:
                np.copyto(new, old)
            apply_operation(operation, new, None, push.values)

    def apply(self, updater: Updater, step: int, pushes: Sequence[Push]) -> None:
        """Update a variable by the sum of gradients, from the first to the last.

        Args:
            updater: what applies them.
            step: its number.
            pushes: of one variable, each of all of it or of rows.
        """
        number = pushes[0].variable
        variable = self._variables.get(number)
        if variable is None:
            variable = self._variables[number] = self._variable(number)
        for push in pushes:
            self._server.count_staleness(push)
        if all(push.rows is not None for push in pushes):
            with self._server.writing(number) as weights:
                updater.rows(variable, weights, *_sum_of_rows(pushes), step)
                _constrain(variable, weights)
            return
        with self._server.replacing(number) as (old, weights):
            gradients = (pushes[0].values,) if len(pushes) == 1 else [_whole(push, weights) for push in pushes]
            updater.dense(variable, weights, gradients, step, old)  # type: ignore[arg-type]
            _constrain(variable, weights)


def _constrain(variable: Any, weights: np.ndarray) -> None:
    if variable.constraint is not None:
        value = variable.constraint(read_only(weights))
        weights.reshape(-1)[...] = as_flat(value, weights.shape, weights.dtype, "Variable.constraint")


def _copy(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else array.copy()


def _sum_of_rows(pushes: Sequence[Push]) -> tuple[Any, Any]:
    """Return the rows of all pushes, each once and ascending, and the sums of their values, in `accumulation_dtype`."""
    if len(pushes) == 1:
        return pushes[0].rows, pushes[0].values
    rows = np.unique(np.concatenate([push.rows for push in pushes]))
    first: Any = pushes[0].values
    total = np.zeros((rows.size, *first.shape[1:]), accumulation_dtype(first.dtype))
    for push in pushes:
        total[np.searchsorted(rows, push.rows)] += push.values  # type: ignore[arg-type]
    return rows, total


def _whole(push: Push, like: np.ndarray) -> Any:
    """Return a gradient of all of a variable: rows that were not pushed have none."""
    if push.rows is None:
        return push.values
    whole = np.zeros_like(like)
    whole[push.rows] = push.values
    return whole
