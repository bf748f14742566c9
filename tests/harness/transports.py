"""Parameter servers and workers on all ranks, for tests, and the checks that every transport passes."""

from __future__ import annotations

import contextlib
import time
from unittest import mock

import numpy as np

TRANSPORTS = ("shared_window", "one_sided", "messages")


@contextlib.contextmanager
def parameter_servers(transport, specs=(), servers=1, abort_after=30.0, slots=4, chunk_bytes=1 << 20):
    """Servers on the last ranks, workers on the others, with variables: (shape, dtype) on server 0, or whole specs."""
    from mpistrat.base.environment import Environment
    from mpistrat.cluster.topology import Topology
    from mpistrat.comm.process_group import ProcessGroup
    from mpistrat.parameter_server import connections
    from mpistrat.parameter_server.layout import VariableSpec

    topology = Topology.create()
    group = ProcessGroup.create(topology, Environment(abort_after=abort_after))
    first = topology.size - servers
    with mock.patch.multiple(connections, SLOTS=slots, CHUNK_BYTES=chunk_bytes):
        ps = connections.ParameterServers(group, range(first), range(first, topology.size), transport=transport)
    whole = [s if isinstance(s, VariableSpec) else VariableSpec(f"v{i}", *s) for i, s in enumerate(specs)]
    ps.add_variables(whole)
    group.barrier()
    yield ps
    group.barrier()
    ps.close()
    group.close()
    topology.close()


def adding(server):
    """A handler that adds what is pushed, and a list of (worker, variable, number)."""
    seen = []

    def apply(push):
        seen.append((push.worker, push.variable, push.number))
        assert not push.values.flags.writeable
        with server.writing(push.variable) as value:
            if push.rows is None:
                value += push.values
            else:
                value[push.rows] += push.values

    return apply, seen


def run(ps, work, passes=1):
    """Run `work(worker, transports)` on the workers, as many passes, while servers add; return what a server has seen."""
    if ps.server is None:
        results = []
        for _ in range(passes):
            results.append(work(ps.group.topology.rank, ps.transports))
            for transport in ps.transports:
                transport.leave()
        return results
    handler, seen = adding(ps.server)
    ps.server.start(handler)
    for _ in range(passes):
        ps.server.wait()
    return seen


def numbers_in_order(seen, workers):
    """The push numbers of each worker as they were applied."""
    return {worker: [number for w, _, number in seen if w == worker] for worker in range(workers)}


def check_exact(ps, pushes):
    """All workers add 1, `pushes` times together; the sum is exact, every push applied once and in order."""
    workers = len(ps.workers)
    share = {w: pushes // workers + (w < pushes % workers) for w in range(workers)}

    def work(worker, transports):
        one = np.ones(ps.addresses[0].spec.shape, ps.addresses[0].spec.dtype)
        for _ in range(share[worker]):
            transports[0].push(0, one)
        transports[0].flush()
        assert transports[0].acknowledged() == share[worker]

    seen = run(ps, work)
    if ps.server is not None:
        assert numbers_in_order(seen, workers) == {w: list(range(1, n + 1)) for w, n in share.items()}
        assert (ps.server.array(0) == pushes).all()
        assert ps.server.version(0) == pushes


class Writer:
    """A port that writes variable 0 full of the number of the write, again and again."""

    patience = 100

    def __init__(self, server):
        self.server, self.writes = server, 0

    def poll(self):
        self.writes += 1
        with self.server.writing(0) as value:
            value[:] = self.writes
        return not self.server.left(0)  # when the first worker has left the server must be able to end

    def busy(self):
        return False

    def acknowledge(self, worker, number):
        raise NotImplementedError


class Replacer(Writer):
    """The same, into memory that nobody reads where there is some."""

    def poll(self):
        self.writes += 1
        with self.server.replacing(0) as (_, value):
            value[:] = self.writes
        return not self.server.left(0)


def check_views(ps, reads, seconds):
    """While a server replaces a variable at full speed, versions that lie there to be read never change.

    Return how many there were.
    """
    if ps.server is not None:
        ps.server.add_port(Replacer(ps.server), ())
        ps.server.start(adding(ps.server)[0])
        ps.server.wait()
        return None
    transport = ps.transports[0]
    segments = transport._slab(ps.addresses[0]).segments if transport.name == "shared_window" else []
    last, views, kept, turns, first = 0, 0, None, 0, None
    until = time.monotonic() + seconds
    while time.monotonic() < until and (turns < reads or last < first + 5):
        if turns % 3 == 0:
            kept = None  # and so may hold another version
        version, array = transport.pull(0)
        found = (version, array) if any(np.shares_memory(array, s) for s in segments) else None
        assert version >= last
        if first is None or (found and not views):  # before, the server may not have run
            first, turns = version, 0
        kept, last, turns, views = kept or found, version, turns + 1, views + (found is not None)
        for number, there in ((version, array), kept or (version, array)):
            assert there[0] == number
            assert (there == number).all()
        del found, array, there
    transport.leave()
    return views


def check_whole_reads(ps, reads, seconds):
    """While a server writes at full speed, each read is whole, of its version, and no older than the last one."""
    if ps.server is not None:
        ps.server.add_port(Writer(ps.server), ())
        ps.server.start(adding(ps.server)[0])
        ps.server.wait()
        return None
    spec, transport = ps.addresses[0].spec, ps.transports[0]
    out, last, accepted = np.zeros(spec.shape, spec.dtype), 0, 0
    until = time.monotonic() + seconds
    while (accepted < reads or last < 5) and time.monotonic() < until:
        version = transport.read(0, out)
        assert version >= last
        assert out[0] == version  # below 2^24, exact in float32
        assert (out == out[0]).all()
        last, accepted = version, accepted + 1
    large = transport.name != "messages" and out.nbytes > 1 << 20  # a small copy is seldom interrupted
    mixed = sees_a_mix(ps, seconds) if large else None
    transport.leave()
    return accepted, last, mixed


def sees_a_mix(ps, seconds):
    """The positive control: whether a reader without gate and versions ever gets parts of two writes."""
    address, transport = ps.addresses[0], ps.transports[0]
    out = np.zeros(address.spec.shape, address.spec.dtype)
    slab, until = transport._slab(address), time.monotonic() + seconds
    while time.monotonic() < until:
        slab.get(transport._rank, address.offset, out.view(np.uint8))
        if (out != out[0]).any():
            return True
    return False


ROWS = {0: [5, 0, 5, 5], 1: [9, 5], 2: []}


def check_rows(ps):
    """Rows of variable 0, of shape (10, 2), are pushed, duplicates summed, and read."""

    from mpistrat.parameter_server.operations import sum_duplicate_rows

    def values(worker):
        return np.arange(1, 2 * len(ROWS[worker]) + 1, dtype=np.float32).reshape(-1, 2)

    def work(worker, transports):
        transports[0].push_rows(0, *sum_duplicate_rows(np.array(ROWS[worker], int), values(worker), "push_rows"))
        transports[0].flush()
        out = np.full((3, 2), -1, np.float32)
        assert transports[0].read_rows(0, [5, 1, 5], out) >= 1
        assert (out[0] == out[2]).all()
        assert not out[1].any()
        assert transports[0].read_rows(0, [], out[:0]) >= 1

    run(ps, work)
    if ps.server is not None:
        expected = np.zeros((10, 2), np.float32)
        for worker in range(len(ps.workers)):
            np.add.at(expected, ROWS[worker], values(worker))
        np.testing.assert_array_equal(ps.server.array(0), expected)
        assert ps.server.version(0) == len(ps.workers)


def check_passes(ps):
    """Worker 0 leaves each pass at once; reads see what it pushed, and the others are served to their ends."""

    def work(worker, transports):
        link = transports[0]
        out = np.zeros(4, np.float32)
        for _ in range(1 if worker == 0 else 20):
            link.push(0, np.ones(4, np.float32))
            link.read(0, out)
        link.flush()
        assert link.read(0, out) >= link.pushed
        return float(out[0])

    results = run(ps, work, passes=4)
    total = 4 * (1 + 20 * (len(ps.workers) - 1))
    if ps.server is not None:
        assert ps.server.array(0).tolist() == [total] * 4
        assert ps.server.passes == 4
    else:
        assert results == sorted(results)
        assert results[-1] <= total
