"""Caches that ranks share: every piece is read once, and no element or order changes."""

import time

import numpy as np
import pytest

ROWS = 1003


def arrays(count=ROWS):
    return {"x": np.arange(3.0 * count).reshape(count, 3), "y": np.arange(count, dtype=np.int16)}


def bound_to(strategy, dataset):
    """The dataset as `distribute_dataset` makes it before it divides it. Collective."""
    import mpistrat as ms

    return ms.data.Dataset(dataset.node.bind(strategy.extended.process_group))


@pytest.fixture
def strategy(monkeypatch, request):
    """One replica a rank; with the parameter "private" no rank shares memory, as if each were on a node of its own."""
    import mpistrat as ms

    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0" if getattr(request, "param", "") == "private" else "1")
    monkeypatch.setenv("MPISTRAT_ABORT_AFTER", "20")
    made = ms.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    yield made
    made.close()


def all_sum(strategy, numbers):
    """The sum of some integers over all ranks."""
    total = np.zeros(len(numbers), np.int64)
    if strategy.comm is None:
        return list(numbers)
    strategy.comm.Allreduce(np.array(numbers, np.int64), total)
    return total.tolist()


def cache_of(distributed):
    """The counters of the cache of a distributed dataset on this rank."""
    return next(counters for text, counters in distributed.stats().stages if text.startswith("cache("))


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in ("x", "y"))


KINDS = [
    ("shared", "rank", "auto"),
    ("shared", "node", "auto"),
    ("shared", "job", "auto"),
    ("private", "node", "auto"),
    ("private", "job", "messages"),
    ("private", "job", "get"),
    ("private", "job", "auto"),
]


@pytest.mark.parametrize(("strategy", "scope", "transport"), KINDS, indirect=["strategy"])
@pytest.mark.ranks(1, 2, 3, 4)
def test_order_and_rows_are_those_without_a_cache(strategy, scope, transport):
    import mpistrat as ms

    for batch, take in ((97, ROWS), (5, 7)):  # of the second some ranks get no row at the end
        plain = ms.data.from_arrays(arrays()).take(take)
        kept = plain.cache(scope, transport=transport)
        plain = strategy.distribute_dataset(plain.shuffle(seed=3).batch(batch))
        kept = strategy.distribute_dataset(kept.shuffle(seed=3).batch(batch))
        for _ in range(2):
            assert all(same(*both) for both in zip(plain, kept, strict=True))
    if strategy.size > 1 and scope != "rank":
        assert f'cache("{scope}"): ' in str(kept)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", ["shared", "private"], indirect=True)
@pytest.mark.parametrize("scope", ["node", "job"])
def test_chunks_are_read_once(strategy, scope, mpi_tmp_path):
    import mpistrat as ms

    if strategy.rank == 0:
        ms.data.write_shards(
            mpi_tmp_path / "set", arrays(), layout="chunked", compression="gzip", chunk_rows=20, num_shards=3
        )
    if strategy.comm is not None:
        strategy.comm.Barrier()
    source = ms.data.HDF5Dataset(mpi_tmp_path / "set", fields=("x", "y"))
    data = strategy.distribute_dataset(source.cache(scope).shuffle(seed=3).batch(64))
    for epoch in range(3):
        seen = [int(y) for _, batch in data for y in batch]
        assert all_sum(strategy, [len(seen), sum(seen)]) == [ROWS, sum(range(ROWS))], epoch
    # 335, 334 and 334 rows in chunks of 20, of two fields; where each rank is a node, each reads all for "node".
    readers = strategy.size if scope == "node" and strategy.extended.process_group.num_nodes > 1 else 1
    assert all_sum(strategy, [source.node.counters.chunk_reads]) == [readers * 3 * 17 * 2]
    assert all_sum(strategy, [cache_of(data).rows]) == [readers * ROWS]
    if scope == "job":
        assert abs(cache_of(data).rows - ROWS / strategy.size) <= 20


@pytest.mark.ranks(2, 4)
def test_a_rank_that_stands_still_reads_nothing_and_the_others_go_on(strategy):
    import mpistrat as ms

    data = strategy.distribute_dataset(ms.data.from_arrays(arrays()).cache("node").batch(100))
    if strategy.rank:
        assert sum(len(batch["y"]) for batch in data) > 0
    strategy.comm.Barrier()
    if strategy.rank == 0:
        assert sum(len(batch["y"]) for batch in data) > 0
        assert cache_of(data).rows == 0
    assert all_sum(strategy, [cache_of(data).rows]) == [ROWS]


@pytest.mark.parametrize("strategy", ["private"], indirect=True)
@pytest.mark.parametrize("transport", ["messages", "get"])
@pytest.mark.ranks(2, 3)
def test_leaving_an_epoch_early_and_going_back(strategy, transport):
    """Threads that read ahead stand at different steps on different ranks when the loop is left."""
    import mpistrat as ms

    plain = ms.data.from_arrays(arrays()).shuffle(seed=1).batch(50)
    kept = ms.data.from_arrays(arrays()).cache("job", transport=transport).shuffle(seed=1).batch(50)
    plain, kept = strategy.distribute_dataset(plain), strategy.distribute_dataset(kept)
    for epoch in range(3):
        steps = iter(kept)
        for number, (batch, expected) in enumerate(zip(steps, plain, strict=False)):
            assert same(batch, expected)
            if number == 3:
                time.sleep(0.02 * strategy.rank)
                break
        state = steps.state()
        steps.close()
        assert state["next"] == 4
        again = iter(kept)
        again.restore(state)
        rest = iter(plain)
        rest.restore(state)
        assert all(same(*both) for both in zip(again, rest, strict=True)), epoch
        plain.set_epoch(epoch + 1)
        kept.set_epoch(epoch + 1)
    assert cache_of(kept).bytes_received > 0
    assert 0 < cache_of(kept).wait_seconds < 60


@pytest.mark.parametrize("strategy", ["shared", "private"], indirect=True)
@pytest.mark.ranks(2, 3)
def test_ranks_need_not_be_in_step(strategy):
    """Only one rank reads at all, and in its own order."""
    import mpistrat as ms

    data = ms.data.from_arrays(arrays()).cache("job", transport="messages")
    bound = bound_to(strategy, data)
    if strategy.rank == 1:
        picked = np.random.default_rng(1).integers(0, ROWS, 500)
        assert bound.rows(picked)["y"].tolist() == picked.tolist()
        assert bound.rows([])["x"].shape == (0, 3)
    assert bound.node is bound_to(strategy, data).node  # one cache, however often it is distributed


@pytest.mark.ranks(2)
def test_a_failed_reading_is_told_to_all_under_job(strategy):
    import mpistrat as ms
    from mpistrat.errors import ShardError

    def function(row):
        if row["y"] == ROWS - 1:
            raise ShardError("shard-7.h5: x: damaged")
        return row

    data = ms.data.from_arrays(arrays()).map(function).cache("job").batch(10)
    with pytest.raises(ShardError, match=r"shard-7.h5: x: damaged"):
        strategy.distribute_dataset(data)


@pytest.mark.ranks(2)
def test_a_failed_reading_reaches_every_rank_that_needs_the_rows_under_node(strategy):
    import mpistrat as ms
    from mpistrat.errors import ShardError

    def function(row):
        if row["y"] == ROWS // 2:
            time.sleep(0.05)
            raise ShardError("shard-7.h5: x: damaged")
        return row

    data = bound_to(strategy, ms.data.from_arrays(arrays()).map(function).cache("node"))
    with pytest.raises(ShardError, match=r"shard-7.h5: x: damaged"):
        data.rows([0, ROWS // 2])


@pytest.mark.parametrize("scope", ["node", "job"])
@pytest.mark.ranks(2)
def test_shared_memory_that_is_too_small_is_an_error_on_every_rank(strategy, scope, monkeypatch):
    import mpistrat as ms
    from mpistrat.comm import shared_memory
    from mpistrat.errors import SharedMemoryError

    monkeypatch.setattr(shared_memory, "free_space", lambda: 20_000)
    with pytest.raises(SharedMemoryError, match=rf'too small for cache\("{scope}"\) of 1003 rows: .* --shm-size'):
        strategy.distribute_dataset(ms.data.from_arrays(arrays()).cache(scope).batch(10))


@pytest.mark.ranks(2)
def test_memory_that_is_too_small_is_an_error_on_every_rank(strategy, monkeypatch):
    import mpistrat as ms
    from mpistrat.data.nodes.cache import cache, fill

    if strategy.rank == 1:
        monkeypatch.setattr(fill, "available_memory", lambda: 20_000)
    with pytest.raises(
        MemoryError, match=r"free memory for cache\(\"node\"\) of 1003 rows on the node of rank 0, got 20 kB"
    ):
        strategy.distribute_dataset(ms.data.from_arrays(arrays()).cache("node").batch(10))
    monkeypatch.setattr(cache, "available_memory", lambda: 40_000)  # enough for one rank, 26 kB
    with pytest.raises(MemoryError, match=rf"1003 rows in each of the node's {strategy.size} ranks, got 40 kB"):
        next(iter(strategy.distribute_dataset(ms.data.from_arrays(arrays()).cache().batch(10))))


@pytest.mark.ranks(2)
def test_different_rows_are_found(strategy):
    import mpistrat as ms
    from mpistrat.errors import CollectiveMismatchError

    data = ms.data.from_arrays(arrays(ROWS + strategy.rank)).cache("node")
    with pytest.raises(CollectiveMismatchError, match="1003 rows"):
        bound_to(strategy, data)


@pytest.mark.ranks(2)
def test_rows_of_varying_shape_are_refused(strategy):
    import mpistrat as ms

    spec = ms.data.ArraySpec((None,), np.int64)
    ragged = ms.data.from_arrays(np.arange(5)).map(lambda i: np.arange(i), element_spec=spec).cache("node")
    with pytest.raises(ValueError, match=r"rows of one shape, of numbers, for cache\('node'\)"):
        strategy.distribute_dataset(ragged.padded_batch(2))


@pytest.mark.parametrize("strategy", ["shared"], indirect=True)
@pytest.mark.parametrize("scope", ["rank", "node", "job"])
@pytest.mark.ranks(2)
def test_policies(strategy, scope, mpi_tmp_path):
    """What lies below a shared cache must be the same on every rank; what lies above it may differ."""
    import mpistrat as ms

    if strategy.rank == 0:
        ms.data.write_shards(mpi_tmp_path / "set", {"y": np.arange(40)}, num_shards=4)
    strategy.comm.Barrier()

    def sums(dataset, policy):
        options = ms.data.Options(auto_shard_policy=policy)
        data = strategy.distribute_dataset(dataset.batch(8).with_options(options))
        return all_sum(strategy, [sum(int(y) for batch in data for y in batch)])

    rows = ms.data.HDF5Dataset(mpi_tmp_path / "set", fields="y").map(lambda y: y)
    policy, hint = ms.data.AutoShardPolicy, ms.data.SHARD_HINT
    assert sums(rows.cache(scope), policy.OFF) == [2 * sum(range(40))]
    assert sums(rows.cache(scope).shard(hint, hint), policy.HINT) == [sum(range(40))]
    if scope == "rank":
        assert sums(rows.cache(), policy.FILE) == [sum(range(40))]
        assert sums(rows.shard(hint, hint).cache(), policy.HINT) == [sum(range(40))]
    else:
        with pytest.raises(
            ValueError, match=rf"the same rows below cache\('{scope}'\) on every rank, got different rows"
        ):
            sums(rows.cache(scope), policy.FILE)


@pytest.mark.parametrize("scope", ["node", "job"])
@pytest.mark.ranks(1, 2)
def test_a_closed_strategy(strategy, scope):
    import mpistrat as ms
    from mpistrat.errors import ClosedError

    bound = bound_to(strategy, ms.data.from_arrays(arrays()).cache(scope))
    assert bound.rows([5])["y"].tolist() == [5]
    strategy.close()
    with pytest.raises(ClosedError, match="cache"):
        bound.rows([5])


@pytest.mark.ranks(2)
def test_a_dead_wait_names_the_rank(strategy, monkeypatch):
    import mpistrat as ms
    from mpistrat.errors import CollectiveTimeoutError

    bound = bound_to(strategy, ms.data.from_arrays(arrays()).cache("node"))
    claims = bound.node._memory._claims
    if strategy.rank == 0:
        assert claims.claim(np.array([0])).tolist() == [0]
    strategy.comm.Barrier()
    if strategy.rank == 1:
        monkeypatch.setattr(claims, "_timeout", 0.2)
        with pytest.raises(CollectiveTimeoutError, match=r"waited 0.2 s for rows that rank 0 reads"):
            bound.rows([5])
    strategy.comm.Barrier()
    if strategy.rank == 0:
        claims.release(np.array([0]), ready=False)
    strategy.comm.Barrier()
    assert bound.rows([5])["y"].tolist() == [5]
