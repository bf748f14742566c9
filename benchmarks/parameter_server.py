"""Parameter servers: steps of all workers together, against TensorFlow's ParameterServerStrategy and torch's RPC.

    mpiexec -n 4 python benchmarks/parameter_server.py --tensorflow --torch --output benchmarks/results/today

A step reads all variables (or 1,000 rows of a table) and pushes a gradient that lies there already; plain SGD on the server.
Four ranks on one host are up to 3 workers and 1 server, or 2 and 2; on two hosts the workers are on another host than the
servers. Contenders take turns, warm up each time, and a figure is the median of the rounds. Afterwards the variables must be
what the steps make of zeros. Also measured: reading and pushing alone beside plain messages of MPI's, and a server that waits.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
from parameter_server_model import Layout, Model, layouts
from parameter_server_peers import LOOP, Case, PeerError, Process, repeat

import mpistrat as ms
from mpistrat.base.text import counted

OURS, TENSORFLOW, TORCH = "mpistrat", "TensorFlow", "torch RPC"
LOOPED = f"TensorFlow, {LOOP} steps a call"
TINY, SMALL, MEDIUM, LARGE = (
    Case(label, (count,))
    for label, count in (("4 KB", 1 << 10), ("1 MB", 1 << 18), ("16.8 MB", 1 << 22), ("67 MB", 1 << 24))
)
DENSE = (TINY, SMALL, MEDIUM, LARGE)
SPARSE = Case("1,000 rows of 10 M × 16", (10_000_000, 16), 1000)
CELLS = {(1, 2): (*DENSE, SPARSE), (1, 1): (TINY, LARGE), (1, 3): (TINY, LARGE), (2, 2): (TINY, LARGE)}
START = 120.0  # seconds for a peer to start


class Contender(ABC):
    """Who is measured on one layout. Collective over the world, all of it.

    Attributes:
        name: in the results.
    """

    name: str

    @abstractmethod
    def prepare(self, case: Case) -> None:
        """Make the variables of a case."""

    @abstractmethod
    def rate(self, seconds: float) -> float:
        """Return this rank's steps a second after a warm-up; 0 where it makes none."""

    @abstractmethod
    def exact(self) -> bool:
        """Return whether the variables were what all steps since `prepare` make of zeros."""


class Ours(Contender):
    """This package, as a user writes it; a new strategy in each round, so that it lies in other memory."""

    name = OURS

    def __init__(self, layout: Layout, transport: str) -> None:
        self._layout, self._transport = layout, transport

    def prepare(self, case: Case) -> None:
        self._case, self._right = case, True

    def rate(self, seconds: float) -> float:
        layout, sgd = self._layout, ms.optimizers.SGD(1.0)
        if layout.comm is None:
            return 0.0
        with Model(layout, self._case, self._transport, sgd) as model:
            if layout.together is None:
                model.strategy.serve()
                return 0.0
            before, _ = repeat(model.step, seconds / 8, model.flush)
            layout.together.meet()
            steps, spent = repeat(model.step, seconds, model.flush)
            total = int(layout.together.gather(before + steps).sum())
            if layout.worker == 0:
                self._right &= self._case.exact([v.array for v in model.variables], total)
            layout.together.meet()
        return steps / spent

    def exact(self) -> bool:
        return self._right


class Cluster:
    """The processes of a peer that this rank starts: that of its role, and on worker 0 TensorFlow's coordinator. Collective.

    torch's take 11 % of a core each while they wait, so they are stopped then. TensorFlow's take less than 1 %.

    Attributes:
        leader: the one that takes this rank's commands, if any.
        steps: that it has made with the variables that there are.
    """

    def __init__(self, peer: str, layout: Layout, comm: Any) -> None:
        first, second = harness.addresses(comm), harness.addresses(comm)
        cluster = {"worker": [first[rank] for rank in layout.workers], "ps": [first[rank] for rank in layout.servers]}
        if peer == "tensorflow":
            cluster["chief"] = [second[layout.workers[0]]]
        self._processes: list[Process] = []
        if layout.worker is not None:
            self._processes.append(Process(peer, "worker", layout.worker, cluster))
        elif layout.comm is not None:
            self._processes.append(Process(peer, "ps", layout.comm.rank - len(layout.workers), cluster))
        if peer == "tensorflow" and layout.worker == 0:
            self._processes.append(Process(peer, "chief", 0, cluster))
        self.steps, self._stops = 0, peer == "torch"
        leads = layout.worker is not None and (peer == "torch" or layout.worker == 0)
        self.leader = self._processes[-1] if leads else None

    def wait(self) -> None:
        """Wait until they are ready.

        Raises:
            PeerError: one has failed.
        """
        for process in self._processes:
            process.reply("start", START)

    def pause(self) -> None:
        """Stop the processes that can be stopped, so that they take no time."""
        for process in self._processes if self._stops else ():
            process.pause()

    def resume(self) -> None:
        """Let them go on."""
        for process in self._processes if self._stops else ():
            process.resume()

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.close()


class Peer(Contender):
    """A peer, in processes of its own, some of which take commands."""

    def __init__(self, name: str, layout: Layout, cluster: Cluster, in_a_call: int = 1) -> None:
        self.name, self._layout, self._cluster, self._in_a_call = name, layout, cluster, in_a_call

    def prepare(self, case: Case) -> None:
        self._cluster.steps = 0
        self._ask("make", case=case.description(), servers=len(self._layout.servers))

    def rate(self, seconds: float) -> float:
        reply = self._ask("steps", seconds=seconds, in_a_call=self._in_a_call)
        before, steps, spent = (0, 0, 1.0) if reply is None else reply
        self._cluster.steps += before + steps
        return steps / spent

    def exact(self) -> bool:
        total = int(self._layout.world.gather(self._cluster.steps).sum())
        return bool(self._ask("exact", self._layout.worker == 0, steps=total) in (True, None))

    def _ask(self, do: str, here: bool = True, **arguments: Any) -> Any:
        """Give this rank's leader a command, if one that runs commands is `here`, while all processes run."""
        cluster, world = self._cluster, self._layout.world
        cluster.resume()
        world.meet()
        try:
            return None if cluster.leader is None or not here else cluster.leader.ask(do, **arguments)
        finally:
            world.meet()
            cluster.pause()


class Round:
    """All contenders of a layout; one that fails is named and left out. Collective over the world.

    Args:
        layout: the layout.
        comm: all ranks.
        options: of the command line.
    """

    def __init__(self, layout: Layout, comm: Any, options: Any) -> None:
        self._layout, self._options = layout, options
        self._contenders: list[Contender] = [Ours(layout, options.transport)]
        self._clusters: list[Cluster] = []
        for peer, name in (("tensorflow", TENSORFLOW), ("torch", TORCH)):
            if not getattr(options, peer):
                continue
            cluster = Cluster(peer, layout, comm)
            self._clusters.append(cluster)
            started = self._try(name, cluster.wait)
            cluster.pause()
            if started is not None:
                self._contenders.append(Peer(name, layout, cluster))
                if peer == "tensorflow":
                    self._contenders.append(Peer(LOOPED, layout, cluster, LOOP))

    def _try(self, name: str, action: Callable[[], Any]) -> np.ndarray | None:
        """Do something everywhere; return every rank's number, or None if it failed on any."""
        value, failed = 0.0, False
        try:
            value = float(action() or 0.0)
        except PeerError as error:
            print(f"{name} left out of {self._layout}: {error}", flush=True)
            failed = True
        found = self._layout.world.gather(value, failed)
        return None if found[:, 1].any() else found[:, 0]

    def measure(self, case: Case) -> dict[str, Any]:
        """Return the results of one case."""
        rates: dict[str, list[float]] = {}
        ready = [
            contender
            for contender in self._contenders
            if (contender.name != LOOPED or case is TINY)
            and self._try(contender.name, lambda c=contender: c.prepare(case)) is not None
        ]
        for _ in range(self._options.rounds):
            for contender in ready:
                found = self._try(contender.name, lambda c=contender: c.rate(self._options.seconds))
                if found is not None:
                    rates.setdefault(contender.name, []).append(float(found.sum()))
        exact = {}
        for contender in ready:
            found = self._try(contender.name, contender.exact)
            exact[contender.name] = found is not None and bool(found.all())
        return {
            "case": case.label,
            "bytes": case.nbytes,
            "servers": len(self._layout.servers),
            "workers": len(self._layout.workers),
            "steps_per_second": {name: statistics.median(found) for name, found in rates.items()},
            "exact": exact,
        }

    def close(self) -> None:
        """End the peers."""
        for cluster in self._clusters:
            cluster.close()


PULL, PUSH, TO_WORKER, TO_SERVER = "pull", "push", "Send/Recv to worker", "Send/Recv to server"


def transfers(layout: Layout, case: Case, options: Any) -> dict[str, float]:
    """Return bytes a second of reading and of pushing alone, and of plain messages both ways; 0 on all but the worker."""
    found: dict[str, list[float]] = {name: [0.0] for name in (PULL, TO_WORKER, PUSH, TO_SERVER)}
    seconds = options.seconds / 2
    for _ in range(options.rounds):
        sgd = ms.optimizers.SGD(1.0)
        if layout.comm is None:
            continue
        with Model(layout, case, options.transport, sgd) as model:
            if layout.worker is None:
                model.strategy.serve()
            else:
                for name, step, end in ((PULL, model.pull, lambda: None), (PUSH, model.push, model.flush)):
                    repeat(step, seconds / 8, end)
                    steps, spent = repeat(step, seconds, end)
                    found[name].append(steps * case.nbytes / spent)
        for name, source in ((TO_WORKER, 1), (TO_SERVER, 0)):
            rate = messages(layout.comm, source, np.ones(case.shape, np.float32), seconds)
            found[name].append(rate if layout.worker == 0 else 0.0)
    return {name: statistics.median(values[1:] or values) for name, values in found.items()}


def messages(comm: Any, source: int, array: np.ndarray, seconds: float) -> float:
    """Return bytes a second of messages one after the other from one of two ranks to the other. Collective."""
    count, end = np.full(1, 2, np.int64), np.empty(0, np.uint8)

    def some() -> float:
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(int(count[0])):
            comm.Send(array, 1 - source) if comm.rank == source else comm.Recv(array, source)
        comm.Recv(end, 1 - source) if comm.rank == source else comm.Send(end, source)
        return time.perf_counter() - start

    some()
    count[0] = max(2, seconds * count[0] / some())
    comm.Bcast(count)
    return array.nbytes * int(count[0]) / some()


def waiting(layout: Layout, options: Any) -> np.ndarray:
    """Return a waiting server's share of a core, and seconds from a push to its being seen: median and 99th percentile."""
    result, sgds = np.zeros(3), [ms.optimizers.SGD(1.0) for _ in range(2)]
    if layout.comm is None:
        return result
    with Model(layout, TINY, options.transport, sgds[0]) as model:
        if layout.worker is None:
            start, used = time.perf_counter(), time.process_time()
            model.strategy.serve()
            result[0] = (time.process_time() - used) / (time.perf_counter() - start)
        else:
            time.sleep(4 * options.seconds)
    with Model(layout, TINY, options.transport, sgds[1]) as model:
        if layout.worker is None:
            model.strategy.serve()
            return result
        times, rng = [], np.random.default_rng(0)
        for _ in range(int(200 * options.seconds)):
            time.sleep(rng.uniform(2e-3, 2e-2))
            before = time.perf_counter()
            model.push()
            model.flush()
            times.append(time.perf_counter() - before)
        result[1:] = np.percentile(times, [50, 99])
    return result


def report(result: dict[str, Any]) -> str:
    """Return the tables."""
    about, names = result["machine"], list(dict.fromkeys(n for c in result["cells"] for n in c["steps_per_second"]))
    rows = []
    for cell in result["cells"]:
        rates = cell["steps_per_second"]
        words = [f"{rates[n]:,.1f} ({rates[OURS] / rates[n]:.1f} ×)" if n in rates else "" for n in names]
        wrong = ", ".join(name for name, right in cell["exact"].items() if not right)
        rows.append([f"{cell['servers']} ps, {cell['workers']} w", cell["case"], *words, wrong])
    where = f"{counted(about['nodes'], 'node')}, {about['mpi']}"
    title = f"steps/s of all workers, {where}; (×) ours / this"
    tables = [harness.table(title, ["layout", "a step reads and pushes", *names, "sum wrong"], rows)]
    rows = []
    for label, rates in result["bytes_per_second"].items():
        gigabytes = [f"{rates[n] / 1e9:.3g}" for n in rates]
        ratios = [f"{100 * rates[a] / rates[b]:.0f} %" for a, b in ((PULL, TO_WORKER), (PUSH, TO_SERVER))]
        rows.append([label, *gigabytes, *ratios])
    header = ["size", *next(iter(result["bytes_per_second"].values()), {}), "pull / Recv", "push / Send"]
    tables.append(harness.table(f"GB/s, one worker, {where}", header, rows))
    if waits := result["waiting"]:
        tables.append(
            f"A waiting server takes {100 * waits['share_of_a_core']:.1f} % of a core; from a push to its being seen: median "
            f"{harness.duration(waits['median_seconds'])}, 99th percentile {harness.duration(waits['p99_seconds'])}."
        )
    return "\n\n".join(tables)


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, rounds=3, seconds=0.5, transport="", only="", tensorflow=False, torch=False)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    result: dict[str, Any] = {"benchmark": "parameter_server", "machine": harness.machine(comm)}
    result |= {"transport": options.transport or "chosen", "cells": [], "bytes_per_second": {}, "waiting": {}}
    for layout in layouts(comm, CELLS):
        cases = CELLS[len(layout.servers), len(layout.workers)]
        chosen = [case for case in cases if options.only in f"{layout}, {case.label}"]
        if chosen:
            contenders = Round(layout, comm, options)
            result["cells"] += [contenders.measure(case) for case in chosen]
            contenders.close()
        if len(layout.workers) == len(layout.servers) == 1 and options.only in "transfers":
            for case in DENSE:
                mine = transfers(layout, case, options)
                found = layout.world.gather(*mine.values()).max(axis=0)
                result["bytes_per_second"][case.label] = dict(zip(mine, found.tolist(), strict=True))
            names = "share_of_a_core", "median_seconds", "p99_seconds"
            found = layout.world.gather(*waiting(layout, options)).max(axis=0)
            result["waiting"] = dict(zip(names, found.tolist(), strict=True))
    if comm.rank == 0:
        print(report(result), flush=True)
        harness.save(options.output, result)


if __name__ == "__main__":
    main()
