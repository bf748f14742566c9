"""Mailboxes: messages of any size arrive whole and in order while all send at once; none is left in a freed communicator."""

import numpy as np
import pytest

from mpistrat.base.waiting import wait_until
from mpistrat.comm.mailbox import Mailbox

pytestmark = pytest.mark.ranks(1, 3)
SIZES = [0, 1, 1000, 3_000_000, 5, 200_000, 0]  # those in the middle wait in MPI until they are received


@pytest.fixture
def comm(make_group):
    made = make_group().topology.comm.Dup()
    yield made
    made.Free()


def content(rank, number):
    return np.random.default_rng([rank, number]).integers(0, 256, SIZES[number], np.uint8)


def send_to_all(mailbox, comm):
    for number in range(len(SIZES)):
        for rank in range(comm.size):
            mailbox.send(content(comm.rank, number), rank, number)


@pytest.mark.hosts(2, ranks_per_host=2)
def test_messages_of_any_size_from_all_to_all(comm):
    mailbox, come = Mailbox(comm), []
    send_to_all(mailbox, comm)

    def done():
        come.extend(mailbox.poll())
        return len(come) == comm.size * len(SIZES) and not mailbox.sending

    assert wait_until(done, 20)
    for rank in range(comm.size):
        mine = [(tag, bytes(data)) for source, tag, data in come if source == rank]
        assert mine == [(number, content(rank, number).tobytes()) for number in range(len(SIZES))]
    comm.Barrier()
    assert mailbox.poll() == []


def test_what_is_not_received_is_kept_and_pruned_later(comm):
    mailbox, next_rank = Mailbox(comm), (comm.rank + 1) % comm.size
    large = np.full(1 << 24, comm.rank + 1, np.uint8)
    mailbox.send(large, next_rank, 1)
    assert [(rank, data is large) for rank, _, data in mailbox.sending] == [(next_rank, True)]
    assert not mailbox.prune()
    comm.Barrier()
    come = []
    assert wait_until(lambda: come.extend(mailbox.poll()) or (come and not mailbox.sending), 20)
    (source, tag, data), before = come[0], (comm.rank - 1) % comm.size
    assert (source, tag, len(data), set(data[::4096])) == (before, 1, large.nbytes, {before + 1})
    comm.Barrier()


@pytest.mark.hosts(2, ranks_per_host=2)
def test_drain_leaves_nothing_on_its_way(comm):
    mailbox = Mailbox(comm)
    send_to_all(mailbox, comm)
    mailbox.drain()
    assert not mailbox.sending
    comm.Barrier()
    assert not comm.Iprobe()
    comm.Barrier()
    Mailbox(comm).drain()  # of one that has sent nothing


def test_a_rank_that_left_is_waited_for_no_more(comm):
    mailbox, last = Mailbox(comm), comm.size - 1
    large = np.zeros(1 << 24, np.uint8)
    mailbox.send(large, last, 1)
    mailbox.abandon(last)
    assert not mailbox.sending
    comm.Barrier()
    if comm.rank == last:  # it listens after all: MPI has its memory still
        other, come = Mailbox(comm), []
        assert wait_until(lambda: come.extend(other.poll()) or len(come) == comm.size, 20)
    comm.Barrier()
