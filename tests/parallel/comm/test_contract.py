"""The comparison of collectives between nodes; each rank counts as a node here."""

import numpy as np
import pytest

from mpistrat.comm.contract import Comparison
from mpistrat.errors import ClosedError, CollectiveMismatchError

pytestmark = pytest.mark.ranks(2, 3)


def enter(group, *what, **options):
    with group.collective(*what, **options):
        pass


@pytest.fixture
def group(make_group):
    return make_group(shared_memory=False, check_every=5)


def test_first_use_is_compared(group):
    last = group.topology.size - 1
    dtype = np.float64 if group.topology.rank == last else np.float32
    for _ in range(3):
        with (
            pytest.raises(
                CollectiveMismatchError,
                match=rf"0.*: reduce 'w' float32 \(2,\); rank {last}: reduce 'w' float64 \(2,\)$",
            ),
            group.collective("reduce", "w", dtype, (2,)),
        ):
            pass
        group.barrier()


def test_other_operations_differ(group):
    op = "gather" if group.topology.rank == 0 else "reduce"
    with (
        pytest.raises(CollectiveMismatchError, match=r"rank 0: gather 'w'; ranks? 1.*: reduce 'w'"),
        group.collective(op, "w"),
    ):
        pass


def use(group, *names):
    for name in names:
        with group.collective("assign", name):
            pass


@pytest.fixture
def comparisons(monkeypatch):
    """The numbers of the calls that were compared."""
    numbers, compare = [], Comparison.compare

    def counted(self, monitor):
        numbers.append(monitor.number)
        compare(self, monitor)

    monkeypatch.setattr(Comparison, "compare", counted)
    return numbers


@pytest.mark.parametrize(
    ("turn", "compared"),
    [
        ("a", [1]),
        ("ab", [1, 2, 3, 4]),  # b after a, a after b, b after the a that follows a b
        ("abc", [1, 2, 3, 4, 5]),
        ("aab", [1, 3, 4, 6]),
        ("aaaaaaab", [1, 8, 9, 16]),
        ("abac", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_calls_that_come_in_turns_are_compared_until_they_are_expected(make_group, comparisons, turn, compared):
    use(make_group(shared_memory=False, check_every=1000), *turn * 9)
    assert comparisons == compared


def test_calls_that_follow_the_same_two_in_turns_are_always_compared(make_group, comparisons):
    use(make_group(shared_memory=False, check_every=1000), *"abcabd" * 9)
    assert comparisons[-6:] == [39, 42, 45, 48, 51, 54]


def test_calls_that_nobody_expects_are_compared_before_they_begin(group):
    use(group, *"abcabc")
    with pytest.raises(CollectiveMismatchError, match=r"collectives: rank 0: assign 'b'; ranks? 1.*: assign 'c'$"):
        use(group, "b" if group.topology.rank == 0 else "c")
    use(group, "c", "a")


def test_an_exchanged_order_is_found_by_the_next_comparison(group):
    """A rank whose call is expected goes on, here to a call that is not, as this call needs no other rank."""
    use(group, *"ababab")
    use(group, *("ab" if group.topology.rank == 0 else ""))
    with pytest.raises(
        CollectiveMismatchError, match=r"2 collectives ago: rank 0: assign 'a'; ranks? 1.*: assign 'b'$"
    ):
        use(group, "c" if group.topology.rank == 0 else "b")
    with pytest.raises(ClosedError, match="no longer be used"):
        use(group, "d")


def test_a_one_way_message_of_another_call_does_not_reach_a_later_one(make_group):
    """Rank 0 has sent what no other rank has received: the group can no longer be used, which all ranks report."""
    group = make_group(shared_memory=False)
    value = np.zeros(3, np.uint8)

    def broadcast(times, group=group):
        for _ in range(times):
            with group.collective("broadcast", "w"):
                group.broadcast(value)

    broadcast(2)
    use(group, "a", "b")
    broadcast(1)
    with pytest.raises(
        CollectiveMismatchError, match="1 collective ago: rank 0: broadcast 'w'; ranks? 1.*: assign 'b'"
    ):
        if group.topology.rank == 0:
            broadcast(1)
            use(group, "a")
        else:
            use(group, "b")
    with pytest.raises(ClosedError, match="no longer be used: ranks made different calls, .*: broadcast 'w'"):
        use(group, "a")
    group.close()
    group.topology.close()
    for number in range(1, 4):  # MPICH gives the number of a freed communicator, with the message, to a later one
        value[:] = number if group.topology.rank == 0 else 0
        broadcast(1, make_group(shared_memory=False))
        assert value.tolist() == [number] * 3


def test_a_one_way_message_that_all_ranks_have_received_is_no_obstacle(group):
    with group.collective("broadcast", "w"):
        group.broadcast(np.zeros(3, np.uint8))
    with pytest.raises(CollectiveMismatchError):
        use(group, "a" if group.topology.rank == 0 else "b")
    use(group, "a")


def test_every_fifth_collective_compares(group):
    """A rank whose calls are expected finds by itself that others wait in another one."""
    use(group, "a", "b")
    use(group, *"bb" * (group.topology.rank == 0))
    with pytest.raises(
        CollectiveMismatchError, match=r"4 collectives ago: rank 0: assign 'b'; ranks? 1.*: assign 'c'$"
    ):
        use(group, *("bbb" if group.topology.rank == 0 else "c"))


def test_a_rank_ahead_is_compared_by_the_number_of_its_calls(group):
    use(group, "a")
    use(group, *["a"] * (group.topology.rank == 0))
    with pytest.raises(CollectiveMismatchError, match=r"1 collective ago: rank 0: assign 'a'; ranks? 1.*: assign 'c'"):
        use(group, "c")


def test_how_long_a_rank_waits_is_its_own_affair(group):
    for turn in range(7):
        enter(group, "assign", "a", timeout=5.0 if group.topology.rank == 0 and turn % 2 else None)
    group.barrier("end")


def test_draws_are_compared_with_the_collectives(group):
    """Between nodes at the next comparison, with what differed first, however long ago."""
    note = group.node.draws.dataset("train.py:7")
    use(group, "a")
    for step in range(3):
        note(0, step)
    use(group, "a")
    for step in range(3, 8):
        note(0, step + (step == 5 and group.topology.rank == 0))
    with pytest.raises(
        CollectiveMismatchError,
        match=r"batch 6 .* rank 0: step 6 of epoch 0 of dataset 1 \(made at train\.py:7\); ranks? 1.*: step 5 of epoch 0 ",
    ):
        use(group, "a", "a", "a", "a", "a")
    use(group, "b")


def test_one_thread_at_a_time(make_group):
    """A second thread that comes while the first is in a collective gets an error; afterwards it may act."""
    from concurrent.futures import ThreadPoolExecutor

    from mpistrat.errors import ContextError

    group = make_group()
    with ThreadPoolExecutor(1) as thread:
        with (
            group.collective("first", synchronize=False),
            group.collective("nested", synchronize=False),
            pytest.raises(ContextError, match=r"second: expected one thread .* while the first is in nested"),
        ):
            thread.submit(enter, group, "second", synchronize=False).result()
        thread.submit(enter, group, "second").result()
    enter(group, "third")
