"""Real ranks read compressed shards in the order of a block shuffle: the order of one rank, each chunk by few ranks."""

import numpy as np
import pytest


@pytest.fixture
def strategy():
    import mpistrat as ms

    with ms.MultiWorkerMirroredStrategy() as strategy:
        yield strategy


@pytest.mark.ranks(1, 2, 3, 4)
def test_ranks_share_the_order_of_a_block_shuffle(strategy, mpi_tmp_path):
    from mpistrat.data import HDF5Dataset, write_shards
    from mpistrat.data.feed.distributed import distribute
    from mpistrat.data.feed.plan import Workers

    if strategy.rank == 0:
        write_shards(mpi_tmp_path / "rows", {"x": np.arange(500)}, num_shards=3, compression="gzip", chunk_rows=16)
    strategy.comm.Barrier()
    files = HDF5Dataset(mpi_tmp_path / "rows", "x", verify=True)
    dataset = files.shuffle(100, seed=3).batch(24)
    distributed = strategy.distribute_dataset(dataset)
    assert "in blocks" in str(distributed)
    whole = HDF5Dataset(mpi_tmp_path / "rows", "x").shuffle(100, seed=3).batch(24)
    alone = distribute(whole, Workers([1]))
    for _ in range(2):
        seen = []
        for rows, expected, batch in zip(whole, alone, distributed, strict=True):
            assert sorted(rows.tolist()) == sorted(expected.tolist())
            counts = np.empty(strategy.comm.size, np.int64)
            strategy.comm.Allgather(np.array([len(batch)], np.int64), counts)
            together = np.empty(counts.sum(), np.int64)
            strategy.comm.Allgatherv(np.ascontiguousarray(batch), [together, counts])
            assert together.tolist() == expected.tolist()
            seen += together.tolist()
        assert sorted(seen) == list(range(500))
    assert 0 < files.node.counters.chunk_reads <= len(files.node.chunk_starts()) - 1  # all of it fits into what is kept


@pytest.mark.ranks(1, 2, 4)
def test_ranks_divide_the_chunks_of_a_window(strategy, mpi_tmp_path):
    from mpistrat.data import HDF5Dataset, write_shards

    if strategy.rank == 0:
        write_shards(mpi_tmp_path / "rows", {"x": np.arange(6400)}, num_shards=2, compression="gzip", chunk_rows=16)
    strategy.comm.Barrier()
    files = HDF5Dataset(mpi_tmp_path / "rows", "x")
    for _ in strategy.distribute_dataset(files.shuffle(1600, seed=3).batch(128)):
        pass
    read = files.node.counters.chunk_reads  # of 400 chunks, in 4 windows of 100
    assert 400 / strategy.size <= read <= 400 / strategy.size + (strategy.size > 1) * 4 * 20
    total = np.array([read], np.int64)
    strategy.comm.Allreduce(np.array([read], np.int64), total)
    assert total[0] >= 400


@pytest.mark.ranks(2, 3)
def test_ranks_go_on_where_one_rank_stopped(strategy, mpi_tmp_path):
    import h5py

    from mpistrat.data import HDF5Dataset

    path = mpi_tmp_path / "rows.h5"
    if strategy.rank == 0:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.arange(300), chunks=(10,), compression="gzip")
    strategy.comm.Barrier()
    dataset = HDF5Dataset(path, "x").shuffle(50, seed=3).batch(20)
    order = [batch.tolist() for batch in dataset]
    alone = iter(dataset)
    alone.restore({"epoch": 0, "next": 0})
    for _ in range(6):
        next(alone)
    together = iter(strategy.distribute_dataset(dataset))
    together.restore(alone.state())
    mine = [batch.tolist() for batch in together]
    assert len(mine) == 15 - 6
    for own, whole in zip(mine, order[6:], strict=True):
        counts = np.zeros(20, np.int64)
        counts[[whole.index(row) for row in own]] = 1
        total = np.empty_like(counts)
        strategy.comm.Allreduce(counts, total)
        assert (total == 1).all()
