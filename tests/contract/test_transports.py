"""What every transport between workers and parameter servers does. A new one is one more name in TRANSPORTS."""

import time

import numpy as np
import pytest

from tests.harness.transports import (
    TRANSPORTS,
    adding,
    check_exact,
    check_passes,
    check_rows,
    check_views,
    check_whole_reads,
    parameter_servers,
    run,
)

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)
ranks = pytest.mark.ranks
F4 = np.float32


@ranks(2, 4)
def test_pushes_are_exact(transport):
    from mpi4py import MPI

    with parameter_servers(transport, [((3,), np.int64)]) as ps:
        many = 20_000 if transport == "shared_window" else 5_000
        check_exact(ps, many if MPI.COMM_WORLD.size == 4 else 1_000)


@ranks(2, 3, 4)
@pytest.mark.parametrize("largest", [0, 1 << 26], ids=["in parts", "staged"])
def test_large_pushes_are_exact(transport, largest, monkeypatch):
    """Pushes of many parts, or that lie whole where windows can hold them, of workers at the same time."""
    monkeypatch.setattr("mpistrat.parameter_server.layout.LARGEST_AREA", largest)
    with parameter_servers(transport, [((7, 1001), F4)], chunk_bytes=4096) as ps:
        check_exact(ps, 60)


@ranks(2, 3)
@pytest.mark.parametrize("elements", [1_000, 1_000_000])
def test_reads_are_whole(transport, elements):
    with parameter_servers(transport, [((elements,), F4)]) as ps:
        result = check_whole_reads(ps, 60, 8.0)
        if result is not None:
            accepted, last, mixed = result
            assert accepted >= 20
            assert last >= 5
            assert mixed in (True, None)


@ranks(2, 3, 4)
@pytest.mark.parametrize("elements", [1_000, 1_000_000])
def test_what_is_read_where_it_lies_never_changes(transport, elements):
    with parameter_servers(transport, [((elements,), F4)]) as ps:
        views = check_views(ps, 60, 8.0)
        if ps.server is None and transport == "shared_window" and elements == 1_000_000:
            assert views >= 10
        elif ps.server is None:
            assert views == 0


@ranks(2, 3)
def test_gradients_are_pushed_from_where_they_lie(transport):
    """The array is written anew as soon as that is allowed; what was pushed before counts as it was."""
    with parameter_servers(transport, [((600_000,), F4), ((10,), F4)]) as ps:

        def work(worker, transports):
            (transport,) = transports
            assert transport.gradient(1) is None
            mine = transport.gradient(0)
            assert (mine is not None) == (transport.name == "shared_window")
            if mine is None:
                mine = np.zeros(600_000, F4)
            assert not mine.any()
            for number in range(1, 31):
                mine[:] = number
                transport.push(0, mine)
                transport.settle()
            transport.push(0, np.full(600_000, 1000, F4))  # other memory is copied
            assert (mine == 30).all()
            transport.flush()

        run(ps, work)
        if ps.server is not None:
            assert (ps.server.array(0) == len(ps.workers) * (30 * 31 // 2 + 1000)).all()


DTYPES = [
    "?",
    "i1",
    "u2",
    "i4",
    "u8",
    "f2",
    "f4",
    "f8",
    "g",
    "c8",
    "c16",
    "G",
    "M8[s]",
    "m8[ms]",
    "S5",
    "U3",
    "bfloat16",
]


@ranks(2)
@pytest.mark.parametrize("chunk_bytes", [16, 1 << 16])
def test_dtypes_and_shapes(transport, chunk_bytes):
    """All dtypes that can be moved arrive as they were, cut into small parts or not."""
    dtypes = [np.dtype(d) for d in DTYPES[:-1]]
    try:
        import ml_dtypes

        dtypes.append(np.dtype(ml_dtypes.bfloat16))
    except ImportError:
        pass
    shapes = [(5, 3), (), (0, 4)]
    specs = [(shape, dtype) for dtype in dtypes for shape in shapes]
    rng = np.random.default_rng(7)
    values = [rng.integers(0, 2, (*s, d.itemsize), np.uint8).view(d).reshape(s) for s, d in specs]
    with parameter_servers(transport, specs, chunk_bytes=chunk_bytes) as ps:
        if ps.server is not None:

            def store(push):
                with ps.server.writing(push.variable) as value:
                    value[...] = push.values

            ps.server.start(store)
            ps.server.wait()
        else:
            transport = ps.transports[0]
            for index, value in enumerate(values):
                transport.push(index, value)
            transport.flush()
            for index, value in enumerate(values):
                out = np.zeros_like(value)
                assert transport.read(index, out) == 1
                assert out.tobytes() == value.tobytes()
            transport.leave()


@ranks(2, 3, 4)
def test_rows_move_alone_and_duplicates_are_summed(transport):
    with parameter_servers(transport, [((10, 2), F4)], chunk_bytes=16) as ps:
        check_rows(ps)


@ranks(2, 3)
def test_pushes_of_all_sizes_keep_their_order(transport):
    """With each variable there is room for larger pushes, while those before are still on their way."""
    sizes = [10, 3_000, 500, 9_000, 700, 40_000]
    with parameter_servers(transport, chunk_bytes=1024) as ps:
        from mpistrat.parameter_server.layout import VariableSpec

        seen = {worker: [] for worker in range(len(ps.workers))}
        if ps.server is not None:

            def note(push):
                assert (push.values == push.number).all()
                time.sleep(1e-3)
                assert (push.values == push.number).all()
                seen[push.worker].append((push.variable, push.number, push.values.size))

            ps.server.start(note)
        expected, number = [], 0
        for index, size in enumerate(sizes):
            ps.add_variables([VariableSpec(f"v{index}", (size,), F4)])
            for variable in [*range(index + 1)] * 3:
                number += 1
                expected.append((variable, number, sizes[variable]))
                if ps.server is None and variable % 2:
                    rows = np.arange(sizes[variable])
                    ps.transports[0].push_rows(variable, rows, np.full(rows.size, number, F4))
                elif ps.server is None:
                    ps.transports[0].push(variable, np.full(sizes[variable], number, F4))
        if ps.server is None:
            ps.transports[0].leave()
        else:
            ps.server.wait()
            assert seen == dict.fromkeys(seen, expected)


@ranks(2)
def test_rows_of_a_large_table(transport):
    """10 million rows, of which a thousand move."""
    from mpistrat.parameter_server.operations import sum_duplicate_rows

    rows = np.random.default_rng(3).integers(0, 10_000_000, 1000)

    def work(worker, transports):
        transports[0].push_rows(0, *sum_duplicate_rows(rows, np.ones((1000, 4), np.float16), "push_rows"))
        transports[0].flush()
        out = np.zeros((1000, 4), np.float16)
        transports[0].read_rows(0, rows, out)
        unique, counts = np.unique(rows, return_counts=True)
        np.testing.assert_array_equal(out[:, 3], counts[np.searchsorted(unique, rows)])

    with parameter_servers(transport, [((10_000_000, 4), np.float16)]) as ps:
        run(ps, work)


@ranks(3)
@pytest.mark.big(gib=1)
def test_a_reader_that_stopped_does_not_hold_up_others_for_long(transport):
    """Worker 0 announces a reading of a variable of 200 MB and does not end it, worker 1 pushes rows meanwhile."""
    from mpistrat.parameter_server.server.atomic_reads import _VARIABLES

    def work(worker, transports):
        link = transports[0]
        if worker == 0:
            if transport != "messages":
                link._mailbox.put_word(link._rank, link._seqlock._offset, _VARIABLES + 1)
            link.publish_clock(1)
            wait_for(link, 1)
            return None
        wait_for(link, 0)
        start = time.monotonic()
        for _ in range(3):
            link.push_rows(0, [1, 5], np.ones((2, 100), F4))
            link.flush()
        link.publish_clock(1)
        return time.monotonic() - start

    def wait_for(link, worker):
        while not link.clocks()[worker]:
            time.sleep(1e-3)

    with parameter_servers(transport, [((500_000, 100), F4)]) as ps:
        results = run(ps, work)
        if ps.server is None and ps.group.topology.rank == 1:
            assert results[0] < 2.5  # else 4 s


@ranks(2, 3, 4)
def test_a_push_that_comes_again_is_ignored(transport):
    def work(worker, transports):
        for number in (1, 2, 1, 2, 1, 2, 3, 3):
            transports[0].pushed = number - 1
            transports[0].push(0, np.array([number]))
        transports[0].flush()
        assert transports[0].acknowledged() == 3

    with parameter_servers(transport, [((1,), np.int64)]) as ps:
        run(ps, work)
        if ps.server is not None:
            assert ps.server.array(0).tolist() == [6 * len(ps.workers)]


@ranks(2, 3, 4)
def test_a_fast_worker_is_held_back(transport):
    """Never more pushes on their way than slots, and pushes of one worker do not wait for another's."""
    with parameter_servers(transport, [((100,), F4)], slots=2) as ps:
        if ps.server is not None:
            handler, seen = adding(ps.server)

            def slow(push):
                time.sleep(0.002)
                handler(push)

            ps.server.start(slow)
            ps.server.wait()
            assert len(seen) == 30 * len(ps.workers)
        else:
            link = ps.transports[0]
            for number in range(1, 31):
                link.push(0, np.ones(100, F4))
                assert number - link.acknowledged() <= 2
            link.leave()
            assert link.acknowledged() == 30


@ranks(2, 3, 4)
def test_a_push_may_be_kept_and_applied_later(transport):
    """The server sums a step of all workers and applies it at once; a flush waits for that."""
    steps = 5
    with parameter_servers(transport, [((2,), np.float64), ((3,), np.float64)]) as ps:
        workers = len(ps.workers)
        if ps.server is not None:
            kept = {}

            def keep(push):
                kept[push.worker, push.number] = push.variable, push.values.copy()
                step = (push.number + 1) // 2
                if all((w, 2 * step) in kept for w in range(workers)):
                    for variable in (0, 1):
                        with ps.server.writing(variable) as value:
                            value += sum(kept[w, 2 * step - 1 + variable][1] for w in range(workers))
                    for w in range(workers):
                        ps.server.acknowledge(w, 2 * step)
                return False

            ps.server.start(keep)
            ps.server.wait()
            assert ps.server.version(0) == ps.server.version(1) == steps
        else:
            link, out = ps.transports[0], np.zeros(3)
            for step in range(1, steps + 1):
                link.push(0, np.ones(2))
                link.push(1, np.ones(3))
                link.flush()
                assert link.read(1, out) == step
                assert out.tolist() == [step * workers] * 3
            link.leave()


@ranks(2, 3, 4)
def test_several_passes_and_an_early_leaver(transport):
    with parameter_servers(transport, [((4,), F4)]) as ps:
        check_passes(ps)


@ranks(2, 3, 4)
def test_clocks(transport):
    def work(worker, transports):
        link = transports[0]
        for step in range(1, 6):
            link.publish_clock(step)
            clocks = link.clocks()
            assert clocks.shape == (workers,)
            assert clocks[worker] == step

    with parameter_servers(transport, [((1,), F4)]) as ps:
        workers = len(ps.workers)
        run(ps, work)
        if ps.server is not None:
            assert (ps.server.clocks() == 1 << 62).all()


@ranks(3, 4)
def test_several_servers(transport):
    from mpistrat.parameter_server.layout import VariableSpec

    servers = 2
    specs = [VariableSpec(f"v{i}", (i + 1,), np.float64, i % servers) for i in range(4)]

    def work(worker, transports):
        for variable in range(4):
            link = transports[variable % servers]
            link.push(variable, np.full(variable + 1, 10.0**variable))
        for link in transports:
            link.flush()
        for variable in range(4):
            out = np.zeros(variable + 1)
            transports[variable % servers].read(variable, out)
            assert out[0] % 10**variable == 0
            assert out[0] >= 10**variable

    with parameter_servers(transport, specs, servers) as ps:
        run(ps, work)
        if ps.server is not None:
            for variable in range(ps.server.index, 4, servers):
                assert (ps.server.array(variable) == len(ps.workers) * 10**variable).all()
            with pytest.raises(ValueError, match=r"^Server.array: variable: expected a variable of server"):
                ps.server.array(1 - ps.server.index)


@ranks(2, 3, 4)
def test_slabs_are_added_when_there_is_no_room(transport, monkeypatch):
    monkeypatch.setattr("mpistrat.parameter_server.connections.FIRST_SLAB", 4096)

    def work(worker, transports):
        for variable in range(6):
            transports[0].push(variable, np.full((500,), variable, F4))

    with parameter_servers(transport, [((500,), F4)]) as ps:
        from mpistrat.parameter_server.layout import VariableSpec

        for index in range(1, 6):
            assert ps.add_variables([VariableSpec(f"more{index}", (500,), F4)]) == [index]
        assert len({address.slab for address in ps.addresses}) > 1
        run(ps, work)
        if ps.server is not None:
            for variable in range(6):
                assert (ps.server.array(variable) == variable * len(ps.workers)).all()


@ranks(2)
def test_wrong_use_is_told(transport):
    with parameter_servers(transport, [((3, 2), F4)]) as ps:
        if ps.server is None:
            link, good = ps.transports[0], np.zeros((3, 2), F4)
            for error, match, call in [
                (ValueError, "push: array: .*shape", lambda: link.push(0, np.zeros((3, 3), F4))),
                (TypeError, "push: array: .*float64", lambda: link.push(0, np.zeros((3, 2)))),
                (ValueError, "push: variable: expected 0 <= variable < 1, got 1", lambda: link.push(1, good)),
                (ValueError, "read: out: ", lambda: link.read(0, np.zeros(6, F4))),
                (ValueError, "read: out: ", lambda: link.read(0, np.zeros((2, 3), F4).T)),
                (TypeError, "read: out: ", lambda: link.read(0, [1, 2])),
                (ValueError, "push_rows: rows: .*0 <= row < 3", lambda: link.push_rows(0, [3], good[:1])),
                (ValueError, "push_rows: rows: .*0 <= row < 3", lambda: link.push_rows(0, [-1], good[:1])),
                (ValueError, "push_rows: rows: ", lambda: link.push_rows(0, [0.5], good[:1])),
                (ValueError, "push_rows: values: ", lambda: link.push_rows(0, [0, 1], good[:1])),
                (ValueError, "read_rows: out: ", lambda: link.read_rows(0, [0, 1], good[:1])),
            ]:
                with pytest.raises(error, match=match):
                    call()
            assert link.pushed == 0
        run(ps, lambda worker, transports: transports[0].push(0, np.ones((3, 2), F4)))
        if ps.server is not None:
            assert ps.server.version(0) == 1
            with pytest.raises(ValueError, match="read-only"):
                ps.server.array(0)[0] = 1


@ranks(2, 3, 4)
def test_pushes_carry_what_and_version_and_commits_keep_their_place(transport):
    def what(worker, step):
        return (worker + 1 << 40) + step

    steps = 30
    with parameter_servers(transport, [((3,), F4), ((5, 2), np.float64)], chunk_bytes=64) as ps:
        if ps.server is not None:
            seen = {worker: [] for worker in range(len(ps.workers))}

            def note(push):
                rows = None if push.rows is None else push.rows.tolist()
                values = None if push.values is None else push.values.ravel().tolist()
                seen[push.worker].append((push.variable, push.number, push.what, push.version, rows, values))

            ps.server.start(note)
            ps.server.wait()
            for worker, pushes in seen.items():
                expected = []
                for step in range(steps):
                    code, number = what(worker, step), 5 * step
                    expected += [
                        (0, number + 1, code, step, None, [step] * 3),
                        (1, number + 2, code, 7, [1, 4], [1.0, 1.0, 2.0, 2.0]),
                        (-1, number + 2, code, 7, None, None),
                        (1, number + 3, 0, 0, [4, 1, 4], [0.0] * 6),
                        (-1, number + 4, code + 1, 0, None, None),
                        (0, number + 5, 0, 0, None, [0.5] * 3),
                        (-1, number + 5, 0, 0, None, None),
                    ]
                assert pushes == expected
        else:
            worker, link = ps.group.topology.rank, ps.transports[0]
            for step in range(steps):
                code, number = what(worker, step), 5 * step
                link.push(0, np.full(3, step, F4), what=code, version=step)
                values = np.array([[1.0, 1.0], [2.0, 2.0]])
                link.push_rows(1, [1, 4], values, what=code, version=7, commit=True)
                link.push_rows(1, [4, 1, 4], np.zeros((3, 2)))
                link.commit(what=code + 1)
                link.pushed -= 1  # sent again
                link.commit(what=code + 1)
                link.push(0, np.full(3, 0.5, F4), commit=True)
            link.leave()
            assert link.acknowledged() == 5 * steps
            with pytest.raises(ValueError, match=f"commit: what: expected 0 <= what <= {2**47 - 1}, got -1"):
                link.commit(what=-1)
