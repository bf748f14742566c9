"""Large data by message: it moves on while the server applies something else, and arrives whole."""

import time

import numpy as np
import pytest

from tests.harness.transports import parameter_servers

LARGE = 2_000_000


@pytest.mark.ranks(3)
def test_it_moves_on_while_a_push_is_applied():
    """Worker 0 pushes what takes the server as long as worker 1's large messages, which are on their way."""
    ended = []

    def work(worker, link):
        until, out, number = time.monotonic() + 2, np.empty(LARGE, np.float32), 0
        while time.monotonic() < until:
            number += 1
            if worker == 0:
                link.push(0, np.ones(10, np.float32))
            else:
                version = link.read(1, out)
                assert (out == version).all()
                link.push(1, np.full(LARGE, number, np.float32))
            link.flush()
        link.leave()

    def handle(server, push):
        if push.variable == 1:
            assert (push.values == push.number).all()
            with server.replacing(1) as (_, new):
                new[...] = push.number
            return
        other, until = server._ports[0]._workers[1], time.monotonic() + 5
        if other.flows:
            while other.flows and time.monotonic() < until:
                server.move()
            ended.append(not other.flows)

    with parameter_servers("messages", [((10,), np.float32), ((LARGE,), np.float32)]) as ps:
        if ps.server is None:
            work(ps.group.topology.rank, ps.transports[0])
        else:
            ps.server.start(lambda push: handle(ps.server, push))
            ps.server.wait()
            assert ended
            assert all(ended)


@pytest.mark.ranks(2, 3)
def test_the_next_push_of_a_worker_arrives_while_one_is_applied():
    """It does not change what is being applied, and each is applied once, in its order."""
    overlapped, seen = [], {}

    def handle(server, push):
        worker, until = server._ports[0]._workers[push.worker], time.monotonic() + (push.number % 3) / 10
        while time.monotonic() < until:
            server.move()
        overlapped.append(worker.fragment is not None)
        if push.variable == 1:
            assert (push.values == push.number).all()
        seen.setdefault(push.worker, []).append(push.number)

    with parameter_servers("messages", [((10,), np.float32), ((LARGE,), np.float32)]) as ps:
        if ps.server is None:
            link = ps.transports[0]
            for number in range(1, 25):
                variable = int(number % 5 > 0)  # between the large ones small ones, which wait their turn
                link.push(variable, np.full(ps.addresses[variable].spec.shape, number, np.float32))
            link.leave()
        else:
            ps.server.start(lambda push: handle(ps.server, push))
            ps.server.wait()
            assert any(overlapped)
            assert seen == {worker: list(range(1, 25)) for worker in range(len(ps.workers))}
