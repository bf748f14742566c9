"""Every source on ranks: each row once, the batches of one rank, caches, and files that differ between ranks."""

import itertools

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError, ShardError
from tests.harness.sources import ROWS, SOURCES, WITH_FILES, V, X, written


def opened(strategy, name, folder):
    """Return the dataset, whose files one rank writes; skip the test on all ranks where it lacks a library."""
    skipped = ""
    if strategy.rank == 0:
        try:
            written(name, folder)
        except pytest.skip.Exception as reason:
            skipped = str(reason)
    skipped = strategy.comm.bcast(skipped)
    if skipped:
        pytest.skip(skipped)
    return SOURCES[name].opened(folder)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", SOURCES)
def test_batches_of_all_ranks_are_those_of_the_permutation(strategy, name, mpi_tmp_path):
    dataset = opened(strategy, name, mpi_tmp_path / "files")
    data = strategy.distribute_dataset(dataset.shuffle(seed=3, mode="full").batch(6))
    for epoch in range(2):
        batches = [strategy.comm.allgather((batch["x"], batch["v"])) for batch in data]
        order = ms.data.permute(np.arange(ROWS), ROWS, seed=3, epoch=epoch)
        assert len(batches) == 4
        for number, parts in enumerate(batches):
            rows = np.sort(order[6 * number : 6 * number + 6])
            x, v = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            np.testing.assert_array_equal(x[np.argsort(x)], X[rows], strict=True)
            np.testing.assert_array_equal(v[np.argsort(x)], V[rows], strict=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scope", ["rank", "node", "job"])
@pytest.mark.parametrize("name", WITH_FILES)
def test_caches(strategy, name, scope, mpi_tmp_path):
    dataset = opened(strategy, name, mpi_tmp_path / "files")
    data = strategy.distribute_dataset(dataset.cache(scope).shuffle(seed=1).batch(6))
    for _ in range(2):
        parts = strategy.comm.allgather([x // 3 for batch in data for x in batch["x"].tolist()])
        assert sorted(itertools.chain(*parts)) == list(range(ROWS))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", WITH_FILES)
def test_files_that_differ_between_ranks(strategy, name, mpi_tmp_path):
    opened(strategy, name, mpi_tmp_path / "files")
    folder = mpi_tmp_path / str(strategy.rank)
    dataset = written(name, folder, X[strategy.rank :], V[strategy.rank :])
    with pytest.raises(CollectiveMismatchError):
        strategy.distribute_dataset(dataset.batch(2))


@pytest.mark.ranks(2, 3)
def test_urls(strategy, mpi_tmp_path):
    """Ranks look into HDF5 files for each other, also for remote ones."""
    pytest.importorskip("fsspec")
    for name in ("hdf5", "hdf5_chunked", "tar"):
        opened(strategy, name, mpi_tmp_path / name)
        dataset = SOURCES[name].opened(f"file://{mpi_tmp_path / name}")
        data = strategy.distribute_dataset(dataset.shuffle(seed=3, mode="full").batch(6))
        parts = strategy.comm.allgather([(batch["x"], batch["v"]) for batch in data])
        order = ms.data.permute(np.arange(ROWS), ROWS, seed=3, epoch=0)
        for number in range(4):
            rows = np.sort(order[6 * number : 6 * number + 6])
            x, v = (np.concatenate([part[number][leaf] for part in parts]) for leaf in (0, 1))
            np.testing.assert_array_equal(x[np.argsort(x)], X[rows], strict=True)
            np.testing.assert_array_equal(v[np.argsort(x)], V[rows], strict=True)
    if strategy.rank == 0:
        next((mpi_tmp_path / "hdf5_chunked").glob("*-of-*.h5")).unlink()
    strategy.comm.barrier()
    with pytest.raises(ShardError, match=r"file://.*of-00003\.h5"):
        strategy.distribute_dataset(SOURCES["hdf5_chunked"].opened(f"file://{mpi_tmp_path}/hdf5_chunked").batch(2))
