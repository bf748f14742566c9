"""What a server does beside its program, whichever transport: a thread that takes pushes and answers reads, and counts."""

import threading
import time

import numpy as np
import pytest

from mpistrat.base.waiting import wait_until
from tests.harness.clock import Clock
from tests.harness.transports import TRANSPORTS, adding, parameter_servers, run

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)
ranks = pytest.mark.ranks
F4 = np.float32


@ranks(2, 3)
def test_a_server_serves_while_its_program_does_other_things(transport):
    """Workers read, push and leave while the server's main thread only sleeps."""

    def work(worker, transports):
        out = np.zeros(3, F4)
        for number in range(1, 51):
            transports[0].push(0, np.ones(3, F4))
            transports[0].flush()
            assert transports[0].read(0, out) >= number

    with parameter_servers(transport, [((3,), F4)]) as ps:
        if ps.server is not None:
            ps.server.start(adding(ps.server)[0])
            assert wait_until(lambda: all(ps.server.left(w) for w in range(len(ps.workers))), 30)
            assert ps.server.array(0).tolist() == [50.0 * len(ps.workers)] * 3
            ps.server.wait()
        else:
            run(ps, work)


@ranks(2, 3)
def test_the_servers_program_reads_and_writes_between_pushes(transport):
    """Its reads are whole, and nothing that it or the workers add is lost."""
    shape, pushes, writes = (50_000,), 60, 40
    with parameter_servers(transport, [(shape, np.float64)]) as ps:
        if ps.server is None:
            run(ps, lambda worker, links: [links[0].push(0, np.ones(shape)) for _ in range(pushes)])
        else:
            server, out, last = ps.server, np.zeros(shape), 0
            server.start(adding(server)[0])
            for _ in range(writes):
                version = server.read(0, out)
                assert (out == version).all()
                assert version >= last
                last = version
                with server.writing(0) as value:
                    before = value.copy()
                    time.sleep(5e-4)
                    value[:] = before + 1
            server.wait()
            total = writes + pushes * len(ps.workers)
            assert server.read(0, out) == total
            assert (out == total).all()


@ranks(2, 3, 4)
def test_variables_are_added_while_pushes_are_on_their_way(transport, monkeypatch):
    monkeypatch.setattr("mpistrat.parameter_server.connections.FIRST_SLAB", 4096)
    with parameter_servers(transport, [((400,), F4)]) as ps:
        from mpistrat.parameter_server.layout import VariableSpec

        if ps.server is not None:
            ps.server.start(adding(ps.server)[0])
        for index in range(1, 20):
            if ps.server is None:
                for variable in range(index):
                    ps.transports[0].push(variable, np.ones(400, F4))
            assert ps.add_variables([VariableSpec(f"more{index}", (400,), F4)]) == [index]
        if ps.server is None:
            ps.transports[0].leave(for_good=True)
        else:
            ps.server.wait(None)
            for variable in range(20):
                assert (ps.server.array(variable) == (19 - variable) * len(ps.workers)).all()


@ranks(2, 3)
def test_waiting_for_several_passes_and_for_good(transport):
    with parameter_servers(transport, [((1,), F4)]) as ps:
        if ps.server is None:
            link = ps.transports[0]
            for _ in range(3):
                link.push(0, np.ones(1, F4))
                link.leave()
            ps.group.barrier()
            time.sleep(0.3)
            link.push(0, np.ones(1, F4))
            link.leave(for_good=True)
            link.leave()
        else:
            workers, left = len(ps.workers), []
            ps.server.start(adding(ps.server)[0], on_leave=left.append)
            ps.server.wait(2)
            ps.server.wait()
            assert ps.server.passes == 3
            assert ps.server.array(0)[0] == 3 * workers
            assert [ps.server.left(w) for w in range(workers)] == [3] * workers
            ps.group.barrier()
            ps.server.wait(None)  # for what comes after a pause
            assert ps.server.array(0)[0] == 4 * workers
            ps.server.wait(1000)  # nobody will come again
            assert [ps.server.left(w) for w in range(workers)] == [1 << 62] * workers
            assert set(left) == set(range(workers))


@ranks(2, 3)
def test_closing_takes_what_workers_have_sent(transport):
    """Workers need not sign off, nor servers wait."""
    with parameter_servers(transport, [((1000,), F4)]) as ps:
        view = None
        if ps.server is not None:
            ps.server.start(adding(ps.server)[0])
            view, server = ps.server.array(0), ps.server
        else:
            for _ in range(20):
                ps.transports[0].push(0, np.ones(1000, F4))
        workers = len(ps.workers)
    if view is not None:
        from mpistrat.errors import ClosedError

        assert (view == 20 * workers).all()
        with pytest.raises(ClosedError, match=r"Server\.version: closed"):
            server.version(0)


@ranks(2, 3)
@pytest.mark.parametrize("elements", [10, 5_000])
def test_pushes_that_are_kept_hold_their_worker_back_and_nobody_else(transport, elements):
    """A server does not take more and more of what it cannot apply yet; small pushes, or large ones of many parts."""
    pushes, most = 60, 16
    with parameter_servers(transport, [((elements,), F4)], slots=2, chunk_bytes=1024) as ps:
        if ps.server is None:
            run(ps, lambda worker, links: [links[0].push(0, np.full(elements, n, F4)) for n in range(1, pushes + 1)])
            return
        server, kept, held_back, last = ps.server, [], threading.Event(), len(ps.workers) - 1

        def handle(push):
            assert (push.values == push.number).all()
            if push.worker < last or push.number <= 5:
                return True
            kept.append(push.number)
            return False

        def retry():
            if not kept or not held_back.is_set():
                return False
            server.acknowledge(last, kept[-1])
            seen.extend(kept)
            kept.clear()
            return True

        seen = []
        server.start(handle, retry=retry)
        until = time.monotonic() + 20
        while (len(kept) < most or (last and server.applied[0] < pushes)) and time.monotonic() < until:
            time.sleep(1e-3)
        time.sleep(0.2)
        found = len(kept), [server.applied[worker] for worker in range(last)]
        held_back.set()
        server.wait()
        assert found == (most, [pushes] * last)
        assert seen == list(range(6, pushes + 1))


@ranks(2, 3)
def test_exchanges_are_counted(transport, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("mpistrat.parameter_server.server.server.perf_counter", clock.perf_counter)
    with parameter_servers(transport, [((10,), F4), ((6, 2), np.float64)]) as ps:
        workers = len(ps.workers)
        if ps.server is None:
            link, worker, out = ps.transports[0], ps.group.topology.rank, np.zeros((3, 2))
            ps.group.barrier()
            for step in range(worker + 1):
                version = link.read(0, np.zeros(10, F4))
                link.flush()
                link.push(0, np.ones(10, F4), version=version)
                link.push_rows(1, [1, 2], np.ones((2, 2)), version=step, commit=True)
            link.read_rows(1, [0, 1, 2], out)
            link.commit()
            link.leave()
            assert link.stats.pulls == {0: [worker + 1, 40 * (worker + 1)], 1: [1, 48]}
            assert link.stats.pushes == {0: [worker + 1, 40 * (worker + 1)], 1: [worker + 1, 48 * (worker + 1)]}
        else:

            def handle(push):
                if push.variable >= 0:
                    ps.server.count_staleness(push)
                    with ps.server.writing(push.variable):
                        clock.sleep(1e-3)

            ps.server.start(handle)
            assert clock.asked.wait(30)  # it has nothing to do
            clock.sleep(0.1)
            ps.group.barrier()
            ps.server.wait()
            stats = ps.server.stats
            counts = [{0: [w + 1, 40 * (w + 1)], 1: [w + 1, 48 * (w + 1)]} for w in range(workers)]
            assert stats.pushes == counts
            assert stats.commits == [w + 2 for w in range(workers)]
            if workers == 1:
                assert stats.staleness == [{0: {0: 1}, 1: {0: 1}}]
            for worker, histograms in enumerate(stats.staleness):
                assert [sum(h.values()) for h in histograms.values()] == [worker + 1] * 2
            pushes = workers * (workers + 1)
            assert stats.busy == pytest.approx(pushes * 1e-3)
            assert 0.1 <= stats.idle <= 0.1 + stats.busy
            assert 1 <= stats.most_waiting <= 4 * workers  # four slots each
