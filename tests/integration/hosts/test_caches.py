"""Caches over two hosts of two ranks: shared memory inside, the network between."""

import time

import numpy as np
import pytest

ROWS = 1003


def arrays():
    return {"x": np.arange(3.0 * ROWS).reshape(ROWS, 3), "y": np.arange(ROWS, dtype=np.int16)}


@pytest.fixture
def strategy(monkeypatch):
    import mpistrat as ms

    monkeypatch.setenv("MPISTRAT_ABORT_AFTER", "30")
    made = ms.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    yield made
    made.close()


def rows_read(distributed, strategy):
    """How many rows each rank has read from the source."""
    own = next(counters.rows for text, counters in distributed.stats().stages if text.startswith("cache("))
    table = np.empty(strategy.size, np.int64)
    strategy.comm.Allgather(np.array([own], np.int64), table)
    return table


@pytest.mark.hosts(2)
@pytest.mark.parametrize(("scope", "transport"), [("node", "auto"), ("job", "messages"), ("job", "auto")])
def test_each_row_is_read_once_on_a_node_or_in_the_job(strategy, scope, transport):
    import mpistrat as ms

    plain = ms.data.from_arrays(arrays())
    kept = strategy.distribute_dataset(plain.cache(scope, transport=transport).shuffle(seed=3).batch(64))
    plain = strategy.distribute_dataset(plain.shuffle(seed=3).batch(64))
    for _ in range(2):
        for one, other in zip(plain, kept, strict=True):
            assert np.array_equal(one["x"], other["x"])
            assert np.array_equal(one["y"], other["y"])
    read = rows_read(kept, strategy)
    if scope == "node":
        assert (read[0] + read[1], read[2] + read[3]) == (ROWS, ROWS)
        assert "shared memory of 2 nodes" in str(kept)
    else:
        assert sorted(read.tolist()) == [250, 251, 251, 251]
        assert "in the memory of 4 ranks, fetched between nodes by" in str(kept)


@pytest.mark.hosts(2)
def test_leaving_an_epoch_early_and_going_on(strategy):
    import mpistrat as ms

    plain = ms.data.from_arrays(arrays())
    kept = strategy.distribute_dataset(plain.cache("job", transport="messages").shuffle(seed=3).batch(40))
    plain = strategy.distribute_dataset(plain.shuffle(seed=3).batch(40))
    for epoch in range(3):
        for number, (one, other) in enumerate(zip(plain, kept, strict=True)):
            assert np.array_equal(one["y"], other["y"])
            if number == epoch + 2:
                time.sleep(0.02 * strategy.rank)
                break


PROGRAM = """
import time
import numpy as np
import mpistrat as ms
strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0"])
data = ms.data.from_arrays(np.arange(1000)).cache("job", transport="messages")
data = ms.data.Dataset(data.node.bind(strategy.extended.process_group))
"""


LATE = """
if strategy.rank == 3:
    time.sleep(1)
"""


@pytest.mark.parametrize(
    ("program", "status", "text"),
    [
        (LATE + "assert data.rows(range(1000)).tolist() == list(range(1000))", 0, ""),
        (LATE + "if strategy.rank == 3: raise ValueError('mine')", None, "ValueError: mine"),
    ],
    ids=["without close", "exception"],
)
def test_ends(mpi_run, hosts, program, status, text):
    """The first ranks that are done answer the last one's questions, and go when nobody has any."""
    result = mpi_run(PROGRAM + program, 4, 60.0, hosts=hosts)
    assert (result.returncode == 0) == (status == 0), result
    assert text in result.stderr, result
    if status == 0:
        assert "Error" not in result.stderr, result
