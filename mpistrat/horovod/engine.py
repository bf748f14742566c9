"""The engine of each rank: it agrees with the others on calls, and runs them, in its own thread or a waiting one.

It has a communicator for the negotiation, and a process group of PyTorch per process set, and makes all their collectives, in
the same order on every rank, and inside the contract of `comm.ProcessGroup`. A thread that waits for a call does the engine's
work meanwhile, which saves two changes of thread.

Calls are sent together: when a thread waits for one, when their tensors have a megabyte, or when no call has followed for
some milliseconds. So a small step is one message, one decision and one sum.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.distributed as dist

from ..base.agree import gather_text, same
from ..base.environment import Environment, number_in
from ..base.errors import ClusterError, CollectiveMismatchError, by_rank, explain
from ..base.log import logger
from ..base.waiting import Backoff, wait_until
from ..cluster.topology import check_comm, own_comm, running_mpi
from ..cluster.world import communicator_of
from ..torch.backend.gpus import gpus_here, is_on_gpu
from ..torch.backend.group import over
from ..torch.backend.rendezvous import store_of
from .errors import HorovodInternalError
from .negotiation import Coordinator, Decision, Form, Key, RankCalls, has_text, left_in
from .operations import FusedReduction, FusionBuffers, adasum, allgather, alltoall, broadcast, reducescatter
from .process_sets import RankSet, global_process_set
from .streams import EngineStreams, queued, show
from .timeline import TensorTimeline

__all__ = ["Engine", "Prepared"]

_TO_COORDINATOR, _TO_RANKS = 1, 2  # tags
_CYCLE = 10e-3  # seconds without another call until calls are sent that no thread waits for
_TOGETHER = 1 << 20  # bytes of tensors that are sent before that
_POLL = 1e-3  # seconds between the thread's polls for messages while calls are pending
_IDLE = 5e-3  # and while none are, or a thread of the program polls
_WHILE = 1.0  # seconds after the last call in which rank 0 expects calls of process sets
_PLANS = 64  # cached orders of decisions
_ALONE = 1 << 22  # least bytes of a tensor that is not copied into a message with others
_FUSED = 128 << 20  # bytes of the largest message of several tensors
_LAST_MESSAGES = 1.0  # seconds that a rank waits at the end until its messages are read
_LEAVE = 30.0  # seconds that `shutdown` waits for the other ranks' calls, and again for the running one


_unread: list[Any] = []  # requests of messages that no rank will read, with their memory


class Prepared(NamedTuple):
    """A call as ranks compare it. A named one can be submitted repeatedly.

    Attributes:
        key: the process set and the name.
        form: of the call.
        prefix: of the name.
    """

    key: Key
    form: Form
    prefix: str


class _Waiting:
    """A call of this rank that has not ended."""

    __slots__ = ("asked", "before", "done", "ended", "error", "finish", "key", "kind", "result", "tensors")

    def __init__(self, key: Key, kind: str, tensors: Sequence[torch.Tensor], finish: Callable[[Any], Any]) -> None:
        self.key, self.kind, self.tensors, self.finish = key, kind, tensors, finish
        self.done, self.asked = False, time.time()
        self.before = queued(tensors)  # events of the caller's streams, where the tensors lie on a GPU
        # An event of the engine's stream after the call, and the GPU.
        self.ended: tuple[Any, torch.device] | None = None
        self.result: Any = None
        self.error: BaseException | None = None


class _Bundle:
    """Decided calls that run as one: one of any kind, or several small reductions of one kind."""

    __slots__ = ("decisions", "reduction")

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.reduction: FusedReduction | None = None  # made at the first use


@final
class Engine:
    """The ranks that have called `hvd.init`, and their calls. Collective over `comm`.

    Args:
        comm: an intracommunicator of mpi4py, or None for the ranks of the job.
        mark_cycles, timeline: for `TensorTimeline`; the file is rank 0's.

    Attributes:
        rank, size, local_rank, local_size, cross_rank, cross_size: numbers of this rank in the job, on its node, and among the
            ranks with its number on all nodes.
        homogeneous: True if all nodes have the same number of ranks.
        sets: the process sets by number.
        ended: True after this rank or another has shut down, or after an error of MPI.
        timeline: the timeline, on rank 0 while there is one.

    Raises:
        ClusterError: MPI does not allow calls of several threads at a time.
        CollectiveMismatchError: on every rank, if they have different settings.
    """

    def __init__(self, comm: Any) -> None:
        mpi = running_mpi("hvd.init")
        given = check_comm(mpi, comm, "hvd.init")
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            remedy = "Leave mpi4py.rc.thread_level at 'multiple', and use an MPI that was built with it"
            text = explain("hvd.init", "", expected="MPI_THREAD_MULTIPLE", got="a lower thread level", remedy=remedy)
            raise ClusterError(text)
        self._comm = own_comm(mpi, given, "hvd.init")
        self._byte, self._any, self._status = mpi.BYTE, mpi.ANY_SOURCE, mpi.Status()
        self.rank, self.size = self._comm.rank, self._comm.size
        self._environment = Environment.read()
        self._time_limit = timedelta(seconds=self._environment.abort_after)
        self._store: Any = None  # over which NCCL connects
        self._place(mpi)
        cycle = number_in(os.environ, "HOROVOD_CYCLE_TIME", 1e3 * _CYCLE) * 1e-3
        fused = int(number_in(os.environ, "HOROVOD_FUSION_THRESHOLD", _FUSED))
        same(partial(gather_text, self._comm), f"HOROVOD_FUSION_THRESHOLD={fused}", _different)
        self._cycle_seconds, self._fused = cycle, fused
        self._limit = number_in(os.environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or self._environment.abort_after
        self.sets: dict[int, RankSet] = {}
        self._numbers = 0
        self._lock, self._working, self._wake = threading.Lock(), threading.Lock(), threading.Event()
        self._fresh = list[tuple[Key, Form]]()  # calls that were not sent
        self._fresh_bytes, self._polled = 0, False  # of their tensors; True if the program polls for their end
        self._calls: dict[Key, _Waiting] = {}
        self._handles: dict[int, _Waiting] = {}
        self._handle, self._waiting, self._last_call = 0, 0, 0.0
        self._unnamed: dict[tuple[int, str], int] = defaultdict(int)
        self._leaving = self._left = self.ended = False
        self._why: BaseException | None = None
        self._mine, self._sending = RankCalls(), list[Any]()
        self._plans: dict[bytes, list[_Bundle]] = {}
        self._buffers = FusionBuffers()
        self._streams, self._gpu = EngineStreams(), torch.device("cpu")
        self.timeline: TensorTimeline | None = None
        self._coordinator: Coordinator | None = None
        if self.rank == 0:
            warn = 0.0 if os.environ.get("HOROVOD_STALL_CHECK_DISABLE") == "1" else self._environment.warn_after
            warn = warn and number_in(os.environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", warn)
            self._coordinator = Coordinator(self.size, self._ranks_of, warn, self._limit, logger.warning)
        self._next_look = time.monotonic() + 1.0
        global_process_set.ranks = list(range(self.size))
        self._register(global_process_set)
        self._thread = threading.Thread(target=self._serve, name="mpistrat horovod", daemon=True)
        self._thread.start()

    def _place(self, mpi: Any) -> None:
        node = self._comm.Split_type(mpi.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank, self.local_size = node.rank, node.size
        across = self._comm.Split(node.rank, self.rank)
        self.cross_rank, self.cross_size = across.rank, across.size
        sizes = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([node.size], np.int64), sizes)
        self.homogeneous = bool((sizes == sizes[0]).all())
        if self._comm.allreduce(gpus_here(), mpi.LOR):
            self._store, *_ = store_of(self._comm, node, self._time_limit, "hvd.init")
        node.Free()
        across.Free()

    def _ranks_of(self, number: int) -> Sequence[int] | None:
        return self.sets[number].ranks if number in self.sets else None

    def _register(self, process_set: RankSet) -> None:
        """Set the number of a process set and, on its ranks, its group. Collective over its ranks."""
        number, group = self._numbers, None
        self._numbers += 1
        if self.rank in process_set.ranks:
            store = None if self._store is None else dist.PrefixStore(f"horovod {number}", self._store)
            comm = communicator_of(self._comm, process_set.ranks, f"process set {number}")
            try:
                group = over(comm, store, self._time_limit, f"horovod {number}")
            finally:
                comm.Free()
        self.sets[number] = process_set
        process_set.register(number, self.rank, group)

    # calls of the program's threads

    def ask(
        self,
        kind: str,
        process_set: RankSet,
        tensors: Sequence[torch.Tensor],
        name: str | None,
        prefix: str,
        finish: Callable[[Any], Any],
        **more: Any,
    ) -> int:
        """Request a call, and return its handle.

        Args:
            kind: the operation.
            process_set: the ranks of the call.
            tensors: without history; those of reductions and broadcasts are overwritten.
            name: the same on all ranks; None for a number that all ranks count.
            prefix: of the name.
            finish: converts the operation's result for the caller.
            **more: of the form of the call.

        Raises:
            ValueError: the process set is not registered, a call of this name is running, or the tensors are on another GPU
                than before.
            HorovodInternalError: Horovod was shut down, or this rank does not belong to the process set.
        """
        return self.submit(self.prepare(kind, process_set, tensors, name, prefix, **more), tensors, finish)

    def prepare(
        self,
        kind: str,
        process_set: RankSet,
        tensors: Sequence[torch.Tensor],
        name: str | None,
        prefix: str,
        **more: Any,
    ) -> Prepared:
        """Return a call for `submit`, which takes tensors of these shapes, dtypes and devices. See `ask`."""
        number = process_set.process_set_id
        if number is None:
            remedy = "Pass it to hvd.init(process_sets=[...]) or hvd.add_process_set"
            got = f"{process_set}"
            raise ValueError(
                explain(f"hvd.{prefix}", "process_set", expected="a registered one", got=got, remedy=remedy)
            )
        if process_set.group is None:
            expected, got = f"a call of ranks {process_set.ranks}", f"one of rank {self.rank}"
            raise HorovodInternalError(explain(f"hvd.{prefix}", "process_set", expected=expected, got=got))
        form: Form = {"kind": kind, **more}
        if tensors:
            form["dtypes"] = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
            form["shapes"] = [list(tensor.shape) for tensor in tensors]
            form["device"] = "cpu"
            if is_on_gpu(tensors[0]):
                form["device"] = "gpu"
                self._take_gpu(tensors[0].device, prefix)
        if name is None:
            with self._lock:
                self._unnamed[number, prefix] += 1
                name, form["once"] = f"noname.{self._unnamed[number, prefix]}", True
        return Prepared((number, f"{prefix}.{name}"), form, prefix)

    def submit(self, prepared: Prepared, tensors: Sequence[torch.Tensor], finish: Callable[[Any], Any]) -> int:
        """Request a call, and return its handle. See `ask`."""
        key, form, prefix = prepared
        call = _Waiting(key, form["kind"], tensors, finish)
        with self._lock:
            if self.ended or self._leaving:
                raise HorovodInternalError(self._refusal(prefix)) from self._why
            if key in self._calls:
                remedy = "Wait for it with hvd.synchronize, or use another name"
                expected, got = "a name without a call that has not ended", f"Duplicate tensor name {key[1]!r}"
                text = explain(f"hvd.{prefix}", "name", expected=expected, got=got, remedy=remedy, rank=self.rank)
                raise ValueError(text)
            self._calls[key] = call
            self._fresh.append((key, form))
            for tensor in tensors:
                self._fresh_bytes += tensor.nbytes
            self._handle += 1
            self._handles[self._handle] = call
            self._last_call = time.monotonic()
            if self._fresh_bytes >= _TOGETHER:
                self._wake.set()
            return self._handle

    def _refusal(self, what: str) -> str:
        reason = f": {self._why}" if self._why is not None else ""
        return f"rank {self.rank}: hvd.{what}: Horovod has been shut down{reason}. Call hvd.init() on all ranks again"

    def knows(self, handle: int) -> bool:
        """Return True if the result of a handle's call has not been read yet."""
        return handle in self._handles

    def ready(self, handle: int) -> bool:
        """Return True if the call of a handle has ended."""
        call = self._handles.get(handle)
        if call is None or call.done:
            return call is None or call.ended is None or bool(call.ended[0].query())
        if self._fresh:
            self._polled = True
            self._wake.set()
        return False

    def wait(self, handle: int) -> Any:
        """Wait for a call, and return its result.

        Raises:
            HorovodInternalError: it failed.
        """
        call = self._handles.pop(handle)
        if not call.done:
            with self._lock:
                self._waiting += 1
            try:
                self._work_until(call)
            finally:
                with self._lock:
                    self._waiting -= 1
                    left = bool(self._calls)
                if left:
                    self._wake.set()
        if call.error is not None:
            if isinstance(call.error, ValueError) and call.kind in ("addset", "removeset"):
                raise call.error
            raise HorovodInternalError(str(call.error)) from call.error
        if call.ended is not None:
            show(*call.ended, call.result)
        return call.finish(call.result)

    def shut_down(self) -> None:
        """End the thread after the calls of all ranks; later calls fail. Local."""
        with self._lock:
            self._leaving = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_LEAVE)
            if self._thread.is_alive():  # else the end of the interpreter may abort it, and the process
                self._stop(HorovodInternalError(f"rank {self.rank}: hvd.shutdown: no answer within {_LEAVE:g} s"))
                self._wake.set()
                self._thread.join(_LEAVE)
        if self.timeline is not None:
            self.timeline.close()
            self.timeline = None
        if isinstance(self._why, HorovodInternalError):  # no rank was lost
            self._streams.finish()
        for process_set in self.sets.values():
            _end_group(process_set.forget())
        self._coordinator = (
            None  # it refers to this object, which is then freed here, not at the end of the interpreter
        )

    def use_gpu(self, number: int) -> None:
        """Set the GPU of a rank that joins before its first call with a tensor on one; -1 for the current one."""
        if gpus_here() and self._gpu.type == "cpu":
            self._gpu = torch.device("cuda", number if number >= 0 else torch.cuda.current_device())

    def _take_gpu(self, device: torch.device, prefix: str) -> None:
        if self._gpu.type == "cpu":
            self._gpu = device
        if device != self._gpu:
            remedy = "Call torch.cuda.set_device(hvd.local_rank()) first"
            expected = f"tensors on {self._gpu}, the GPU of this rank's first call"
            text = explain(f"hvd.{prefix}", "tensor", expected=expected, got=device, remedy=remedy, rank=self.rank)
            raise ValueError(text)

    # the thread

    def _serve(self) -> None:
        """Do the engine's work while no thread waits."""
        active = time.monotonic()
        while not self.ended:
            if not self._waiting and self._work(0):
                active = time.monotonic()
                continue
            on_the_way = len(self._calls) > len(self._fresh)
            if self.rank == 0 and len(self.sets) > 1:  # it may decide on calls of sets without it
                on_the_way |= time.monotonic() - max(active, self._last_call) < _WHILE
            self._wake.wait(_POLL if on_the_way and not self._waiting else _IDLE)
            self._wake.clear()

    def _work_until(self, call: _Waiting) -> None:
        backoff = Backoff()
        while not call.done:
            if self._work(_POLL):
                backoff.reset()
            else:
                backoff.pause()

    def _work(self, seconds: float) -> bool:
        """Do one cycle, after waiting at most `seconds` for another thread's. Return False if there was nothing to do."""
        if not self._working.acquire(timeout=seconds):
            return False
        try:
            return not self.ended and self._cycle()
        except BaseException as error:
            self._stop(error)
            with contextlib.suppress(Exception):  # ranks were lost, for instance
                self._tell(self._mine.message((), f"{type(error).__name__}: {error}"))
                if self._coordinator is not None:
                    self._decide()
            if not isinstance(error, Exception):
                raise
            return True
        finally:
            self._working.release()

    def _stop(self, why: BaseException) -> None:
        """End the engine; calls that have not ended fail."""
        with self._lock:
            self.ended, self._why = True, why
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.error, call.done = why, True

    def _cycle(self) -> bool:
        """Send, receive, run. Return False if there was nothing to do."""
        fresh, leaves = self._to_send()
        if self.timeline is not None:
            self.timeline.cycle()
        if fresh or leaves:
            self._tell(self._mine.message(fresh, "" if leaves else None))
        decided = self._decide() if self._coordinator is not None else self._receive(0, _TO_RANKS)
        if self._sending:
            self._sending = [each for each in self._sending if not each[0].Test()]
        if decided is None:
            return bool(fresh)
        left = left_in(decided[1])
        with torch.no_grad():
            self._run(self._plan(decided[1]))
        if left is not None:
            self._end(*left)
        return True

    def _to_send(self) -> tuple[Sequence[tuple[Key, Form]], bool]:
        """Return the calls to send now, and whether this rank leaves."""
        if not self._fresh and (not self._leaving or self._left):
            return (), False
        with self._lock:
            leaves, self._left = self._leaving and not self._left, self._left or self._leaving
            enough = self._waiting or self._polled or leaves or self._fresh_bytes >= _TOGETHER
            if not enough and time.monotonic() - self._last_call < self._cycle_seconds:
                return (), False
            fresh, self._fresh = self._fresh, []
            self._fresh_bytes, self._polled = 0, False
            return fresh, leaves

    def _plan(self, data: bytes) -> list[_Bundle]:
        """Return a decision's calls, in bundles that run as one. Decisions by numbers alone are cached."""
        found = self._plans.get(data)
        if found is None:
            changes = self._mine.changes
            found = self._bundles(self._mine.decisions(data))
            if self._mine.changes > changes or len(self._plans) >= _PLANS:
                self._plans.clear()
            if not has_text(data):
                self._plans[data] = found
        return found

    def _tell(self, data: bytes) -> None:
        """Send this rank's message to rank 0."""
        if self._coordinator is None:
            self._send(data, 0, _TO_COORDINATOR)
        else:
            self._coordinator.take(0, data)

    def _decide(self) -> tuple[int, bytes] | None:
        """Take the messages of all ranks, and send the decision to its ranks; on rank 0."""
        coordinator = self._coordinator
        assert coordinator is not None
        while self.size > 1 and (found := self._receive(None, _TO_COORDINATOR)) is not None:
            coordinator.take(*found)
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + min(1.0, self._limit / 4)
            coordinator.look_for_stalls()
        decision = coordinator.decide()
        if decision is None:
            return None
        data, ranks = decision
        for rank in sorted(ranks - {0}):
            self._send(data, rank, _TO_RANKS)
        return 0, data

    def _send(self, data: bytes, rank: int, tag: int) -> None:
        buffer = np.frombuffer(data, np.uint8)
        self._sending.append((self._comm.Isend([buffer, self._byte], rank, tag), buffer))

    def _receive(self, source: int | None, tag: int) -> tuple[int, bytes] | None:
        message = self._comm.Improbe(self._any if source is None else source, tag, self._status)
        if message is None:
            return None
        status = self._status
        buffer = np.empty(status.Get_count(self._byte), np.uint8)
        sender = status.Get_source()
        message.Recv([buffer, self._byte])
        return sender, buffer.tobytes()

    def _end(self, left: int, why: str) -> None:
        from mpi4py import MPI

        # If rank 0 has ended, a large message to it is never read: MPI keeps its memory then.
        if not wait_until(lambda: MPI.Request.Testall([request for request, _ in self._sending]), _LAST_MESSAGES):
            _unread.extend(self._sending)
        who = "this rank" if left == self.rank else f"rank {left}"
        reason = f"failed: {why}" if why else "has called hvd.shutdown, or ended"
        self._stop(HorovodInternalError(f"rank {self.rank}: Horovod has been shut down: {who} {reason}"))

    # decided calls

    def _run(self, plan: Sequence[_Bundle]) -> None:
        """Run decided calls in their order; reductions of one kind together."""
        for bundle in plan:
            started = time.time()
            error: Exception | None = None
            first = bundle.decisions[0]
            process_set = self.sets.get(first.key[0])
            calls = [self._calls.get(each.key) for each in bundle.decisions]
            results: list[Any] = [None] * len(calls)
            if first.error:
                error = CollectiveMismatchError(first.error)
            elif process_set is not None and self.rank in process_set.ranks:
                try:
                    results = self._run_in_order(process_set, bundle, calls)
                except Exception as failure:
                    error = failure
            with self._lock:
                for each in bundle.decisions:
                    self._calls.pop(each.key, None)
            for call, result in zip(calls, results, strict=True):
                if call is None:
                    continue
                call.result, call.error, call.tensors = result, error, ()
                if self.timeline is not None and error is None:
                    self.timeline.call(call.key[1], call.kind, call.asked, started)
                call.done = True

    def _bundles(self, decisions: Sequence[Decision]) -> list[_Bundle]:
        """Return the decisions in bundles; small reductions of one kind share one."""
        found, open_ones = list[_Bundle](), dict[Any, tuple[_Bundle, int]]()
        for each in decisions:
            form, alone = each.form, _Bundle()
            if each.error or form["kind"] != "allreduce" or form["op"] == "Adasum" or len(set(form["dtypes"])) > 1:
                alone.decisions.append(each)
                found.append(alone)
                continue
            kind = (each.key[0], form["op"], form["dtypes"][0], form["device"], form["pre"], form["post"])
            nbytes = 8 * sum(math.prod(shape) for shape in form["shapes"])
            bundle, size = open_ones.get(kind, (alone, 0))
            if nbytes >= _ALONE or size + nbytes > self._fused:
                bundle, size = alone, 0
            if not bundle.decisions:
                found.append(bundle)
            bundle.decisions.append(each)
            if nbytes < _ALONE:
                open_ones[kind] = (bundle, size + nbytes)
        return found

    def _run_in_order(self, of: RankSet, bundle: _Bundle, calls: Sequence[_Waiting | None]) -> list[Any]:
        """Return the results of the calls; on a GPU in the order of its streams. Collective."""
        if bundle.decisions[0].form.get("device") != "gpu":
            return self._run_bundle(of, bundle, calls)
        own = [call for call in calls if call is not None]
        events = [event for call in own for event in call.before]
        tensors = [tensor for call in own for tensor in call.tensors]
        with self._streams.after(self._gpu, events, tensors) as stream:
            results = self._run_bundle(of, bundle, calls)
            ended = stream.record_event()
        for call in own:
            call.ended = (ended, self._gpu)
        return results

    def _run_bundle(self, of: RankSet, bundle: _Bundle, calls: Sequence[_Waiting | None]) -> list[Any]:
        """Return the results of the calls. Collective."""
        form, call = bundle.decisions[0].form, calls[0]
        kind, group = form["kind"], of.group
        if kind == "allreduce":
            tensors = [None if one is None else one.tensors for one in calls]
            self._reduce(group, bundle, tensors)
            return tensors
        if kind == "join":
            with self._lock:
                self._unnamed.clear()  # ranks that joined early have made fewer calls
            return [form["last"]]
        if kind == "barrier":  # the decision shows that all have arrived
            return [None]
        assert call is not None
        return [self._run_one(of, bundle.decisions[0], call)]

    def _run_one(self, of: RankSet, decision: Decision, call: _Waiting) -> Any:
        form, group, tensors = decision.form, of.group, call.tensors
        kind = form["kind"]
        if kind == "allgather":
            return [
                allgather(group, tensor, [rank[number] for rank in form["rows"]])
                for number, tensor in enumerate(tensors)
            ]
        if kind == "broadcast":
            broadcast(group, tensors[0], of.ranks.index(form["root"]))
            return tensors
        if kind == "alltoall":
            return alltoall(group, tensors[0], form["splits"])
        if kind == "reducescatter":
            return [reducescatter(group, tensor, form) for tensor in tensors]
        if kind == "addset":
            return self._add(form["members"])
        return self._remove(form["number"])

    def _reduce(self, group: Any, bundle: _Bundle, tensors: Sequence[Sequence[torch.Tensor] | None]) -> None:
        form = bundle.decisions[0].form
        device = self._gpu if form["device"] == "gpu" else torch.device("cpu")
        if form["op"] == "Adasum":
            for number, shape in enumerate(form["shapes"]):
                own = tensors[0][number] if tensors[0] is not None else torch.zeros(shape)
                own.copy_(adasum(group, own, form["pre"]) * form["post"])
        elif len(set(form["dtypes"])) > 1:
            for some, own_ones in _by_dtype(form, tensors[0]):
                FusedReduction(some, self._buffers)(group, own_ones, device)
        else:
            if bundle.reduction is None:
                bundle.reduction = FusedReduction([each.form for each in bundle.decisions], self._buffers)
            bundle.reduction(group, tensors, device)

    def _add(self, members: Sequence[int]) -> RankSet:
        if any(known.ranks == list(members) for known in self.sets.values()):
            got = f"{list(members)}, which are those of another one"
            raise ValueError(explain("hvd.add_process_set", "process_set", expected="ranks of no process set", got=got))
        if not all(0 <= rank < self.size for rank in members) or not members:
            expected = f"at least one rank, each with 0 <= rank < {self.size}"
            raise ValueError(explain("hvd.add_process_set", "process_set", expected=expected, got=list(members)))
        made = RankSet(members)
        self._register(made)
        return made

    def adopt(self, process_set: RankSet, made: RankSet) -> RankSet:
        """Make the program's object the process set that was created, and return it."""
        assert made.process_set_id is not None
        process_set.register(made.process_set_id, self.rank, made.group)
        self.sets[made.process_set_id] = process_set
        return process_set

    def _remove(self, number: int) -> bool:
        removed = self.sets.pop(number, None)
        if removed is not None:
            self._streams.finish()
            _end_group(removed.forget())
        return removed is not None


def _end_group(group: Any) -> None:
    """End a process group, if any. Local: other ranks may be late, so NCCL is not ended collectively."""
    if group is not None:
        if group.gpus is not None:
            group.gpus.abort()
        group.shutdown()


def _by_dtype(form: Form, tensors: Sequence[torch.Tensor] | None) -> list[Any]:
    """Split a grouped reduction into one for each dtype."""
    found = []
    for dtype in dict.fromkeys(form["dtypes"]):
        numbers = [number for number, each in enumerate(form["dtypes"]) if each == dtype]
        part = {**form, "dtypes": [dtype] * len(numbers), "shapes": [form["shapes"][number] for number in numbers]}
        found.append(([part], [None if tensors is None else [tensors[number] for number in numbers]]))
    return found


def _different(texts: dict[int, str]) -> CollectiveMismatchError:
    return CollectiveMismatchError(f"hvd.init: the ranks have different settings: {by_rank(texts)}")
