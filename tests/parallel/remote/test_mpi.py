"""Messages of any length arrive in order; a call runs once however often it comes."""

import contextlib
import time

import numpy as np
import pytest

from mpistrat.remote.channel import CHUNK, FIRST, Kind, MpiChannel, pack_call
from mpistrat.remote.program import ProgramWorld
from mpistrat.remote.registry import ObjectRegistry, dumps, loads
from mpistrat.remote.worker import WorkerLoop
from tests.harness.coordinators import BareStrategy

pytestmark = pytest.mark.ranks(2, 3, 4)


def gathered(channel, count, seconds=20):
    """So many messages, in the order of arrival."""
    messages, until = [], time.monotonic() + seconds
    while len(messages) < count and time.monotonic() < until:
        messages += channel.poll()
    return messages


@pytest.mark.hosts(2, ranks_per_host=2)
def test_messages_of_any_length():
    strategy = BareStrategy()
    comm = strategy.topology.comm.Dup()
    channel = MpiChannel(comm)
    sizes = [0, 1, FIRST - 1, FIRST, FIRST + 1, FIRST + CHUNK, FIRST + CHUNK + 1, 3 * CHUNK, 5]
    payloads = [np.random.default_rng(n).integers(0, 256, n, np.uint8).tobytes() for n in sizes]
    for rank in range(comm.size):
        if rank != comm.rank:
            for number, payload in enumerate(payloads):
                channel.send(rank, comm.rank, number, payload, -number)
    messages = gathered(channel, (comm.size - 1) * len(sizes))
    for rank in range(comm.size):
        if rank != comm.rank:
            mine = [m for m in messages if m.peer == rank]
            assert [(m.kind, m.number, m.extra) for m in mine] == [(rank, n, -n) for n in range(len(sizes))]
            assert [m.payload for m in mine] == payloads
    while channel.sending():
        channel.poll()
    comm.Barrier()
    comm.Free()
    strategy.close()


def log_number(registry, number):
    registry.resources.setdefault("seen", []).append(number)
    return number


def seen_numbers(registry):
    return registry.resources["seen"]


@pytest.mark.hosts(2, ranks_per_host=2)
def test_222_calls_and_20_duplicates_run_once_each():
    strategy = BareStrategy()
    comm = strategy.topology.comm.Dup()
    channel, registry = MpiChannel(comm), ObjectRegistry(strategy)
    if comm.rank:
        loop = WorkerLoop(
            strategy.extended.process_group,
            channel,
            0,
            comm.rank - 1,
            registry,
            contextlib.nullcontext,
            lambda: None,
            lambda: None,
            lambda: None,
            ProgramWorld(comm),
        )
        assert loop.serve()
        assert len(loop._answers) <= 223 - 150  # those up to 150 were acknowledged
    else:

        def call(fn, *args):
            return pack_call([], dumps((fn, (registry, *args), {}), registry.reduce))

        duplicates = set(np.random.default_rng(5).choice(np.arange(151, 223), 20, replace=False).tolist())
        for rank in range(1, comm.size):
            for number in range(1, 223):
                answered = 150 if number > 160 else 0
                channel.send(rank, Kind.CALL, number, call(log_number, number), answered)
                if number in duplicates:
                    channel.send(rank, Kind.CALL, number, call(log_number, number), answered)
            channel.send(rank, Kind.CALL, 100, call(log_number, 100), 150)  # nobody waits for it any more
            channel.send(rank, Kind.CALL, 223, call(seen_numbers), 150)
            channel.send(rank, Kind.END)
        messages = gathered(channel, (comm.size - 1) * (1 + 222 + 20 + 1 + 1))
        for rank in range(1, comm.size):
            hello, *answers, seen, bye = [m for m in messages if m.peer == rank]
            assert (hello.kind, bye.kind) == (Kind.HELLO, Kind.BYE)
            assert {m.kind for m in answers} == {Kind.RESULT}
            numbers = [m.number for m in answers]
            assert sorted(numbers) == sorted([*range(1, 223), *duplicates])
            assert all(loads(m.payload, registry.resolve) == m.number for m in answers)
            assert loads(seen.payload, registry.resolve) == list(range(1, 223))
    comm.Barrier()
    comm.Free()
    strategy.close()
