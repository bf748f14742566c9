"""The transports over two isolated hosts of two ranks: three workers, and one server beside the last of them.

Between the hosts is TCP, where one-sided calls are emulated and nobody chooses them; here they are asked for.
"""

import numpy as np
import pytest
from transports_stand import (
    check_counters,
    check_exact,
    check_passes,
    check_rows,
    check_whole_reads,
    counters,
    parameter_servers,
    run,
)

pytestmark = pytest.mark.hosts(2, ranks_per_host=2)
transports = pytest.mark.parametrize(
    "transport", ["one_sided", "messages", ""], ids=["one_sided", "messages", "chosen"]
)
F4 = np.float32


def test_the_choice():
    with parameter_servers("") as ps:
        assert ps.choice == {(0, 0): "messages", (1, 0): "messages", (2, 0): "shared_window"}
        text = "server 0 (rank 3): messages with workers 0 (rank 0), 1 (rank 1); shared_window with worker 2 (rank 2)"
        assert ps.describe() == text


def test_a_shared_window_needs_shared_memory():
    from mpistrat.errors import LayoutError

    with (
        pytest.raises(LayoutError, match=r"memory that all share, got worker 0 \(rank 0\) and server 0 \(rank 3\)"),
        parameter_servers("shared_window"),
    ):
        pass


@transports
def test_pushes_are_exact(transport):
    with parameter_servers(transport, [((3,), np.int64)]) as ps:
        check_exact(ps, 900)


@transports
def test_large_pushes_are_exact(transport):
    with parameter_servers(transport, [((7, 10_001), F4)], chunk_bytes=1 << 16) as ps:
        check_exact(ps, 30)


@transports
def test_reads_are_whole(transport):
    with parameter_servers(transport, [((1_000_000,), F4)]) as ps:
        result = check_whole_reads(ps, 20, 20.0)
        if result is not None:
            accepted, last, mixed = result
            assert accepted >= 20
            assert last >= 5
            assert mixed in (True, None)


@transports
def test_rows_move_alone_and_duplicates_are_summed(transport):
    with parameter_servers(transport, [((10, 2), F4)]) as ps:
        check_rows(ps)


@transports
def test_several_passes_and_an_early_leaver(transport):
    with parameter_servers(transport, [((4,), F4)]) as ps:
        check_passes(ps)


# Two patterns that were seen to hang under MPICH over UCX and TCP, where one-sided calls met messages. The protocol sends
# no message to a server that is reached by one-sided calls, and receives none by Irecv(ANY_SOURCE): both finish.


def test_clocks_are_published_while_finished_workers_leave_and_others_flush():
    def work(worker, transports):
        link = transports[0]
        for step in range(1, 20 * (worker + 1) + 1):
            link.push(0, link.pushed + 1, np.ones(1000, F4))
            link.publish_clock(step)
            assert link.clocks()[worker] == step
            link.flush()

    with parameter_servers("one_sided", [((1000,), F4)]) as ps:
        run(ps, work, passes=2)
        if ps.server is not None:
            assert (ps.server.array(0) == 2 * 20 * (1 + 2 + 3)).all()


def test_workers_add_to_counters_while_the_server_looks_for_messages():
    with parameter_servers("one_sided", counters(2)) as ps:
        check_counters(ps, 200)
