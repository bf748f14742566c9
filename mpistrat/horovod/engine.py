"""The engine of each rank agrees with the others which calls run, and runs them: in a thread of its own, or in one that waits.

It has a communicator of its own for the negotiation, and a process group of PyTorch for each process set, all of whose
collectives it makes. So they are in the same order on every rank, and inside the contract of `comm.ProcessGroup`. A thread of the
program that waits for a call does the engine's work meanwhile, which saves two changes of thread; else the engine's own does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, final

import numpy as np
import torch

from ..base.agree import gather_text, same
from ..base.environment import Environment, number_in
from ..base.errors import ClusterError, CollectiveMismatchError, by_rank, explain
from ..base.log import logger
from ..base.waiting import Backoff
from ..cluster.topology import check_comm, own_comm, running_mpi
from ..cluster.world import communicator_of
from ..torch.backend.group import over
from .errors import HorovodInternalError
from .negotiation import Coordinator, Decision, Form, Key, RankCalls, left_in
from .operations import adasum, allgather, alltoall, broadcast, reduce_together, reducescatter
from .process_sets import RankSet, global_process_set
from .timeline import TensorTimeline

__all__ = ["Engine"]

_TO_COORDINATOR, _TO_RANKS = 1, 2  # tags
_CYCLE = 1e-3  # seconds between polls for messages while calls of this rank are pending
_IDLE = 5e-3  # and after a while without calls
_WHILE = 1.0  # seconds
_ALONE = 1 << 22  # bytes from which on a tensor is not copied into a message with others
_FUSED = 128 << 20  # bytes of the largest message of several tensors
_LEAVE = 30.0  # seconds that `shutdown` waits for the other ranks' calls


class _Waiting:
    """A call of this rank that has not ended."""

    __slots__ = ("asked", "done", "error", "finish", "key", "kind", "result", "tensors")

    def __init__(self, key: Key, kind: str, tensors: Sequence[torch.Tensor], finish: Callable[[Any], Any]) -> None:
        self.key, self.kind, self.tensors, self.finish = key, kind, tensors, finish
        self.done, self.asked = threading.Event(), time.time()
        self.result: Any = None
        self.error: BaseException | None = None


@final
class Engine:
    """The ranks that have called `hvd.init`, and their calls. Collective over `comm`.

    Args:
        comm: an intracommunicator of mpi4py, or None for the ranks of the job.
        mark_cycles, timeline: for `TensorTimeline`; the file is rank 0's.

    Attributes:
        rank, size, local_rank, local_size, cross_rank, cross_size: numbers of this rank in the job, on its node, and among the
            ranks with its number on all nodes.
        homogeneous: whether all nodes have equally many ranks.
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
            text = explain("hvd.init", "", expected="MPI_THREAD_MULTIPLE", got="less", remedy=remedy)
            raise ClusterError(text)
        self._comm = own_comm(mpi, given, "hvd.init")
        self._byte = mpi.BYTE
        self.rank, self.size = self._comm.rank, self._comm.size
        self._place(mpi)
        self._environment = Environment.read()
        cycle = number_in(os.environ, "HOROVOD_CYCLE_TIME", 1e3 * _CYCLE) * 1e-3
        fused = int(number_in(os.environ, "HOROVOD_FUSION_THRESHOLD", _FUSED))
        same(partial(gather_text, self._comm), f"HOROVOD_FUSION_THRESHOLD={fused}", _different)
        self._cycle_seconds, self._fused = cycle, fused
        self._limit = number_in(os.environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or self._environment.abort_after
        self.sets: dict[int, RankSet] = {}
        self._numbers = 0
        self._lock, self._working, self._wake = threading.Lock(), threading.Lock(), threading.Event()
        self._fresh = list[tuple[Key, Form]]()
        self._calls: dict[Key, _Waiting] = {}
        self._handles: dict[int, _Waiting] = {}
        self._handle, self._waiting, self._last_call = 0, 0, 0.0
        self._unnamed: dict[tuple[int, str], int] = defaultdict(int)
        self._leaving = self._left = self.ended = False
        self._why: BaseException | None = None
        self._mine, self._sending = RankCalls(), list[Any]()
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
        node.Free()
        across.Free()

    def _ranks_of(self, number: int) -> Sequence[int] | None:
        return self.sets[number].ranks if number in self.sets else None

    def _register(self, process_set: RankSet) -> None:
        """Give a process set a number and, on its ranks, a group. Collective over its ranks."""
        number, group = self._numbers, None
        self._numbers += 1
        if self.rank in process_set.ranks:
            limit = timedelta(seconds=self._environment.abort_after)
            comm = communicator_of(self._comm, process_set.ranks, f"process set {number}")
            try:
                group = over(comm, None, limit, f"horovod {number}")
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
        """Ask for a call, and return its handle.

        Args:
            kind: the operation.
            process_set: whose ranks make it.
            tensors: without history; those of reductions and broadcasts are overwritten.
            name: that all ranks use; None for a number that all ranks count.
            prefix: of the name.
            finish: makes the result for the caller of what the operation returns.
            **more: of the form of the call.

        Raises:
            ValueError: the process set is not registered, or a call of this name has not ended.
            HorovodInternalError: Horovod was shut down, or this rank does not belong to the process set.
        """
        number = process_set.process_set_id
        if number is None:
            remedy = "Pass it to hvd.init(process_sets=[...]) or hvd.add_process_set"
            got = f"{process_set}"
            raise ValueError(
                explain(f"hvd.{prefix}", "process_set", expected="a registered one", got=got, remedy=remedy)
            )
        if self.rank not in process_set.ranks:
            expected, got = f"a call of ranks {process_set.ranks}", f"one of rank {self.rank}"
            raise HorovodInternalError(explain(f"hvd.{prefix}", "process_set", expected=expected, got=got))
        form: Form = {"kind": kind, **more}
        if tensors:
            form["dtypes"] = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
            form["shapes"] = [list(tensor.shape) for tensor in tensors]
        with self._lock:
            if self.ended or self._leaving:
                raise HorovodInternalError(self._refusal(prefix)) from self._why
            if name is None:
                self._unnamed[number, prefix] += 1
                name, form["once"] = f"noname.{self._unnamed[number, prefix]}", True
            key = (number, f"{prefix}.{name}")
            if key in self._calls:
                remedy = "Wait for it with hvd.synchronize, or use another name"
                expected, got = "a name without a call that has not ended", f"Duplicate tensor name {key[1]!r}"
                text = explain(f"hvd.{prefix}", "name", expected=expected, got=got, remedy=remedy, rank=self.rank)
                raise ValueError(text)
            call = self._calls[key] = _Waiting(key, kind, tensors, finish)
            self._fresh.append((key, form))
            self._handle += 1
            self._handles[self._handle] = call
            self._last_call = time.monotonic()
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
        return call is None or call.done.is_set()

    def wait(self, handle: int) -> Any:
        """Wait for a call, and return its result.

        Raises:
            HorovodInternalError: it failed.
        """
        call = self._handles.pop(handle)
        if not call.done.is_set():
            with self._lock:
                self._waiting += 1
            try:
                self._work_until(call)
            finally:
                with self._lock:
                    self._waiting -= 1
        if call.error is not None:
            if isinstance(call.error, ValueError) and call.kind in ("addset", "removeset"):
                raise call.error
            raise HorovodInternalError(str(call.error)) from call.error
        return call.finish(call.result)

    def shut_down(self) -> None:
        """End the thread after the calls that all ranks have made; other ranks' later calls fail. Local."""
        with self._lock:
            self._leaving = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_LEAVE)
        if self.timeline is not None:
            self.timeline.close()
            self.timeline = None
        for process_set in self.sets.values():
            group = process_set.forget()
            if group is not None:
                group.shutdown()

    # the thread

    def _serve(self) -> None:
        """Do the engine's work while no thread waits."""
        while not self.ended:
            if self._waiting or not self._work():
                busy = self._calls or time.monotonic() - self._last_call < _WHILE
                self._wake.wait(self._cycle_seconds if busy else _IDLE)
                self._wake.clear()

    def _work_until(self, call: _Waiting) -> None:
        backoff = Backoff()
        while not call.done.is_set():
            if self._work():
                backoff.reset()
            else:
                backoff.pause()

    def _work(self) -> bool:
        """Do one cycle, unless another thread does. Return False if there was nothing to do."""
        if not self._working.acquire(False):
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
            call.error = why
            call.done.set()

    def _cycle(self) -> bool:
        """Send, receive, run. Return False if there was nothing to do."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            leaves, self._left = self._leaving and not self._left, self._left or self._leaving
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
            self._run(self._mine.decisions(decided[1]))
        if left is not None:
            self._end(*left)
        return True

    def _tell(self, data: bytes) -> None:
        """Send this rank's message to rank 0."""
        if self._coordinator is None:
            self._send(data, 0, _TO_COORDINATOR)
        else:
            self._coordinator.take(0, data)

    def _decide(self) -> tuple[int, bytes] | None:
        """Rank 0: take the messages of all ranks, and send the decision to its ranks."""
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
        from mpi4py import MPI

        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE if source is None else source, tag, status)
        if message is None:
            return None
        buffer = np.empty(status.Get_count(self._byte), np.uint8)
        message.Recv([buffer, self._byte])
        return status.Get_source(), buffer.tobytes()

    def _end(self, left: int, why: str) -> None:
        from mpi4py import MPI

        MPI.Request.Waitall([request for request, _ in self._sending])
        who = "this rank" if left == self.rank else f"rank {left}"
        reason = f"failed: {why}" if why else "has called hvd.shutdown, or ended"
        self._stop(HorovodInternalError(f"rank {self.rank}: Horovod has been shut down: {who} {reason}"))

    # decided calls

    def _run(self, decisions: Sequence[Decision]) -> None:
        """Run decided calls in their order; reductions of one kind together."""
        for bundle in self._bundles(decisions):
            started = time.time()
            error: Exception | None = None
            process_set = self.sets.get(bundle[0].key[0])
            with self._lock:
                calls = [self._calls.get(each.key) for each in bundle]
            results: list[Any] = [None] * len(bundle)
            if bundle[0].error:
                error = CollectiveMismatchError(bundle[0].error)
            elif process_set is not None and self.rank in process_set.ranks:
                try:
                    results = self._run_bundle(process_set, bundle, calls)
                except Exception as failure:
                    error = failure
            for each, call, result in zip(bundle, calls, results, strict=True):
                if call is not None:
                    self._finish(call, each, result, error, started)

    def _finish(
        self, call: _Waiting, decision: Decision, result: Any, error: BaseException | None, started: float
    ) -> None:
        with self._lock:
            self._calls.pop(decision.key, None)
        call.result, call.error = result, error
        if self.timeline is not None and error is None:
            self.timeline.call(decision.key[1], call.kind, call.asked, started)
        call.tensors = ()
        call.done.set()

    def _bundles(self, decisions: Sequence[Decision]) -> list[list[Decision]]:
        """Return the decisions in groups, of which those of small reductions of one kind have several."""
        found, open_ones = list[list[Decision]](), dict[Any, tuple[list[Decision], int]]()
        for each in decisions:
            form = each.form
            if each.error or form["kind"] != "allreduce" or form["op"] == "Adasum" or len(set(form["dtypes"])) > 1:
                found.append([each])
                continue
            kind = (each.key[0], form["op"], form["dtypes"][0], form["pre"], form["post"])
            nbytes = 8 * sum(int(np.prod(shape)) for shape in form["shapes"])
            bundle, size = open_ones.get(kind, ([], 0))
            if not bundle or nbytes >= _ALONE or size + nbytes > self._fused:
                bundle, size = [], 0
                found.append(bundle)
            bundle.append(each)
            if nbytes < _ALONE:
                open_ones[kind] = (bundle, size + nbytes)
        return found

    def _run_bundle(self, of: RankSet, bundle: Sequence[Decision], calls: Sequence[_Waiting | None]) -> list[Any]:
        """Return what the calls return. Collective."""
        form, call = bundle[0].form, calls[0]
        kind, group = form["kind"], of.group
        tensors = [None if one is None else one.tensors for one in calls]
        if kind == "allreduce":
            self._reduce(group, [one.form for one in bundle], tensors)
            return tensors
        if kind == "join":
            with self._lock:
                self._unnamed.clear()  # ranks that joined early have made fewer calls
            return [form["last"]]
        if kind == "barrier":  # that all are here is the decision
            return [None]
        assert call is not None
        return [self._run_one(of, bundle[0], call)]

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

    def _reduce(self, group: Any, forms: Sequence[Form], tensors: Sequence[Sequence[torch.Tensor] | None]) -> None:
        form = forms[0]
        if form["op"] != "Adasum":
            parts = [(forms, tensors)] if len(set(form["dtypes"])) == 1 else _by_dtype(form, tensors[0])
            for some, own in parts:
                reduce_together(group, some, own)
            return
        for number, shape in enumerate(form["shapes"]):
            own = tensors[0][number] if tensors[0] is not None else torch.zeros(shape)
            own.copy_(adasum(group, own, form["pre"]) * form["post"])

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
        """Let the program's object be a process set that was made, and return it."""
        assert made.process_set_id is not None
        process_set.register(made.process_set_id, self.rank, made.group)
        self.sets[made.process_set_id] = process_set
        return process_set

    def _remove(self, number: int) -> bool:
        removed = self.sets.pop(number, None)
        group = removed.forget() if removed is not None else None
        if group is not None:
            group.shutdown()
        return removed is not None


def _by_dtype(form: Form, tensors: Sequence[torch.Tensor] | None) -> list[Any]:
    """Return a grouped reduction as one for each dtype."""
    found = []
    for dtype in dict.fromkeys(form["dtypes"]):
        numbers = [number for number, each in enumerate(form["dtypes"]) if each == dtype]
        part = {**form, "dtypes": [dtype] * len(numbers), "shapes": [form["shapes"][number] for number in numbers]}
        found.append(([part], [None if tensors is None else [tensors[number] for number in numbers]]))
    return found


def _different(texts: dict[int, str]) -> CollectiveMismatchError:
    return CollectiveMismatchError(f"hvd.init: the ranks have different settings: {by_rank(texts)}")
