"""The comparison of collectives between nodes; each rank counts as a node here."""

import numpy as np
import pytest

from mpistrat.errors import CollectiveMismatchError

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


def test_an_exchanged_order_is_found_at_the_next_comparison(group):
    """Calls that all ranks know are not compared at once, but none is forgotten."""
    use(group, "a", "b", "a", "b")  # the second of each compares nothing
    use(group, *("ab" if group.topology.rank == 0 else "ba"))
    with pytest.raises(
        CollectiveMismatchError, match=r"2 collectives ago: rank 0: assign 'a'; ranks? 1.*: assign 'b'$"
    ):
        use(group, "c")
    use(group, "d")


def test_each_change_is_compared_before_the_call_where_a_group_wants_it(group):
    group.compare_each_change()
    use(group, "a", "b", "c", "a", "b", "c")
    with pytest.raises(CollectiveMismatchError, match=r"collectives: rank 0: assign 'a'; ranks? 1.*: assign 'b'$"):
        use(group, "a" if group.topology.rank == 0 else "b")
    use(group, "c", "a")


def test_every_fifth_collective_compares(group):
    use(group, "a", "b")
    mine = "aabbb" if group.topology.rank == 0 else "abbbb"
    use(group, *mine[:4])
    with pytest.raises(
        CollectiveMismatchError, match=r"3 collectives ago: rank 0: assign 'a'; ranks? 1.*: assign 'b'$"
    ):
        use(group, mine[4])


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
