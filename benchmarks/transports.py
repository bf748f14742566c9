"""The transports between workers and parameter servers: reads beside a busy writer, pushes, idle cost, a million increments.

mpiexec -n 2 python benchmarks/transports.py                       # rates; the last rank is the server
mpiexec -n 4 python benchmarks/transports.py --increments 1000000  # exactness, nothing else
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from mpistrat.cluster.topology import Topology
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.parameter_server.choice import TRANSPORTS
from mpistrat.parameter_server.layout import VariableSpec
from mpistrat.parameter_server.parameter_servers import ParameterServers
from mpistrat.parameter_server.push import Push
from mpistrat.parameter_server.server import Server
from mpistrat.parameter_server.transport import Port, Transport

READS = {"4 KB": 1 << 10, "32 MB": 1 << 23}
PUSHES = {"4 KB": 1 << 10, "1 MB": 1 << 18, "67 MB": 1 << 24}


class Writer(Port):
    """Writes variable 0 full of the number of the write, as fast as it can."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def poll(self) -> bool:
        with self._server.writing(0) as value:
            value[:] = self._server.version(0) + 1
        return not self._server.left(0)

    def acknowledge(self, worker: int, number: int) -> None:
        """It has no workers."""

    def busy(self) -> bool:
        return False


def reads(link: Transport, count: int, seconds: float) -> str:
    """Read variable 0 for some seconds beside a `Writer`; return the rate."""
    out, last, accepted = np.zeros(count, np.float32), 0, 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        version = link.read(0, out)
        if version < last or not (out == out[0]).all():
            raise RuntimeError(f"version {version} after {last}, {out.min()} to {out.max()}")
        last, accepted = version, accepted + 1
    return f"{accepted / (time.perf_counter() - start):,.0f} whole reads/s"


def pushes(link: Transport, count: int, seconds: float) -> str:
    """Push for some seconds; then push now and then, and time each until it is applied; return rate and times."""
    array = np.ones(count, np.float32)
    start, times = time.perf_counter(), []
    while time.perf_counter() - start < seconds:
        link.push(0, link.pushed + 1, array)
    link.flush()
    rate = link.pushed / (time.perf_counter() - start)
    for _ in range(100 if count < 1 << 20 else 5):
        time.sleep(0.013)
        before = time.perf_counter()
        link.push(0, link.pushed + 1, array)
        link.flush()
        times.append(1e3 * (time.perf_counter() - before))
    times.sort()
    gigabytes = rate * array.nbytes / 1e9
    return (
        f"{rate:,.0f} pushes/s, {gigabytes:.2f} GB/s; push to applied, idle server: median {statistics.median(times):.2f} ms, "
        f"p99 {times[int(0.99 * len(times))]:.2f} ms"
    )


def idle(link: Transport, count: int, seconds: float) -> str:
    """Let the server wait."""
    time.sleep(seconds)
    return ""


def session(
    group: ProcessGroup, transport: str, count: int, work: Callable[[Transport], str], writer: bool = False
) -> list[str]:
    """Let every worker work with one server that adds; return what each worker has to say, and the server at the end."""
    last = group.topology.size - 1
    servers = ParameterServers(group, range(last), [last], transport=transport)
    servers.add_variables([VariableSpec("v", (count,), np.dtype(np.float32))])
    if servers.server is None:
        text = work(servers.transports[0])
        servers.transports[0].leave()
    else:
        text = serve(servers.server, writer)
    with group.collective("session"):
        texts = group.all_gather_text(text)
    servers.close()
    return texts


def serve(server: Server, writer: bool) -> str:
    """Serve; return what it cost and came to."""

    def add(push: Push) -> None:
        with server.writing(push.variable) as value:
            value += push.values

    if writer:
        server.add_port(Writer(server), ())
    start, used = time.perf_counter(), time.process_time()
    server.start(add)
    server.wait()
    seconds, busy = time.perf_counter() - start, time.process_time() - used
    return f"{100 * busy / seconds:.1f} % of a core, {server.version(0)} writes in {seconds:.1f} s, {server.array(0)[0]:.0f}"


def increments(total: int, workers: int) -> Callable[[Transport], str]:
    """Return the work of adding 1 so often, together."""

    def work(link: Transport) -> str:
        one = np.ones(1, np.float32)
        for number in range(1, total // workers + (link.pair.worker < total % workers) + 1):
            link.push(0, number, one)
        return ""

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    parser.add_argument("--increments", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    topology = Topology.create()
    group = ProcessGroup.create(topology)
    workers = topology.size - 1

    def tell(transport: str, what: str, texts: list[str]) -> None:
        if topology.rank == 0:
            print(f"{transport:13} {what:14} " + "; ".join(filter(None, texts)), flush=True)

    for name in options.transport or TRANSPORTS:
        if options.increments:  # float32 counts exactly up to 2^24
            tell(
                name, f"{options.increments:,} times", session(group, name, 1, increments(options.increments, workers))
            )
            continue
        for size, n in READS.items():
            texts = session(group, name, n, lambda link, n=n: reads(link, n, options.seconds), writer=True)
            tell(name, f"read {size}", texts)
        for size, n in PUSHES.items():
            tell(name, f"push {size}", session(group, name, n, lambda link, n=n: pushes(link, n, options.seconds)))
        tell(name, "idle", session(group, name, 1, lambda link: idle(link, 1, options.seconds)))
    group.close()
    topology.close()


if __name__ == "__main__":
    main()
