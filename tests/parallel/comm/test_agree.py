"""One rank's error is raised on every rank, over a group and over a plain communicator."""

from __future__ import annotations

import functools

import pytest
from mpi4py import MPI

from mpistrat.base import agree
from mpistrat.base.agree import Ranks, all_alike, as_told, first_rank, gather_bytes, gather_text, same, together
from mpistrat.errors import CollectiveMismatchError, ShardError

pytestmark = pytest.mark.ranks(2, 3)


def exchanges(group):
    return [functools.partial(group.exchange, "open", detail="x.h5"), functools.partial(gather_text, MPI.COMM_WORLD)]


def test_an_error_of_one_rank_is_raised_on_all_and_they_go_on_in_step(group):
    rank, size = group.topology.rank, group.topology.size
    for exchange in exchanges(group):
        for odd in range(size):
            with (
                pytest.raises(FileNotFoundError, match="^x.h5$" if rank == odd else f"^rank {odd}: x.h5$"),
                together(exchange),
            ):
                if rank == odd:
                    raise FileNotFoundError("x.h5")
        with pytest.raises(ValueError, match="^for all$"), together(exchange, as_told):
            if rank == size - 1:
                raise ValueError("for all")
        with together(exchange):
            pass


def test_all_may_fail_each_in_its_own_way(group):
    kind = (TypeError, OSError, ValueError)[group.topology.rank]
    with pytest.raises(kind, match="^mine$"), together(exchanges(group)[0]):
        raise kind("mine")


def test_differences_are_told_by_rank(group):
    last = group.topology.size - 1
    for exchange in exchanges(group):
        same(exchange, "alike", ValueError)
        with pytest.raises(ValueError, match=f"0: 'a', .*{last}: 'b'|0: 'a', {last}: 'b'"):
            same(exchange, "ab"[group.topology.rank == last], ValueError)


class Counting:
    """A communicator that notes which collectives are called, and how many bytes each rank gives."""

    def __init__(self, comm):
        self._comm, self.calls = comm, []
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name):
        def method(first, *args):
            self.calls.append((name, first.nbytes))
            return getattr(self._comm, name)(first, *args)

        return method


@pytest.mark.parametrize("few", [1, 8])
def test_texts_and_bytes_of_any_length(group, monkeypatch, few):
    """One by one where there are few different ones, and all at once."""
    monkeypatch.setattr(agree, "_FEW", few)
    rank, size = group.topology.rank, group.topology.size
    for length in (3, 70_000):
        expected = [bytes([r]) * length * r for r in range(size)]
        assert gather_bytes(MPI.COMM_WORLD, bytes([rank]) * length * rank) == expected
        assert gather_text(MPI.COMM_WORLD, "é" * length * rank) == ["é" * length * r for r in range(size)]
    assert gather_text(MPI.COMM_WORLD, "last" * (rank == size - 1)) == [""] * (size - 1) + ["last"]


def test_what_is_alike_is_not_sent(group):
    comm = Counting(MPI.COMM_WORLD)
    assert gather_text(comm, "settings" * 1000) == ["settings" * 1000] * comm.size
    assert comm.calls == [("Allreduce", 16)]
    comm.calls.clear()
    text = "one" if comm.rank else "another"
    assert gather_text(comm, text) == ["another"] + ["one"] * (comm.size - 1)
    assert [name for name, _ in comm.calls] == ["Allreduce", "Allgather", "Bcast", "Bcast"]


def test_numbers_that_are_alike_and_the_first_rank_of_a_condition(group):
    rank, size = group.topology.rank, group.topology.size
    assert all_alike(MPI.COMM_WORLD, [1, rank, -(1 << 62), -rank]).tolist() == [True, False, True, False]
    assert first_rank(MPI.COMM_WORLD, False) is None
    assert first_rank(MPI.COMM_WORLD, rank > 0) == 1
    assert first_rank(MPI.COMM_WORLD, rank == size - 1) == size - 1


def test_ranks_of_a_command(group):
    ranks = Ranks(MPI.COMM_WORLD, "mpistrat shards check")
    with pytest.raises(CollectiveMismatchError, match="rank 0: of 0; rank 1: of 1"):
        ranks.agree(f"of {ranks.rank}")
    error, text = (
        (OSError, "^no room$")
        if ranks.rank == 1
        else (ShardError, r"mpistrat shards check: .*rank 1: OSError: no room")
    )
    with pytest.raises(error, match=text), ranks.together():
        if ranks.rank == 1:
            raise OSError("no room")
