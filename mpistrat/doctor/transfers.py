"""Transfers between ranks: an all-reduce and windows, tried and timed, and the nodes' clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np

from ..base.agree import gather_text
from ..base.distributed_values import PerReplica
from ..base.errors import DeviceError, by_rank
from ..cluster.topology import Topology
from ..comm.arrays import all_reduce_gpu, import_cupy, to_host
from ..comm.gpu import nccl_available, own_gpus
from ..comm.gpu_support import gpu_aware
from ..comm.process_group import ProcessGroup
from ..comm.window import RemoteWindow, SharedWindow, Window
from ..cross_device.auto import make_cross_device_ops
from ..cross_device.nccl import NcclAllReduce
from ..parameter_server.wire.choice import known_to_finish
from .finding import Finding, ok, problem, warning

__all__ = ["check_all_reduce", "check_clocks", "check_gpu_aware", "check_nccl", "check_windows"]

_COUNT = 1 << 20  # float32 numbers of an all-reduce
_ROUNDS = 5
_SLOW = 1.0  # seconds: a network cable would do better
_NBYTES = 1 << 20
_WHAT = "the doctor's trial"


def check_all_reduce(group: ProcessGroup) -> Finding:
    """Check a sum over all ranks, and report times of this package and MPI. Collective."""
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


def check_nccl(group: ProcessGroup) -> Finding:
    """Check a sum by NCCL over the GPUs that the ranks take, and report its time. Collective."""
    name, topology = "NCCL", group.topology
    if topology.num_replicas == 1:
        return ok(name, "one GPU: nothing to sum")
    missing = {rank: why for rank, why in enumerate(gather_text(topology.comm, nccl_available())) if why}
    if missing:
        what = f"not usable: {by_rank(missing)}"
        return warning(name, what, "Sums of arrays on GPUs go through host memory, which is slower")
    ops, arrays = NcclAllReduce(), _arrays_on_gpus(group)
    ops.bind(group)
    value = arrays[0] if len(arrays) == 1 else PerReplica(arrays)
    results: list[Any] = []
    try:
        took = _quickest(topology.comm, lambda: results.append(ops.reduce("SUM", value)))
    except DeviceError as error:  # on every rank: ranks share a GPU
        remedy = "Start one rank for each GPU; until then sums go through host memory, which is slower"
        return warning(name, str(error), remedy)
    finally:
        ops.close()
    total = topology.num_replicas * (topology.num_replicas + 1) / 2
    found = [to_host(member) for member in getattr(results[-1], "values", (results[-1],))]
    wrong = _where(topology.comm, all(bool((array == total).all()) for array in found))
    said = f"{found[0].nbytes >> 20} MiB over {topology.num_replicas} GPUs: {_rate(took, found[0])}"
    if wrong:
        what = f"the sum is wrong on ranks {', '.join(map(str, wrong[:8]))}; {said}"
        return problem(name, what, "Do not train with this NCCL: export NCCL_DEBUG=INFO, and report what it prints")
    return ok(name, said)


def check_gpu_aware(group: ProcessGroup) -> Finding | None:
    """Check a sum of GPU memory by MPI, if MPI reports support for it. Collective."""
    from mpi4py import MPI

    name, topology = "CUDA-aware MPI", group.topology
    if topology.comm.allreduce(int(gpu_aware()), MPI.MIN) == 0 or topology.size == 1:
        return None
    array = _arrays_on_gpus(group)[0]
    rank_sum = sum(1 + offset for offset in topology.comm.allgather(topology.replica_offset))
    start = perf_counter()
    all_reduce_gpu(topology.comm, array)
    took, host = perf_counter() - start, to_host(array)
    wrong = _where(topology.comm, bool((host == rank_sum).all()))
    said = f"{host.nbytes >> 20} MiB over {topology.size} ranks: {_rate(took, host)}"
    if wrong:
        what = f"MPI reports support for GPU memory, and its sum is wrong on ranks {', '.join(map(str, wrong[:8]))}; {said}"
        return problem(name, what, "Choose NCCL or HIERARCHICAL, and report it to the site, with this text")
    return ok(name, said)


def _arrays_on_gpus(group: ProcessGroup) -> list[Any]:
    """Return an array on the GPU of each local replica, filled with the number of the replica from 1."""
    cupy, arrays = import_cupy("doctor"), []
    for index, gpu in enumerate(own_gpus(group)):
        with cupy.cuda.Device(gpu):
            arrays.append(cupy.full(_COUNT, group.topology.replica_offset + index + 1, np.float32))
    return arrays


def check_windows(group: ProcessGroup) -> Iterator[Finding]:
    """Check memory that other ranks access, within nodes and between them. Collective."""
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
    """Return the seconds of the fastest of some rounds, on the slowest rank. Collective."""
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
    """Return the ranks on which a result is wrong. Collective."""
    table = np.empty(comm.size, np.int32)
    comm.Allgather(np.array([right], np.int32), table)
    return np.flatnonzero(table == 0).tolist()


def _rate(seconds: float, array: np.ndarray) -> str:
    return f"{seconds * 1e3:.1f} ms ({array.nbytes / seconds / 1e9:.2f} GB/s)"


_JOURNEYS = 20
_CLOCKS_APART = 1.0  # seconds; beyond it, programs with dates of files or leases misbehave


def check_clocks(topology: Topology) -> Finding:
    """Compare the ranks' clocks with rank 0's. Collective.

    The fastest of several round trips counts: the clock was read in the middle, with an error of up to half of its duration.
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
