"""What goes between ranks: an all-reduce and windows, tried and timed, and the nodes' clocks, compared by messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np

from ..cluster.topology import Topology
from ..comm.process_group import ProcessGroup
from ..comm.window import RemoteWindow, SharedWindow, Window
from ..cross_device.auto import make_cross_device_ops
from ..parameter_server.wire.choice import known_to_finish
from .finding import Finding, ok, problem, warning

__all__ = ["check_all_reduce", "check_clocks", "check_windows"]

_COUNT = 1 << 20  # float32 numbers of an all-reduce
_ROUNDS = 5
_SLOW = 1.0  # seconds: a network cable would do better
_NBYTES = 1 << 20
_WHAT = "the doctor's trial"


def check_all_reduce(group: ProcessGroup) -> Finding:
    """Return what a sum over all ranks gives and takes, ours and MPI's own. Collective."""
    from mpi4py import MPI

    name, topology = "all-reduce", group.topology
    if topology.size == 1:
        return ok(name, "one rank: nothing to sum")
    ours = make_cross_device_ops()
    ours.bind(group)
    mine = np.full(_COUNT, topology.rank + 1, np.float32)
    total = topology.size * (topology.size + 1) / 2
    out = np.empty_like(mine)
    results: list[np.ndarray] = []
    took = _quickest(topology.comm, lambda: results.append(ours.reduce("SUM", mine)))
    raw = _quickest(topology.comm, lambda: topology.comm.Allreduce(mine, out, MPI.SUM))
    right = all((np.asarray(result) == total).all() for result in results) and bool((out == total).all())
    ours.close()
    wrong = _where(topology.comm, right)
    said = f"{mine.nbytes >> 20} MiB over {topology.size} ranks: {_rate(took, mine)}, MPI's own {_rate(raw, mine)}"
    if wrong:
        what = f"the sum is wrong on ranks {', '.join(map(str, wrong[:8]))}; {said}"
        return problem(name, what, "Do not train with this MPI: report it to the site, with this text")
    if took > _SLOW:
        remedy = "See which network MPI uses: UCX_LOG_LEVEL=info, FI_LOG_LEVEL=info, OMPI_MCA_pml_base_verbose=10"
        return warning(name, said, remedy)
    return ok(name, said)


def check_windows(group: ProcessGroup) -> Iterator[Finding]:
    """Yield what the memory that ranks reach gives, within nodes and between them. Collective."""
    topology = group.topology
    if group.environment.shared_memory and topology.intra is not None:
        sizes = [_NBYTES] * topology.intra.size
        yield _try_window(
            "shared memory", SharedWindow(topology.intra, topology.comm, sizes, _WHAT), topology.intra, topology.comm
        )
    if topology.num_nodes > 1 and not group.agree(known_to_finish()):  # the ranks' settings may differ
        what = "not tried between nodes: with this MPI and network they are not known to finish. Parameter servers use messages"
        yield ok("one-sided calls", what)
        return
    window = RemoteWindow.allocate(topology.comm, _NBYTES, _WHAT)
    yield _try_window("one-sided calls", window, topology.comm, topology.comm)


def _try_window(name: str, window: Window, comm: Any, world: Any) -> Finding:
    """Put to the next rank, read it back, and count together with all. Collective."""
    size, rank = comm.size, comm.rank
    neighbour = (rank + 1) % size
    sent = np.full(_NBYTES - 64, rank % 251 + 1, np.uint8)
    found = np.zeros_like(sent)

    def there_and_back() -> None:
        window.put(neighbour, [(64, sent)])
        window.get(neighbour, 64, found)

    took = _quickest(world, there_and_back)
    window.fetch_and_add(0, 0, rank + 1)
    world.Barrier()
    total = window.get_word(0, 0)
    right = bool((found == sent).all()) and total == size * (size + 1) // 2
    world.Barrier()
    window.close()
    wrong = _where(world, right)
    said = f"1 MiB to the next rank and back: {took * 1e3:.1f} ms; a counter of all ranks is right"
    if wrong:
        what = f"what was put is not what was read, or a counter is wrong, on ranks {', '.join(map(str, wrong[:8]))}"
        return problem(name, what, "Do not use ParameterServerStrategy with this MPI: report it to the site")
    return ok(name, said)


def _quickest(comm: Any, action: Callable[[], object]) -> float:
    """Return the seconds of the quickest of some rounds, on the slowest rank. Collective."""
    from mpi4py import MPI

    times = np.zeros(_ROUNDS)
    for i in range(_ROUNDS):
        comm.Barrier()
        start = perf_counter()
        action()
        times[i] = perf_counter() - start
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return float(times.min())


def _where(comm: Any, right: bool) -> list[int]:
    """Return the ranks on which something is not right. Collective."""
    table = np.empty(comm.size, np.int32)
    comm.Allgather(np.array([right], np.int32), table)
    return np.flatnonzero(table == 0).tolist()


def _rate(seconds: float, array: np.ndarray) -> str:
    return f"{seconds * 1e3:.1f} ms ({array.nbytes / seconds / 1e9:.2f} GB/s)"


_JOURNEYS = 20
_CLOCKS_APART = 1.0  # seconds; programs that date files or leases misbehave beyond


def check_clocks(topology: Topology) -> Finding:
    """Return how far the ranks' clocks are from rank 0's. Collective.

    Of several messages to a rank and back the quickest counts: its clock was read in the middle of the journey, give or
    take half of it.
    """
    comm = topology.comm
    offsets = np.zeros(comm.size)
    doubts = np.zeros(comm.size)
    for rank in range(1, comm.size):
        if comm.rank == 0:
            offsets[rank], doubts[rank] = _ask(comm, rank)
        elif comm.rank == rank:
            _answer(comm)
    comm.Bcast(offsets)
    comm.Bcast(doubts)
    worst = int(np.argmax(np.abs(offsets)))
    if abs(offsets[worst]) - doubts[worst] > _CLOCKS_APART:
        what = f"the clock of rank {worst} is {offsets[worst]:+.1f} s from that of rank 0"
        return warning("clocks", what, "Ask the site to run NTP on that node: dates of files and lines of logs mislead")
    apart = float(np.max(np.abs(offsets) + doubts))
    return ok("clocks", f"within {max(apart * 1e3, 0.1):.1f} ms of that of rank 0")


def _ask(comm: Any, rank: int) -> tuple[float, float]:
    word = np.zeros(1)
    best = (0.0, np.inf)
    for _ in range(_JOURNEYS):
        start = time.time()
        comm.Send(word, rank)
        comm.Recv(word, rank)
        end = time.time()
        if (end - start) / 2 < best[1]:
            best = float(word[0]) - (start + end) / 2, (end - start) / 2
    return best


def _answer(comm: Any) -> None:
    word = np.zeros(1)
    for _ in range(_JOURNEYS):
        comm.Recv(word, 0)
        word[0] = time.time()
        comm.Send(word, 0)
