"""Updates: a server applies pushes, writes at once and gradients through an optimizer.

`Updates` applies gradients as they arrive; `SynchronousUpdates` collects those of a step until all workers have sent theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import numpy as np

from ...arena.values import as_flat, read_only
from ...base.errors import CollectiveMismatchError, MpistratError, explain
from ...comm.arrays import accumulation_dtype
from ..operations import Operation, Push, apply_operation, unpack
from .server import VariableServer

__all__ = ["SynchronousUpdates", "Updater", "Updates"]

_GRADIENT = int(Operation.GRADIENT)


class Updater(Protocol):
    """An optimizer on this server. `variable` is the object that `Updates` found for its number."""

    @property
    def iterations(self) -> int:
        """The number of complete steps."""

    def count_step(self) -> None:
        """Count a complete step."""

    def dense(
        self,
        variable: Any,
        weights: np.ndarray,
        gradients: Sequence[np.ndarray],
        step: int,
        old: np.ndarray | None = None,
    ) -> None:
        """Compute weights from old ones, if separate, and the sum of gradients of the whole variable."""

    def rows(self, variable: Any, weights: np.ndarray, rows: np.ndarray, values: np.ndarray, step: int) -> None:
        """Update rows of a variable, each named once."""


@final
class Updates:
    """The handler of a server's pushes: each is applied as it arrives.

    All gradients of a worker's step, from its first push to its commit, are applied as step n + 1, where n is the number of
    complete steps of all workers at its start. Each commit completes one. A variable's constraint is applied to all of it after
    every gradient, also after one of some rows.

    A worker may be in a pass that this server's program has not reached, with an optimizer not created or changed yet. Its
    pushes are deferred until then, in order; `retry` tries to apply them. After a few deferred pushes the server takes no more
    from that worker.

    Args:
        server: its variables are written.
        find: returns the updater of an optimizer's key, or raises MpistratError; called for each step of a worker.
        variable: returns the object of a variable's number, with a `constraint`, for the updaters.
    """

    def __init__(self, server: VariableServer, find: Callable[[int], Updater], variable: Callable[[int], Any]) -> None:
        self._server, self._find, self._variable = server, find, variable
        self._variables: dict[int, Any] = {}
        self._steps: list[dict[int, tuple[Updater, int]]] = [{} for _ in server.applied]
        self._later: dict[int, deque[Push]] = {}  # deferred pushes, by worker

    def __call__(self, push: Push) -> bool:
        """Apply or defer a push; return whether it was applied."""
        later = self._later.get(push.worker)
        if later is None and self._apply(push):
            return True
        if later is None:
            later = self._later[push.worker] = deque()
        later.append(push._replace(rows=_copy(push.rows), values=_copy(push.values)))
        return False

    def retry(self) -> bool:
        """Apply deferred pushes as far as possible. Return whether any was applied."""
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
        """Apply a push; return False if this server's program has not reached it yet."""
        if push.what & 0xFF != _GRADIENT:
            self.write(push)
            return True
        key, steps = push.what >> 8, self._steps[push.worker]
        begun = steps.get(key)
        if begun is None:
            begun = self.begin(key, (push.worker,))
            if begun is None:
                return False
            steps[key] = begun
        updater, step = begun
        if push.variable < 0:
            del steps[key]
            updater.count_step()
        else:
            self.apply(updater, step, (push,))
        return True

    def begin(self, key: int, workers: Sequence[int]) -> tuple[Updater, int] | None:
        """Return the updater of an optimizer's key, and the number of the new step.

        None if this server's program has not reached the workers' pass yet.
        """
        try:
            updater = self._find(key)
        except MpistratError:
            if any(self._server.expects(worker) for worker in workers):
                raise
            return None
        return updater, updater.iterations + 1

    def write(self, push: Push) -> None:
        """Assign, add or scatter a value."""
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
        """Update a variable by the sum of gradients, in their order.

        Args:
            updater: applies them.
            step: its number.
            pushes: of one variable, each of the whole or of rows.
        """
        number = pushes[0].variable
        variable = self._variables.get(number)
        if variable is None:
            variable = self._variables[number] = self._variable(number)
        for push in pushes:
            self._server.count_staleness(push)
        if pushes[0].rows is not None and all(push.rows is not None for push in pushes):
            with self._server.writing(number) as weights:
                updater.rows(variable, weights, *_sum_of_rows(pushes), step)
                if variable.constraint is not None:
                    _constrain(variable, weights)
            return
        with self._server.replacing(number) as (old, weights):
            gradients = (pushes[0].values,) if len(pushes) == 1 else [_whole(push, weights) for push in pushes]
            updater.dense(variable, weights, gradients, step, old)  # type: ignore[arg-type]
            if variable.constraint is not None:
                _constrain(variable, weights)


def _constrain(variable: Any, weights: np.ndarray) -> None:
    value = variable.constraint(read_only(weights))
    weights.reshape(-1)[...] = as_flat(value, weights.shape, weights.dtype, "Variable.constraint")


def _copy(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else array.copy()


def _sum_of_rows(pushes: Sequence[Push]) -> tuple[Any, Any]:
    """Return the rows of all pushes, unique and ascending, and the sums of their values, in `accumulation_dtype`."""
    if len(pushes) == 1:
        return pushes[0].rows, pushes[0].values
    rows = np.unique(np.concatenate([push.rows for push in pushes]))
    first: Any = pushes[0].values
    total = np.zeros((rows.size, *first.shape[1:]), accumulation_dtype(first.dtype))
    for push in pushes:
        total[np.searchsorted(rows, push.rows)] += push.values  # type: ignore[arg-type]
    return rows, total


def _whole(push: Push, like: np.ndarray) -> Any:
    """Return a gradient of the whole variable: zeros for rows that were not pushed."""
    if push.rows is None:
        return push.values
    whole = np.zeros_like(like)
    whole[push.rows] = push.values
    return whole


Gradients = dict[int, Push]  # by number of variable


@final
class SynchronousUpdates:
    """The handler of a server whose workers train in step.

    - Gradients are copied and acknowledged as they arrive. A commit is acknowledged when its step is complete: when every
      worker in the pass has committed it. Then each variable is updated once, by the sum of its gradients in worker order, with
      the bits of synchronous training.
    - A worker may skip a step if its gradients are not finite: the step then has the others', and does not count if all skip.
    - A worker's pushes after a commit wait for it, so they are applied in order. All other pushes are applied at once.
    - The pass is the earliest of any worker. A worker that has left it is not awaited; its pushes for the next one wait for the
      others.
    - With backup workers a step is complete without the last `backup_workers` workers. Their late step is acknowledged, dropped
      and counted (as in TensorFlow's SyncReplicasOptimizer, by server). A step is in time unless another one was completed
      since its worker's last commit was acknowledged, or if all variables of its gradients were read after that: pushes carry
      the version that the worker had read.
    - Each server decides separately which workers' gradients a step has.

    Args:
        server, find, variable: as for `Updates`.
        backup_workers: the number of workers in the pass that are not awaited.

    Raises:
        ValueError: no worker is left to wait for.

    Attributes:
        dropped: for each worker, the number of its late steps.
    """

    def __init__(
        self,
        server: VariableServer,
        find: Callable[[int], Updater],
        variable: Callable[[int], Any],
        backup_workers: int = 0,
    ) -> None:
        if not 0 <= backup_workers < len(server.applied):
            expected = f"0 <= backup_workers < {len(server.applied)}, the number of workers"
            raise ValueError(explain("SynchronousUpdates", "backup_workers", expected=expected, got=backup_workers))
        self.dropped = [0] * len(server.applied)
        self._server, self._backup_workers = server, backup_workers
        self._updates = Updates(server, find, variable)
        self._workers = [_WorkerPushes() for _ in server.applied]
        self._kept = False  # True while a step waits for this server's program
        self._completed: dict[int, int] = {}  # steps, by key of the optimizer
        self._versions: dict[tuple[int, int], int] = {}  # of a variable after the last step, by that key and its number
        self._spare: dict[int, list[np.ndarray]] = {}  # memory for gradients, by number of variable

    def __call__(self, push: Push) -> bool:
        """Take a push. Return True if it is applied, False if it is acknowledged later."""
        worker = self._workers[push.worker]
        if worker.committed is not None:
            worker.later.append(self._copy(push))
            return False
        if self._take(worker, push, copied=False):
            return True
        self._complete()
        return False

    def on_leave(self, worker: int) -> None:
        """Complete the steps that waited for a worker that has left, from a pass or for good."""
        self._complete()

    def retry(self) -> bool:
        """Complete the steps that waited for this server's program."""
        kept, self._kept = self._kept, False
        if kept:
            self._complete()
        return kept and not self._kept

    def _take(self, worker: _WorkerPushes, push: Push, copied: bool) -> bool:
        """Apply a push, or store it for its step. Return False for a commit."""
        operation, key = unpack(push.what)
        if push.variable < 0:
            worker.committed, worker.number, worker.skipped = key, push.number, operation is Operation.SKIPPED
            return False
        if operation is not Operation.GRADIENT:
            self._updates.write(push)
            if copied:
                self._free(push)
        else:
            step = worker.gradients.setdefault(key, {})
            if push.variable in step:  # of an interrupted step
                self._free(step.pop(push.variable))
            step[push.variable] = push if copied else self._copy(push)
        return True

    # steps

    def _complete(self) -> None:
        while self._drop_late() or self._complete_one():
            pass

    def _complete_one(self) -> bool:
        passes = [self._server.left(number) for number in range(len(self._workers))]
        current = min(passes)
        active = [worker for worker, left in zip(self._workers, passes, strict=True) if left == current]
        keys = {worker.committed: None for worker in active if worker.committed is not None}
        needed = max(1, len(active) - self._backup_workers)
        for key in keys:
            together = [worker for worker in active if worker.committed == key]
            if len(together) >= needed:
                applied = self._apply(key, together)
                self._kept = not applied
                return applied
        if len(keys) > 1 and all(worker.committed is not None for worker in active):
            remedy = "Call apply_gradients of the same optimizers, in the same order, on every worker"
            got = f"{len(keys)} in one step"
            raise CollectiveMismatchError(
                explain("apply_gradients", "optimizer", expected="the same on all workers", got=got, remedy=remedy)
            )
        return False

    def _apply(self, key: int, workers: list[_WorkerPushes]) -> bool:
        begun = self._updates.begin(key, [self._workers.index(worker) for worker in workers])
        if begun is None:
            return False
        updater, step = begun
        gradients = [worker.gradients.pop(key, {}) for worker in workers]
        for variable in sorted(set().union(*gradients)):
            pushes = [of[variable] for of in gradients if variable in of]
            self._updates.apply(updater, step, pushes)
            self._versions[key, variable] = self._server.version(variable)
            for push in pushes:
                self._free(push)
        if not all(worker.skipped for worker in workers):
            updater.count_step()
        self._completed[key] = self._completed.get(key, 0) + 1
        for worker in workers:
            self._resume(worker)
        return True

    def _resume(self, worker: _WorkerPushes) -> None:
        """Acknowledge a commit, and continue with the worker's later pushes."""
        key, done = worker.committed, worker.number
        assert key is not None
        worker.committed, worker.began[key] = None, self._completed.get(key, 0)
        while worker.later and worker.committed is None:
            push = worker.later.popleft()
            # A commit that came with a push has its number.
            done = push.number if self._take(worker, push, copied=True) else push.number - 1
        number = self._workers.index(worker)
        if done > self._server.applied[number]:
            self._server.acknowledge(number, done)

    # late pushes

    def _drop_late(self) -> bool:
        if not self._backup_workers:
            return False
        late = [worker for worker in self._workers if self._is_late(worker)]
        for worker in late:
            for push in worker.gradients.pop(worker.committed, {}).values():  # type: ignore[arg-type]
                self._free(push)
            self.dropped[self._workers.index(worker)] += 1
            self._resume(worker)
        return bool(late)

    def _is_late(self, worker: _WorkerPushes) -> bool:
        key = worker.committed
        if key is None or worker.began.get(key, 0) >= self._completed.get(key, 0):
            return False
        gradients = worker.gradients.get(key, {}).values()
        fresh = [push.version >= self._versions.get((key, push.variable), 0) for push in gradients]
        return not fresh or not all(fresh)

    # memory

    def _copy(self, push: Push) -> Push:
        """Return a push that stays valid after the call."""
        if push.values is None:
            return push
        if push.rows is not None:
            return push._replace(rows=push.rows.copy(), values=push.values.copy())
        spare = self._spare.setdefault(push.variable, [])
        memory = spare.pop() if spare else np.empty_like(push.values)
        np.copyto(memory, push.values)
        return push._replace(values=memory)

    def _free(self, push: Push) -> None:
        if push.rows is None and push.values is not None:
            self._spare[push.variable].append(push.values)


@final
class _WorkerPushes:
    """The stored pushes of a worker.

    Attributes:
        gradients: of its step, by key of the optimizer.
        committed: the key of the optimizer whose step it has committed, until that is complete.
        number: of that commit.
        skipped: whether the step has no gradients of this worker, because they were not finite.
        later: its pushes after the commit.
        began: the number of complete steps, by key, when its last commit was acknowledged.
    """

    __slots__ = ("began", "committed", "gradients", "later", "number", "skipped")

    def __init__(self) -> None:
        self.gradients: dict[int, Gradients] = {}
        self.committed: int | None = None
        self.number, self.skipped = 0, False
        self.later: deque[Push] = deque()
        self.began: dict[int, int] = {}
