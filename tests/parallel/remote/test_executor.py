"""The executor does what concurrent.futures promises."""

import threading
import time
from concurrent.futures import CancelledError, Executor, as_completed, wait

import pytest

from mpistrat.base.waiting import wait_until
from tests.harness.coordinators import coordinator, hold

pytestmark = pytest.mark.ranks(2, 3, 4)


def add(a, b=0):
    return a + b


def fail(text):
    raise KeyError(text)


def nap(seconds):
    time.sleep(seconds)
    return seconds


@pytest.fixture
def pool():
    """On the chief an executor; the others serve and skip the test."""
    with coordinator() as c:
        if not c.is_chief:
            c.close()
            yield None
        else:
            with c.executor() as made:
                yield made


def test_submit(pool):
    if pool is None:
        return
    assert isinstance(pool, Executor)
    future = pool.submit(add, 1, b=2)
    assert future.result(timeout=10) == 3
    assert future.done() and not future.cancelled()
    called = []
    future.add_done_callback(called.append)
    assert called == [future]


def test_an_exception_is_its_futures_alone(pool):
    if pool is None:
        return
    futures = [pool.submit(fail, "gone"), pool.submit(add, 1)]
    with pytest.raises(KeyError, match="gone"):
        futures[0].result(timeout=10)
    assert isinstance(futures[0].exception(), KeyError)
    assert "in fail" in str(futures[0].exception().__cause__)
    assert futures[1].result(timeout=10) == 1


def test_map(pool, mpi_tmp_path):
    if pool is None:
        return
    assert list(pool.map(add, range(10), range(0, 100, 10))) == [11 * i for i in range(10)]
    assert list(pool.map(add, range(10), range(7), chunksize=3)) == [2 * i for i in range(7)]
    assert list(pool.map(add, [])) == []
    with pytest.raises(ValueError, match="chunksize"):
        pool.map(add, [1], chunksize=0)
    results = pool.map(hold, [mpi_tmp_path / "timed out"], timeout=0.05)
    with pytest.raises(TimeoutError):
        next(results)
    (mpi_tmp_path / "timed out").touch()


def test_wait_and_as_completed(pool):
    if pool is None:
        return
    futures = [pool.submit(nap, 0.01 * i) for i in range(5)]
    assert {f.result() for f in as_completed(futures, timeout=10)} == {0.01 * i for i in range(5)}
    done, waiting = wait(futures, timeout=10)
    assert (len(done), len(waiting)) == (5, 0)


def test_cancel(pool, mpi_tmp_path):
    if pool is None:
        return
    running = [pool.submit(hold, mpi_tmp_path / "go") for _ in range(3)]
    futures = [pool.submit(nap, 0.01) for _ in range(10)]
    assert wait_until(running[0].running, 25)
    assert not running[0].cancel()
    assert futures[-1].cancel()
    (mpi_tmp_path / "go").touch()
    with pytest.raises(CancelledError):
        futures[-1].result(timeout=10)
    assert [f.result(timeout=10) for f in futures[:-1]] == [0.01] * 9


def test_shutdown(pool, mpi_tmp_path):
    if pool is None:
        return
    first = [pool.submit(hold, mpi_tmp_path / "go", 0.05) for _ in range(3)]
    late = [pool.submit(nap, 0.05) for _ in range(20)]

    def end_what_runs():
        wait_until(lambda: first[0].running() and late[-1].cancelled(), 25)
        (mpi_tmp_path / "go").touch()

    ending = threading.Thread(target=end_what_runs)
    ending.start()
    assert wait_until(first[0].running, 25)
    pool.shutdown(cancel_futures=True)
    ending.join()
    assert all(f.done() for f in (*first, *late))
    assert late[-1].cancelled()
    assert first[0].result() == 0.05
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(add, 1)
    with pytest.raises(TypeError):
        pool.submit()
