"""The coordinator: every function once, errors once, values where they are wanted."""

import argparse
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.base.waiting import wait_until
from mpistrat.coordinator import RemoteValueStatus
from mpistrat.errors import ClosedError, ContextError, LayoutError
from mpistrat.remote.channel import Kind
from tests.harness.coordinators import BareStrategy, coordinator, hold

pytestmark = pytest.mark.ranks(2, 3, 4)


def square(x):
    return x * x


def nap(seconds, value=None):
    time.sleep(seconds)
    return value


def fail(text):
    raise ValueError(text)


def index():
    return ms.coordinator.get_current_worker_index()


def test_every_function_runs_once():
    with coordinator() as c:
        if not c.is_chief:
            return
        log = c.create_per_worker_resource(list)
        values = [c.schedule(lambda i, log: log.append(i) or i * i, (i, log)) for i in range(200)]
        c.join()
        assert c.done()
        assert [v.status for v in values] == [RemoteValueStatus.READY] * 200
        assert c.fetch(values) == [i * i for i in range(200)]
        logs = c.fetch(log)
        assert len(logs) == c.num_workers
        assert sorted(i for log in logs for i in log) == list(range(200))


def test_a_worker_gets_and_loads_a_function_once(monkeypatch):
    calls, factor, large = [], [2], np.ones(1 << 17)

    def count(x):
        calls.append(x)
        return x * factor[0] * large[0], len(calls)

    with coordinator() as c:
        if not c.is_chief:
            return
        sent = []
        channel = c._cluster.dispatcher._channel
        monkeypatch.setattr(channel, "send", _noting(sent, channel.send))
        values = [c.schedule(count, (i,), worker=0) for i in range(10)]
        assert c.fetch(values) == [(2.0 * i, i + 1) for i in range(10)]  # its list stays on the worker
        assert [kind for kind, nbytes in sent if nbytes > large.nbytes] == [Kind.FUNCTION]
        factor[0] = 3  # another function from now on
        assert c.schedule(count, (1,), worker=0).get() == (3.0, 1)
        factor[0] = 2
        assert c.schedule(count, (1,), worker=0).get() == (2.0, 11)
        first = c.schedule(square, (3,))
        assert c.schedule(lambda: first + 1, worker=0).get() == 10  # a value of another function is not kept
        many = [c.schedule(lambda i=i: i, worker=0) for i in range(100)]  # more than a worker stores
        assert c.fetch(many) == list(range(100))
        assert c.schedule(count, (1,), worker=0).get() == (2.0, 1)
        assert [kind for kind, _ in sent].count(Kind.FORGET) >= 100 - 64


def _noting(sent, send):
    def noting(peer, kind, number=0, payload=b"", extra=0):
        sent.append((kind, len(payload)))
        return send(peer, kind, number, payload, extra)

    return noting


def test_servers_wait():
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    if size == 2:
        return
    with coordinator(servers=1) as c:
        if c.is_chief:
            assert c.num_workers == size - 2
            assert set(c.fetch([c.schedule(index, worker=i % (size - 2)) for i in range(5)])) == set(range(size - 2))


def test_it_goes_on_while_the_chief_computes():
    """It makes no call meanwhile."""
    with coordinator() as c:
        if not c.is_chief:
            return
        values = [c.schedule(nap, (0.01,)) for _ in range(10)]
        assert wait_until(lambda: [v.status for v in values] == [RemoteValueStatus.READY] * 10, 25)


def test_schedule_waits_while_the_queue_is_full():
    with coordinator(queue_size=3) as c:
        if not c.is_chief:
            return
        values = []
        for count in range(1, 9):
            values.append(c.schedule(nap, (0.05,)))
            ready = sum(v.status is RemoteValueStatus.READY for v in values)
            assert count - ready <= 3 + c.num_workers
        c.join()


def test_an_error_is_raised_once_and_what_waits_is_cancelled(mpi_tmp_path):
    with coordinator() as c:
        if not c.is_chief:
            return
        for number, raiser in enumerate((c.join, lambda: c.schedule(square, (1,)))):
            go = mpi_tmp_path / str(number)
            first = [c.schedule(hold, (go, "ran")) for _ in range(c.num_workers)]
            bad = c.schedule(fail, ("no good",), worker=0, priority=1)
            late = [c.schedule(square, (i,), worker=0) for i in range(20)]
            go.touch()
            assert wait_until(lambda bad=bad: bad.status is not RemoteValueStatus.NOT_READY, 25)
            with pytest.raises(ValueError, match="no good") as caught:
                raiser()
            assert "in fail" in str(caught.value.__cause__)
            assert "rank" in str(caught.value.__cause__)
            c.join()
            assert c.done()
            assert c.fetch(first) == ["ran"] * c.num_workers
            assert bad.status is RemoteValueStatus.ABORTED
            with pytest.raises(ValueError, match="no good"):
                bad.get()
            cancelled = [v for v in late if v.status is RemoteValueStatus.ABORTED]
            assert all(v.status is RemoteValueStatus.READY for v in late if v not in cancelled)
            assert len(cancelled) > 15  # a worker has four calls at a time
            with pytest.raises(ms.coordinator.ClosureCancelledError, match="fail failed: ValueError: no good"):
                cancelled[0].get()
            assert isinstance(cancelled[0]._error, CancelledError)
            assert c.schedule(square, (5,)).get() == 25


class Stops(BaseException):
    """As asyncio.CancelledError, which is no Exception either."""


def test_a_function_that_exits_is_a_function_that_fails():
    def leaves(status):
        argparse.ArgumentParser().exit(status)

    def stops():
        raise Stops("here")

    with coordinator() as c:
        if not c.is_chief:
            return
        for index in range(c.num_workers):
            for fn, args, kind in ((leaves, (2,), SystemExit), (leaves, (0,), SystemExit), (stops, (), Stops)):
                value = c.schedule(fn, args, worker=index)
                with pytest.raises(kind) as caught:
                    c.join()
                assert f"in {fn.__name__}" in str(caught.value.__cause__) and f"worker {index}" in str(
                    caught.value.__cause__
                )
                assert value.status is RemoteValueStatus.ABORTED
                with pytest.raises(kind):
                    c.executor().submit(fn, *args).result()
        assert c.fetch([c.schedule(square, (i,)) for i in range(8)]) == [i * i for i in range(8)]


def test_an_exception_that_cannot_travel_comes_as_text():
    class Odd(Exception):
        def __init__(self):
            super().__init__("odd one")
            self.lock = threading.Lock()

    def bad():
        raise Odd

    with coordinator() as c:
        if c.is_chief:
            c.schedule(bad)
            with pytest.raises(ms.coordinator.RemoteError, match="odd one"):
                c.join()
            c.join()
            c.schedule(threading.Lock)
            with pytest.raises(TypeError, match="pickle"):
                c.join()


class Untold(Exception):
    def __str__(self):
        raise SystemExit(0)


class Unsent(Exception):
    def __reduce__(self):
        raise SystemExit(0)


class Ends(Exception):
    def __reduce__(self):
        return sys.exit, (0,)


class Interrupts:
    def __reduce__(self):
        raise KeyboardInterrupt


def throw(kind):
    raise kind


def test_an_exception_that_raises_another_is_that_of_its_function_only():
    """They ended the worker, or the job."""
    with coordinator() as c:
        if c.is_chief:
            c.schedule(throw, (Untold,))
            with pytest.raises(Untold):
                c.join()
            for kind in (Unsent, Ends):
                c.schedule(throw, (kind,))
                with pytest.raises(ms.coordinator.RemoteError, match=kind.__name__):
                    c.join()
            c.schedule(Interrupts)
            with pytest.raises(TypeError, match="KeyboardInterrupt"):
                c.join()
            assert c.fetch([c.schedule(square, (i,)) for i in range(8)]) == [i * i for i in range(8)]


def test_remote_values_are_arguments_anywhere():
    with coordinator() as c:
        if not c.is_chief:
            return
        last = c.num_workers - 1
        slow = c.schedule(nap, (0.1, np.arange(4)), worker=0)
        total = c.schedule(lambda pair: (index(), pair["x"][1].sum()), ({"x": [1, slow]},), worker=last)
        inside = c.schedule(lambda: slow[-1] + 1, worker=last)
        chain = c.schedule(square, (0,))
        for _ in range(10):
            chain = c.schedule(lambda x: x + 1, (chain,))
        assert c.fetch((total, inside, chain, "plain")) == ((last, 6), 4, 10, "plain")
        bad = c.schedule(fail, ("first",))
        after = c.schedule(square, (bad,))
        with pytest.raises(ValueError, match="first"):
            c.join()
        with pytest.raises(ms.coordinator.ClosureCancelledError):
            after.get()


def test_each_worker_has_a_dataset_of_its_own():
    def make():
        data = ms.data.from_arrays(np.arange(10)).shuffle(seed=index())
        return data.batch(5)

    with coordinator() as c:
        if not c.is_chief:
            return
        with pytest.raises(ContextError, match="next"):
            next(iter(c.create_per_worker_dataset(make)))
        iterator = iter(c.create_per_worker_dataset(make))
        got = {}
        for worker in range(c.num_workers):
            batches = [c.schedule(lambda batches: next(batches), (iterator,), worker=worker) for _ in range(2)]
            got[worker] = np.concatenate(c.fetch(batches)).tolist()
            data = ms.data.from_arrays(np.arange(10)).shuffle(seed=worker).batch(5)
            assert got[worker] == np.concatenate(list(data)).tolist()
            assert sorted(got[worker]) == list(range(10))
        assert len({tuple(order) for order in got.values()}) == c.num_workers
        c.schedule(next, (iterator,))
        with pytest.raises(StopIteration):
            c.join()


def test_a_per_worker_value_is_made_first_dropped_last_and_its_error_raised():
    with coordinator() as c:
        if not c.is_chief:
            return
        for _ in range(20):
            c.schedule(nap, (0.001,))
        names = c.create_per_worker_resource(lambda: f"worker {index()}")
        assert sorted(
            set(c.fetch([c.schedule(lambda n: n, (names,), worker=w) for w in range(c.num_workers)]))
        ) == sorted(f"worker {w}" for w in range(c.num_workers))
        registry = c._cluster.registry
        assert c.schedule(lambda h: len(h.resources), (registry,)).get() == 1
        del names
        c.join()
        assert [c.schedule(lambda h: len(h.resources), (registry,), worker=0).get() for _ in range(2)][-1] == 0
        bad = c.create_per_worker_resource(lambda: fail("cannot be made"))
        with pytest.raises(ValueError, match="cannot be made"):
            c.join()
        c.schedule(lambda: bad)
        with pytest.raises(RuntimeError, match="could not be created"):
            c.join()


def test_priority_and_worker(mpi_tmp_path):
    with coordinator() as c:
        if not c.is_chief:
            return
        log = c.create_per_worker_resource(list)
        c.fetch([c.schedule(square, (i,)) for i in range(100)])  # quick ones, of which a worker gets several at a time
        blockers = [c.schedule(hold, (mpi_tmp_path / "go",), worker=w) for w in range(c.num_workers)]
        for i in range(6):
            c.schedule(lambda i, log: log.append(i), (i, log), worker=0, priority=i % 3)
        (mpi_tmp_path / "go").touch()
        c.join()
        assert c.fetch(log)[0] == [2, 5, 1, 4, 0, 3]
        assert all(v.status is RemoteValueStatus.READY for v in blockers)
        for worker in range(c.num_workers):
            assert c.fetch([c.schedule(index, worker=worker) for _ in range(3)]) == [worker] * 3
        with pytest.raises(ValueError, match="worker"):
            c.schedule(index, worker=c.num_workers)


def test_functions_behind_a_long_one_are_run_by_others(mpi_tmp_path):
    """A worker that was quick has several calls; those that have not begun are given back, and run once each."""
    with coordinator() as c:
        if not c.is_chief or c.num_workers == 1:
            return
        logs = c.create_per_worker_resource(list)
        c.fetch([c.schedule(square, (i,)) for i in range(100)])
        long = c.schedule(hold, (mpi_tmp_path / "go", "long"))
        short = [c.schedule(lambda i, log: log.append(i) or i, (i, logs)) for i in range(100)]
        assert c.fetch(short) == list(range(100))
        (mpi_tmp_path / "go").touch()
        assert long.get() == "long"
        assert sorted(i for log in c.fetch(logs) for i in log) == list(range(100))


def test_functions_that_are_given_back_are_cancelled_with_those_that_wait(mpi_tmp_path):
    with coordinator() as c:
        if not c.is_chief:
            return
        logs = c.create_per_worker_resource(list)
        c.fetch([c.schedule(square, (i,), worker=0) for i in range(100)])
        c.schedule(lambda: hold(mpi_tmp_path / "go") or nap(0.3) or fail("late"), worker=0)
        values = [c.schedule(lambda log: log.append(1), (logs,), worker=0) for _ in range(60)]
        assert wait_until(lambda: len(c._dispatcher("schedule")._workers[0].calls) == 1, 25)
        (mpi_tmp_path / "go").touch()
        with pytest.raises(ValueError, match="late"):
            c.join()
        assert {value.status for value in values} == {RemoteValueStatus.ABORTED}
        assert c.fetch(logs)[0] == []
        assert c.schedule(square, (3,), worker=0).get() == 9


def test_functions_that_wait_keep_their_per_worker_values():
    with coordinator() as c:
        if not c.is_chief:
            return
        for worker in range(c.num_workers):
            c.schedule(nap, (0.2,), worker=worker)
        names = c.create_per_worker_resource(index)
        values = [c.schedule(lambda n: n, (names,), worker=w) for w in range(c.num_workers)]
        del names
        c.schedule(square, (1,))  # here what nobody has any more would be dropped
        assert c.fetch(values) == list(range(c.num_workers))


def test_large_arrays_both_ways():
    with coordinator() as c:
        if c.is_chief:
            array = np.arange(700_000, dtype=np.float64)
            values = [c.schedule(lambda a, i: a + i, (array, i)) for i in range(6)]
            for i, value in enumerate(values):
                np.testing.assert_array_equal(value.get(), array + i)


def test_what_cannot_be_sent_is_refused_at_once():
    lock = threading.Lock()
    with coordinator() as c:
        if not c.is_chief:
            return
        with pytest.raises(TypeError, match=r"fn: expected .*pickled.*lock"):
            c.schedule(lambda: lock)
        with pytest.raises(TypeError, match="function"):
            c.schedule(7)
        with pytest.raises(TypeError, match=r"args=\(x,\)"):
            c.schedule(square, 7)
        assert c.schedule(square, (3,)).get() == 9


def test_wrong_calls_are_told(mpi_tmp_path):
    with pytest.raises(ContextError, match="outside"):
        index()
    with coordinator() as c:
        if c.is_chief:
            with pytest.raises(ContextError, match="the chief"):
                c.serve()
            with pytest.raises(TimeoutError, match="not ready"):
                c.schedule(hold, (mpi_tmp_path / "timed out",)).get(timeout=0.05)
            (mpi_tmp_path / "timed out").touch()

            def nested():
                c.schedule(square, (1,))

            c.schedule(nested)
            with pytest.raises(ContextError, match="on a worker"):
                c.join()
            late = [c.schedule(hold, (mpi_tmp_path / "closing",)) for _ in range(30)]

            def end_what_runs():
                wait_until(lambda: late[-1].status is RemoteValueStatus.ABORTED, 25)
                (mpi_tmp_path / "closing").touch()

            threading.Thread(target=end_what_runs, daemon=True).start()
        else:
            with pytest.raises(ContextError, match="is_chief"):
                c.schedule(square, (1,))
    with pytest.raises((ClosedError, ContextError)):
        c.join()
    if c.is_chief:
        assert late[-1].status is RemoteValueStatus.ABORTED
        with pytest.raises(ms.coordinator.ClosureCancelledError, match="closed"):
            late[-1].get()


def test_one_coordinator_after_the_other():
    strategy = BareStrategy()
    for _ in range(3):
        c = ms.coordinator.ClusterCoordinator(strategy)
        with pytest.raises(ValueError, match="has one"):
            ms.coordinator.ClusterCoordinator(strategy)
        if c.is_chief:
            assert c.schedule(square, (4,)).get() == 16
        else:
            c.serve()
        c.close()
    strategy.close()


def test_nothing_is_left_over_for_the_next_communicator():
    strategy = BareStrategy()
    for _ in range(50):  # an MPI gives the next one the same number, and with it what nobody received
        with ms.coordinator.ClusterCoordinator(strategy):
            pass
    comm = strategy.topology.comm.Dup()
    comm.Barrier()
    assert not comm.Iprobe()
    comm.Barrier()
    comm.Free()
    strategy.close()


def test_a_worker_beside_the_chief_is_needed():
    from mpi4py import MPI

    strategy = BareStrategy(servers=MPI.COMM_WORLD.size - 1)
    with pytest.raises(LayoutError, match="at least one other worker"):
        ms.coordinator.ClusterCoordinator(strategy)
    strategy.close()
    with pytest.raises(TypeError, match="ParameterServerStrategy"):
        ms.coordinator.ClusterCoordinator(ms.get_strategy())
