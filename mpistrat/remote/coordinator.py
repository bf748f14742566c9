"""ClusterCoordinator: the chief sends functions to workers, which run them and return the results."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for_all
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, final

from ..base import nest
from ..base.errors import ClosedError, ContextError, PeerExitError, explain
from ..cluster.forks import is_child, refusal
from ..lookup import StaticHashTable
from .cluster import Cluster, check_workers
from .dispatcher import FIRST, Closure, Dispatcher
from .program import ProgramLeader
from .registry import dumps
from .scheduler import Call, FunctionScheduler, PerWorkerValues, RemoteValue, Stub, same

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = [
    "ClusterCoordinator",
    "CoordinatorExecutor",
]


T = TypeVar("T")
Start = Callable[[], bool]
Callback = Callable[[RemoteValue], None]


@final
class CoordinatorExecutor(Executor):
    """A concurrent.futures.Executor that runs functions on the workers. `ClusterCoordinator.executor()` creates it.

    A function's exception is only in its future: the coordinator's `join` neither waits for these functions nor raises their
    errors.

    Args:
        submit: sends a function and its arguments; calls `start` before, which returns False if it is cancelled, and `callback`
            with the value once it is ready.
    """

    def __init__(self, submit: Callable[[Any, Any, Any, Start, Callback], RemoteValue]) -> None:
        self._submit, self._open = submit, True
        self._futures: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Return the future of a function that a worker calls. Waits while the queue is full.

        Raises:
            RuntimeError: after `shutdown`.
            TypeError: the function, or what it refers to, cannot be pickled.
        """
        if not self._open:
            raise RuntimeError("CoordinatorExecutor.submit: cannot take new functions after shutdown")
        future: Future[T] = Future()

        def finish(value: RemoteValue) -> None:
            if future.cancelled():
                return
            try:
                result = value.get()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        try:
            self._submit(fn, args, kwargs, future.set_running_or_notify_cancel, finish)
        except BaseException:
            self._futures.discard(future)
            raise
        return future

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """Return an iterator over a function's results, in the order of its arguments.

        Args:
            fn: called with one element of each iterable.
            iterables: read at once, up to the end of the shortest.
            timeout: seconds, from this call, until the next result must be ready.
            chunksize: number of calls that are sent together: more for quick functions.

        Raises:
            TimeoutError: on iteration, if a result is not ready in time.
            Exception: on iteration, that of the function.
        """
        if chunksize < 1:
            raise ValueError(explain("CoordinatorExecutor.map", "chunksize", expected="at least 1", got=chunksize))
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        calls = iter(zip(*iterables, strict=False))
        chunks = iter(lambda: list(itertools.islice(calls, chunksize)), [])
        return itertools.chain.from_iterable(super().map(partial(_call_all, fn), chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more functions. The coordinator continues.

        Args:
            wait: wait for the submitted ones.
            cancel_futures: cancel those that are not on a worker yet.
        """
        self._open = False
        futures = list(self._futures)
        if cancel_futures:
            for future in futures:
                future.cancel()
        if wait:
            wait_for_all(futures)


def _call_all(fn: Callable[..., T], calls: list[tuple[Any, ...]]) -> list[T]:
    return [fn(*args) for args in calls]


QUEUE_SIZE = 10_000


@final
class ClusterCoordinator(FunctionScheduler):
    """A scheduler of functions on the workers of a ParameterServerStrategy (TF: tf.distribute.coordinator.ClusterCoordinator).

    The same program runs on every rank, and creating the coordinator is collective over all of them. The chief schedules; all
    others serve until it closes, in `serve()` or at the end of the `with` block::

        with ms.coordinator.ClusterCoordinator(strategy) as coordinator:
            if coordinator.is_chief:
                for _ in range(steps):
                    coordinator.schedule(step, args=(iterator,))
                coordinator.join()

    The chief is the strategy's first worker, and runs no functions itself. In a scheduled function, references to the chief's
    variables, optimizers, distributed models and strategy become the worker's own. All other objects are sent by cloudpickle, in
    their state at `schedule`. A worker gets equal functions once, so jitted ones compile once; what a function refers to, besides
    its arguments, keeps its state on a worker between calls. The return value is sent back. A function runs once, unless its
    worker leaves the program: then another worker runs it from the start.

    If a worker dies, most MPIs end the job. In `ms.survive` under Open MPI (`mpistrat run --survive`) the job continues: other
    workers run its functions from the start, so what these had written is written again; the chief and the variables on servers
    continue. The next collective call, such as a new variable, `save` or `close`, first waits for running functions, and numbers
    the remaining ranks anew. PerWorkerValues lose its values. Not so with one-sided transports, and if the worker dies in a
    collective call: then, and when the chief or a server dies, `ms.survive` calls its function again.

    Args:
        strategy: a ParameterServerStrategy with a worker besides the chief.
        queue_size: the most scheduled functions that wait for a worker; `schedule` waits for room.

    Raises:
        LayoutError: on every rank: there is no worker besides the chief.
        MissingDependencyError: cloudpickle is not installed.
        TypeError: it is another strategy.
        ValueError: the strategy has a coordinator already, or a bound of staleness.
    """

    def __init__(self, strategy: Strategy, *, queue_size: int = QUEUE_SIZE) -> None:
        if type(queue_size) is not int or queue_size < 1:
            raise ValueError(explain("ClusterCoordinator", "queue_size", expected="at least 1", got=queue_size))
        check_workers(strategy)
        self._cluster = Cluster.of(strategy)
        if self._cluster.registry.coordinator is not None:
            remedy = "Close it, or use that one"
            expected, got = "a strategy without a coordinator", "one that has one"
            raise ValueError(explain("ClusterCoordinator", "strategy", expected=expected, got=got, remedy=remedy))
        super().__init__()
        self._strategy = strategy
        self._closed = False
        self._last = b""  # the function that was scheduled last
        self._tables: weakref.WeakKeyDictionary[StaticHashTable, PerWorkerValues] = weakref.WeakKeyDictionary()
        self._new_tables: deque[tuple[int, StaticHashTable]] = deque()  # not sent to workers yet
        self._dropped: deque[int] = deque()  # numbers of unused per-worker values
        self._cluster.open(self, queue_size)

    # roles

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self._strategy

    @property
    def is_chief(self) -> bool:
        """True on the rank that schedules; the others serve."""
        return self._cluster.dispatcher is not None

    @property
    def num_workers(self) -> int:
        """The number of workers that run functions: all but the chief, and on the chief without those that are lost."""
        dispatcher = self._cluster.dispatcher
        return len(self._cluster.workers) if dispatcher is None else len(dispatcher.alive())

    # calls of the chief

    def _raise_error(self) -> None:
        self._dispatcher("schedule").raise_error()

    def _schedule(self, call: Call, worker: int | None, priority: float) -> RemoteValue:
        self._check_worker(worker)
        return self._submit(self._dispatcher("schedule"), "schedule", *call, worker=worker, priority=priority)

    def submit(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        *,
        worker: int | None = None,
        priority: float = 0,
        callback: Callable[[RemoteValue], None],
    ) -> RemoteValue:
        """Schedule a function whose error is only in its value: `join` neither waits nor raises. For the chief.

        Args:
            fn, args, kwargs, worker, priority: as for `schedule`, as are the errors, except those of other functions.
            callback: called with the value once it is ready or aborted, possibly in another thread.
        """
        self._check_worker(worker)
        how: dict[str, Any] = {"worker": worker, "priority": priority, "isolated": True, "callback": callback}
        return self._submit(self._dispatcher("submit"), "submit", fn, args, kwargs, **how)

    def cancel(self) -> None:
        """Cancel waiting functions; running ones end. The values of cancelled ones raise ClosureCancelledError. For the chief."""
        self._dispatcher("cancel").cancel("cancelled by the chief")
        self._tables.clear()  # some workers may not have received them

    def join(self) -> None:
        """Wait until all scheduled functions have run. For the chief.

        Raises:
            Exception: that of the first function that failed, once, after the running ones have ended. Waiting ones are
                cancelled, and their values raise ClosureCancelledError. Then the coordinator can be used again.
        """
        self._dispatcher("join").join()

    def done(self) -> bool:
        """Return True if all scheduled functions have run. For the chief."""
        return self._dispatcher("done").done()

    def lead(self, program: bytes) -> ProgramLeader:
        """Return a client's program, for all ranks. For the chief.

        Raises:
            ContextError: MPI was started without THREAD_MULTIPLE.
        """
        dispatcher = self._dispatcher("run")
        self._cluster.leave_out_lost()
        return ProgramLeader(dispatcher, self._cluster.world, self._cluster.chief, program)

    def require_workers(self) -> None:
        """Raise PeerExitError if all workers have left the program or died. For the chief."""
        if not self._dispatcher("require_workers").alive():
            raise PeerExitError("ClusterCoordinator: all workers have left the program or died: no function can be run")

    def fetch(self, values: Any) -> Any:
        """Return a structure with the values of the RemoteValues in it. For the chief.

        A PerWorkerValues becomes a tuple of the values of the workers that have not left; other leaves are unchanged.

        Raises:
            Exception: that of a function.
        """
        self._dispatcher("fetch")
        return super().fetch(nest.map_structure(self._ask, values))

    def executor(self) -> CoordinatorExecutor:
        """Return a concurrent.futures.Executor that runs functions on the workers. For the chief.

        Raises:
            ContextError: MPI was started without THREAD_MULTIPLE.
        """
        dispatcher = self._dispatcher("executor")
        if not dispatcher.threaded:
            remedy = "Use schedule(), or let mpi4py start MPI"
            raise ContextError(
                explain("executor", "", expected="MPI.THREAD_MULTIPLE", got="a lower level", remedy=remedy)
            )

        def submit(fn: Any, args: Any, kwargs: Any, start: Any, callback: Any) -> RemoteValue:
            dispatcher = self._dispatcher("executor")
            how = {"isolated": True, "start": start, "callback": callback}
            return self._submit(dispatcher, "submit", fn, args, kwargs, **how)

        return CoordinatorExecutor(submit)

    # calls of the others, and the end

    def serve(self) -> None:
        """Run the functions that the chief schedules, until it closes the coordinator. Not for the chief.

        It continues after a function that raises: the chief gets the exception. A server only waits.

        Raises:
            ContextError: on the chief.
            PeerExitError: the chief left the program without closing.
        """
        loop = self._cluster.loop
        if loop is None:
            remedy = "The chief schedules: `if coordinator.is_chief: ... else: coordinator.serve()`"
            raise ContextError(explain("serve", "", expected="a worker or server", got="the chief", remedy=remedy))
        if self._closed:
            return
        self._closed = True
        if loop.serve():
            self._cluster.release()

    def close(self) -> None:
        """End the coordinator. Collective the first time; later calls do nothing. The end of the `with` block calls it.

        The chief cancels waiting functions and waits for running ones; the others serve until then.
        """
        if self._cluster.loop is not None:
            self.serve()
        elif not self._closed:
            self._closed = True
            self._cluster.end_coordinator()
            self._cluster.release()

    def __enter__(self) -> ClusterCoordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, unless an exception leaves the block: it ends the job, so it must not wait for others."""
        if error is None:
            self.close()

    # inside

    def _dispatcher(self, function: str) -> Dispatcher:
        if is_child():
            raise refusal(f"ClusterCoordinator.{function}")
        dispatcher = self._cluster.dispatcher
        if dispatcher is None:
            remedy = "Call it `if coordinator.is_chief`; other ranks call serve() or close()"
            expected, got = "a call on the chief", "one on a worker or server"
            raise ContextError(explain(f"ClusterCoordinator.{function}", "", expected=expected, got=got, remedy=remedy))
        if self._closed or self._cluster.closed:
            raise ClosedError(f"ClusterCoordinator.{function}: the coordinator was closed")
        return dispatcher

    def _check_worker(self, worker: int | None) -> None:
        dispatcher = self._cluster.dispatcher
        if worker is None or dispatcher is None:
            return
        if not (type(worker) is int and 0 <= worker < dispatcher.num_workers):
            expected = f"None or 0 <= worker < {dispatcher.num_workers}"
            raise ValueError(explain("ClusterCoordinator.schedule", "worker", expected=expected, got=repr(worker)))

    def _submit(
        self,
        dispatcher: Dispatcher,
        function: str,
        fn: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        **how: Any,
    ) -> RemoteValue:
        what = getattr(fn, "__qualname__", None) or type(fn).__name__
        if not callable(fn):
            raise TypeError(explain(function, "fn", expected="a function", got=f"a {type(fn).__name__}"))
        if not isinstance(args, (tuple, list)):
            remedy = "Write args=(x,) for one argument"
            got = f"a {type(args).__name__}"
            raise TypeError(explain(function, "args", expected="a tuple or list", got=got, remedy=remedy))
        while self._dropped:
            self._drop(dispatcher, self._dropped.popleft())
        registry = self._cluster.registry
        inputs: dict[int, RemoteValue] = {}
        registry.used, registry.kept = [], []
        try:
            code, call = self._packed(fn, what, inputs), (tuple(args), dict(kwargs or {}))
            data = dumps(call if code else (fn, *call), registry.reduce_with(inputs), what)
        except TypeError as error:
            remedy = "Create objects that cannot be sent on the worker, with create_per_worker_resource"
            expected, got = "a function that can be pickled with all that it refers to", f"{what}: {error}"
            raise TypeError(explain(function, "fn", expected=expected, got=got, remedy=remedy)) from error
        kept, registry.kept = registry.kept, []
        self._cluster.prepare(registry.used)
        while self._new_tables:
            number, table = self._new_tables.popleft()
            self._make_number(dispatcher, number, StaticHashTable, table.arguments, function, isolated=True)
        return dispatcher.submit(
            Closure(
                what,
                data,
                RemoteValue(self, next(self._numbers)),
                tuple(inputs.values()),
                kept=kept,
                function=code,
                **how,
            )
        )

    def _packed(self, fn: Any, what: str, inputs: dict[int, RemoteValue]) -> bytes:
        """Return a function as bytes; none if it refers to values that differ between its calls."""
        registry = self._cluster.registry
        registry.varies = False
        data = dumps(fn, registry.reduce_with(inputs), what)
        if inputs or registry.varies:
            return b""
        if data != self._last:  # many calls of one function share its bytes
            self._last = data
        return self._last

    def _make_on_workers(self, fn: Callable[..., Any], args: tuple[Any, ...], function: str) -> PerWorkerValues:
        dispatcher = self._dispatcher(function)
        values, number = self._new_values()
        self._make_number(dispatcher, number, fn, args, function)
        return values

    def _new_values(self) -> tuple[PerWorkerValues, int]:
        """Return a reference to values that the workers have yet to create, and its number."""
        number = next(self._numbers)
        values = PerWorkerValues(self, number)
        weakref.finalize(values, self._dropped.append, number).atexit = False
        return values, number

    def _make_number(
        self,
        dispatcher: Dispatcher,
        number: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        function: str,
        isolated: bool = False,  # otherwise another function's error may come between two workers
    ) -> None:
        keep, how = (self._cluster.registry, number, fn, args), {"priority": FIRST, "isolated": isolated}
        for worker in dispatcher.alive():
            self._submit(dispatcher, function, _keep, keep, None, worker=worker, **how)

    def copies_of(self, table: StaticHashTable) -> PerWorkerValues:
        """Return a reference to the workers' copies of a table, which are sent before the function that uses it."""
        values = self._tables.get(table)
        if values is None:
            values, number = self._new_values()
            self._tables[table] = values
            self._new_tables.append((number, table))
        return values

    def _drop(self, dispatcher: Dispatcher, number: int) -> None:
        for worker in dispatcher.alive():
            data = dumps((_forget, (self._cluster.registry, number), {}), self._cluster.registry.reduce)
            dispatcher.submit(
                Closure("forget", data, RemoteValue(self, next(self._numbers)), (), worker, FIRST, isolated=True)
            )

    def _ask(self, value: Any) -> Any:
        """Return the workers' values of a PerWorkerValues; other values unchanged."""
        if not isinstance(value, PerWorkerValues):
            return value
        how = {"priority": FIRST, "isolated": True}
        dispatcher = self._dispatcher("fetch")
        return tuple(
            self._submit(dispatcher, "fetch", same, (value,), None, worker=worker, **how)
            for worker in dispatcher.alive()
        )

    def iterate(self, stub: Stub) -> PerWorkerValues:
        """Return the iterators of per-worker datasets: implements `iter`."""
        if not isinstance(stub, PerWorkerValues):
            raise TypeError(explain("iter", "", expected="a PerWorkerValues", got="a RemoteValue"))
        return self._make_on_workers(iter, (stub,), "iter")

    def wait_for(self, value: RemoteValue, timeout: float | None) -> Any:
        """Return a value: implements `RemoteValue.get`."""
        dispatcher = self._cluster.dispatcher
        if dispatcher is None:
            raise ContextError(explain("RemoteValue.get", "", expected="a call on the chief", got="one elsewhere"))
        return dispatcher.wait_for(value, timeout)


# functions that run on workers; sent by reference, because workers have this module


def _keep(registry: Any, number: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    registry.resources[number] = fn(*args)


def _forget(registry: Any, number: int) -> None:
    registry.resources.pop(number, None)
