"""Copies of remote files on ranks of a node: each file once, and one error for all."""

import contextlib
import itertools

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ShardError
from tests.harness.file_server import serving

ROWS = 40


@contextlib.contextmanager
def served(strategy, folder):
    """Serve a set of shards by rank 0; yield its URL on each rank, and on rank 0 the server."""
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    if strategy.rank == 0:
        folder.mkdir()
        ms.data.write_shards(folder / "train", {"x": np.arange(ROWS)}, num_shards=4)
        with serving(folder) as server:
            yield strategy.comm.bcast(server.url), server
            strategy.comm.Barrier()
    else:
        yield strategy.comm.bcast(None), None
        strategy.comm.Barrier()


@pytest.mark.ranks(1, 3)
def test_each_file_is_copied_once(strategy, mpi_tmp_path):
    with served(strategy, mpi_tmp_path / "remote") as (url, server):
        for _ in range(2):  # the second time as after a restart
            folder = ms.data.download(f"{url}/train/", mpi_tmp_path / "node")
            data = strategy.distribute_dataset(ms.data.HDF5Dataset(folder).shuffle(seed=1).batch(8))
            parts = strategy.comm.allgather([int(x) for batch in data for x in batch["x"]])
            assert sorted(itertools.chain(*parts)) == list(range(ROWS))
        if server is not None:
            counts = {path: count for path, count in server.gets.items() if path.endswith((".h5", ".json"))}
            assert len(counts) == 5
            assert set(counts.values()) == {1}


@pytest.mark.ranks(3)
def test_each_rank_gets_the_error(strategy, mpi_tmp_path):
    with served(strategy, mpi_tmp_path / "remote") as (url, server):
        if server is not None:
            server.behave["/train/00002-of-00004.h5"] = "cut"
        strategy.comm.Barrier()
        with pytest.raises(ShardError, match=f"download: {url}/train/00002-of-00004.h5: expected .* bytes, got"):
            ms.data.download(f"{url}/train/", mpi_tmp_path / "node")
