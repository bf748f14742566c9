"""The transports over two isolated hosts of two ranks: three workers, and one server beside the last of them.

Between the hosts is TCP, where one-sided calls are emulated and nobody chooses them; here they are asked for.
"""

import functools

import numpy as np
import pytest

from tests.contract import test_transports as contract
from tests.harness.transports import (
    check_exact,
    check_passes,
    check_rows,
    check_whole_reads,
    parameter_servers,
    run,
)

hosts = pytest.mark.hosts(2, ranks_per_host=2)
transports = pytest.mark.parametrize(
    "transport", ["one_sided", "messages", ""], ids=["one_sided", "messages", "chosen"]
)
F4 = np.float32


@hosts
def test_the_choice():
    with parameter_servers("") as ps:
        assert [ps.choice.of(worker, 0) for worker in range(3)] == ["messages", "messages", "shared_window"]
        assert ps.choice.workers_by("messages", 0) == (0, 1) and ps.choice.used() == {"messages", "shared_window"}
        text = "server 0 (rank 3): shared_window with worker 2 (rank 2); messages with the others"
        assert ps.describe() == text


@hosts
def test_a_shared_window_needs_shared_memory():
    from mpistrat.errors import LayoutError

    with (
        pytest.raises(LayoutError, match=r"memory that all share, got worker 0 \(rank 0\) and server 0 \(rank 3\)"),
        parameter_servers("shared_window"),
    ):
        pass


@hosts
@transports
def test_pushes_are_exact(transport):
    with parameter_servers(transport, [((3,), np.int64)]) as ps:
        check_exact(ps, 900)


@hosts
@transports
def test_large_pushes_are_exact(transport):
    with parameter_servers(transport, [((7, 10_001), F4)], chunk_bytes=1 << 16) as ps:
        check_exact(ps, 30)


@hosts
@transports
def test_reads_are_whole(transport):
    with parameter_servers(transport, [((1_000_000,), F4)]) as ps:
        result = check_whole_reads(ps, 20, 20.0)
        if result is not None:
            accepted, last, mixed = result
            assert accepted >= 20
            assert last >= 5
            assert mixed in (True, None)


@hosts
@transports
def test_rows_move_alone_and_duplicates_are_summed(transport):
    with parameter_servers(transport, [((10, 2), F4)]) as ps:
        check_rows(ps)


@hosts
@transports
def test_several_passes_and_an_early_leaver(transport):
    with parameter_servers(transport, [((4,), F4)]) as ps:
        check_passes(ps)


# The rest of the contract by messages, what TCP is for: one-sided calls crawl over it, and some of these make thousands.

ONE_WORKER = [
    contract.test_rows_of_a_large_table,
    contract.test_wrong_use_is_told,
    functools.partial(contract.test_dtypes_and_shapes, chunk_bytes=16),
    functools.partial(contract.test_dtypes_and_shapes, chunk_bytes=1 << 16),
]
THREE_WORKERS = [
    contract.test_a_fast_worker_is_held_back,
    contract.test_a_push_may_be_kept_and_applied_later,
    contract.test_a_push_that_comes_again_is_ignored,
    contract.test_clocks,
    contract.test_pushes_carry_what_and_version_and_commits_keep_their_place,
    contract.test_pushes_of_all_sizes_keep_their_order,
    contract.test_several_servers,
]


def name(check):
    function, settings = getattr(check, "func", check), getattr(check, "keywords", {})
    return " ".join([function.__name__.removeprefix("test_"), *map(str, settings.values())])


@pytest.mark.hosts(2, ranks_per_host=1)
@pytest.mark.parametrize("check", ONE_WORKER, ids=name)
def test_the_contract_with_one_worker(check):
    check(transport="messages")


@hosts
@pytest.mark.parametrize("check", THREE_WORKERS, ids=name)
def test_the_contract_with_three_workers(check):
    check(transport="messages")


# A pattern that was seen to hang under MPICH over UCX and TCP, where one-sided calls met messages. The protocol sends
# no message to a server that is reached by one-sided calls, and receives none by Irecv(ANY_SOURCE): it finishes.


@hosts
def test_clocks_are_published_while_finished_workers_leave_and_others_flush():
    def work(worker, transports):
        link = transports[0]
        for step in range(1, 20 * (worker + 1) + 1):
            link.push(0, np.ones(1000, F4))
            link.publish_clock(step)
            assert link.clocks()[worker] == step
            link.flush()

    with parameter_servers("one_sided", [((1000,), F4)]) as ps:
        run(ps, work, passes=2)
        if ps.server is not None:
            assert (ps.server.array(0) == 2 * 20 * (1 + 2 + 3)).all()
