"""Bytes between ranks: to one, from one, and between all, wherever their memory lies."""

import numpy as np
import pytest

from mpistrat.comm import exchange
from tests.harness.process_groups import open_group

SIZES = (0, 1, 1000, 70_000)  # bytes; the last is not small
WAYS = (
    {},
    {"_FARTHEST": -1},
    {"_PIECE": 30_000},
    {"_FARTHEST": -1, "_PIECE": 30_000},
)  # -1: by copies; 30_000: in pieces


@pytest.fixture(params=["shared", "nodes", "private"])
def group(request):
    with open_group(request.param) as group:
        yield group


def ways(monkeypatch):
    """Yield for each way of the messages whether memory lies apart."""
    for values in WAYS:
        with monkeypatch.context() as changed:
            for name, value in values.items():
                changed.setattr(exchange, name, value)
            yield from (True, False)


def bytes_of(sender, receiver, count):
    return np.random.default_rng([sender, receiver, count]).integers(0, 256, count, np.uint8)


def rooms(lengths, apart):
    """Return memory for some bytes from each rank: of its own, or one after the other."""
    if apart:
        return [np.zeros(length, np.uint8) for length in lengths]
    return np.split(np.zeros(sum(lengths), np.uint8), np.cumsum(lengths)[:-1])


@pytest.mark.ranks(2, 3, 4)
def test_from_all_to_one_and_back(group, monkeypatch):
    size, rank = group.topology.size, group.topology.rank
    for apart, count in ((apart, count) for apart in ways(monkeypatch) for count in SIZES):
        for root in range(size):
            every = [bytes_of(r, root, count) for r in range(size)]
            come = rooms([count] * size, apart) if rank == root else []
            with group.collective("gather", detail=(count, root)) as call:
                exchange.gather_into(group, call, every[rank], come, root)
            assert rank != root or all(map(np.array_equal, come, every))
            own = np.zeros(count, np.uint8)
            with group.collective("scatter", detail=(count, root)) as call:
                exchange.scatter_into(group, call, every if rank == root else [], own, root)
            assert np.array_equal(own, every[rank])


@pytest.mark.ranks(2, 3, 4)
def test_parts_of_any_length(group, monkeypatch):
    size, rank = group.topology.size, group.topology.rank
    for apart, count in ((apart, count) for apart in ways(monkeypatch) for count in SIZES):
        lengths = np.random.default_rng(count).integers(0, count + 1, (size, size))
        every = [[bytes_of(sender, r, lengths[sender, r]) for r in range(size)] for sender in range(size)]
        come = rooms(lengths[:, rank].tolist(), apart)
        to = every[rank] if apart else np.split(np.concatenate(every[rank]), lengths[rank].cumsum()[:-1])
        with group.collective("exchange", detail=count) as call:
            exchange.exchange(group, call, to, come, int(lengths.max()))
        assert all(np.array_equal(part, every[sender][rank]) for sender, part in enumerate(come))
