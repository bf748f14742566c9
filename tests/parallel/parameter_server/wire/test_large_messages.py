"""Large data by message: it moves on while the server applies something else, and arrives whole."""

import time

import numpy as np
import pytest
from transports import parameter_servers

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
