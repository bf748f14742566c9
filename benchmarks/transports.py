"""The transports between workers and parameter servers: reads beside a busy writer, pushes, idle cost, a million increments.

    mpiexec -n 2 python benchmarks/transports.py --output benchmarks/results/today

The last rank is the server. A read counts if it is whole and no older than the one before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np

from mpistrat.cluster.topology import Topology
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.parameter_server.connections import ParameterServers
from mpistrat.parameter_server.layout import VariableSpec
from mpistrat.parameter_server.operations import Push
from mpistrat.parameter_server.server.server import Server
from mpistrat.parameter_server.wire.choice import TRANSPORTS
from mpistrat.parameter_server.wire.transport import Port, Transport

READS = {"4 KB": 1 << 10, "32 MB": 1 << 23}
PUSHES = {"4 KB": 1 << 10, "1 MB": 1 << 18, "67 MB": 1 << 24}

Figures = dict[str, float]  # with their units for names


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


def reads(link: Transport, count: int, seconds: float) -> Figures:
    """Read variable 0 for some seconds beside a `Writer`; return the rate."""
    out, last, accepted = np.zeros(count, np.float32), 0, 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        version = link.read(0, out)
        if version < last or not (out == out[0]).all():
            raise RuntimeError(f"version {version} after {last}, {out.min()} to {out.max()}")
        last, accepted = version, accepted + 1
    return {"whole reads/s": accepted / (time.perf_counter() - start)}


def pushes(link: Transport, count: int, seconds: float) -> Figures:
    """Push for some seconds; then push now and then, and time each until it is applied; return rate and times."""
    array = np.ones(count, np.float32)
    start, times = time.perf_counter(), []
    while time.perf_counter() - start < seconds:
        link.push(0, array)
    link.flush()
    rate = link.pushed / (time.perf_counter() - start)
    for _ in range(100 if count < 1 << 20 else 5):
        time.sleep(0.013)
        before = time.perf_counter()
        link.push(0, array)
        link.flush()
        times.append(1e3 * (time.perf_counter() - before))
    times.sort()
    applied = {
        "ms to applied": statistics.median(times),
        "ms (p99)": times[int(0.99 * len(times))],
    }  # by an idle server
    return {"pushes/s": rate, "GB/s": rate * array.nbytes / 1e9, **applied}


def idle(link: Transport, seconds: float) -> Figures:
    """Let the server wait."""
    time.sleep(seconds)
    return {}


def session(
    group: ProcessGroup, transport: str, count: int, work: Callable[[Transport], Figures], writer: bool = False
) -> list[Figures]:
    """Let every worker work with one server that adds; return the figures of each worker, and of the server at the end."""
    last = group.topology.size - 1
    servers = ParameterServers(group, range(last), [last], transport=transport)
    servers.add_variables([VariableSpec("v", (count,), np.dtype(np.float32))])
    if servers.server is None:
        figures = work(servers.transports[0])
        servers.transports[0].leave()
    else:
        figures = serve(servers.server, writer)
    with group.collective("session"):
        texts = group.all_gather_text(json.dumps(figures))
    servers.close()
    return [json.loads(text) for text in texts]


def serve(server: Server, writer: bool) -> Figures:
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
    sum_ = float(server.array(0)[0])
    return {"% of a core": 100 * busy / seconds, "writes": server.version(0), "s": seconds, "in the variable": sum_}


def increments(total: int, workers: int) -> Callable[[Transport], Figures]:
    """Return the work of adding 1 so often, together."""

    def work(link: Transport) -> Figures:
        one = np.ones(1, np.float32)
        for _ in range(total // workers + (link.pair.worker < total % workers)):
            link.push(0, one)
        return {}

    return work


def style(value: float) -> str:
    """Return the format of a figure."""
    return ",.0f" if value >= 100 or value == int(value) else ".3g"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the JSON file; nothing is written without it")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    parser.add_argument("--increments", type=int, default=1_000_000, help="pushes of 1, of all workers (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    topology = Topology.create()
    group = ProcessGroup.create(topology)
    cases: list[dict[str, Any]] = []

    def measure(
        name: str, what: str, count: int, work: Callable[[Transport], Figures], writer: bool = False
    ) -> Figures:
        *workers, server = session(group, name, count, work, writer)
        cases.append({"transport": name, "case": what, "workers": workers, "server": server})
        if topology.rank == 0:
            texts = [", ".join(f"{value:{style(value)}} {u}" for u, value in of.items()) for of in (*workers, server)]
            print(f"{name:13} {what:16} " + "; ".join(filter(None, texts)), flush=True)
        return server

    for name in options.transport or TRANSPORTS:
        for size, n in READS.items():
            measure(name, f"read {size}", n, lambda link, n=n: reads(link, n, options.seconds), writer=True)
        for size, n in PUSHES.items():
            measure(name, f"push {size}", n, lambda link, n=n: pushes(link, n, options.seconds))
        measure(name, "idle", 1, lambda link: idle(link, options.seconds))
        total = options.increments  # float32 counts exactly up to 2^24
        found = measure(name, "increments", 1, increments(total, topology.size - 1))["in the variable"]
        if found != total:
            raise RuntimeError(f"{found:.0f} after {total} increments")
    result = {"benchmark": "transports", "machine": harness.machine(topology.comm), "cases": cases}
    if topology.rank == 0:
        harness.save(options.output, result)
    group.close()
    topology.close()


if __name__ == "__main__":
    main()
