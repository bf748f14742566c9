"""The transports of workers and servers, by node: the same as pair by pair, and as cheap for many ranks as for few."""

from __future__ import annotations

import time

import pytest

from mpistrat.parameter_server.wire.choice import Choice


@pytest.mark.parametrize("within", ["shared_window", "messages"])
@pytest.mark.parametrize(
    ("nodes", "workers", "servers"),
    [
        ([0, 0, 1, 1], [0, 1, 2], [3]),
        ([0, 0, 0], [0, 1], [2]),
        ([0, 1, 2, 2, 0], [0, 2, 4], [1, 3]),
        ([0, 0, 1, 1], [0, 1], [2, 3]),
    ],
)
def test_it_is_that_of_each_pair(nodes, workers, servers, within):
    choice = Choice(nodes, workers, servers, within, "messages")
    pairs = {
        (i, j): within if nodes[worker] == nodes[server] else "messages"
        for i, worker in enumerate(workers)
        for j, server in enumerate(servers)
    }
    assert {pair: choice.of(*pair) for pair in pairs} == pairs
    assert choice.used() == set(pairs.values())
    for transport in ("shared_window", "one_sided", "messages"):
        for j in range(len(servers)):
            expected = tuple(i for i in range(len(workers)) if pairs[i, j] == transport)
            assert choice.workers_by(transport, j) == expected


def test_servers_of_one_node_are_described_together():
    nodes = [0] * 8 + [1] * 8 + [2] * 4
    workers, servers = [*range(6), *range(8, 16)], [6, 7, 16, 17, 18, 19]
    assert Choice(nodes, workers, servers, "shared_window", "one_sided").describe().splitlines() == [
        "servers 0-1 (ranks 6-7): shared_window with workers 0-5 (ranks 0-5); one_sided with the others",
        "servers 2-5 (ranks 16-19): one_sided with workers 0-13 (ranks 0-5, 8-15)",
    ]
    assert Choice(nodes, workers, servers, "messages", "messages").describe() == (
        "servers 0-5 (ranks 6-7, 16-19): messages with workers 0-13 (ranks 0-5, 8-15)"
    )


def test_a_server_on_each_of_1024_nodes():
    """66 million pairs; one by one they would take minutes and gigabytes."""
    began = time.perf_counter()
    nodes = [rank // 64 for rank in range(65_536)]
    servers = list(range(63, 65_536, 64))
    workers = [rank for rank in range(65_536) if rank % 64 != 63]
    choice = Choice(nodes, workers, servers, "shared_window", "messages")
    lines = choice.describe().splitlines()
    assert choice.used() == {"shared_window", "messages"} and choice.of(0, 0) == "shared_window"
    assert len(lines) == 1024 and max(map(len, lines)) < 160
    assert time.perf_counter() - began < 20
