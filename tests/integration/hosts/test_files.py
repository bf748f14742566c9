"""Sets of files on two hosts of two ranks: copies on disks of their own, which have the same names and are not the same files."""

import numpy as np
import pytest

FILES, ROWS = 5, 8


@pytest.fixture
def strategy():
    import mpistrat as ms

    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        yield strategy


@pytest.mark.hosts(2)
@pytest.mark.parametrize("copied", [True, False])
def test_copies_on_each_host(strategy, mpi_tmp_path, copied):
    """A host's /dev/shm is its own."""
    import shutil
    from pathlib import Path

    from mpistrat.data import HDF5Dataset, write_shards

    written = mpi_tmp_path / "set"
    if strategy.rank == 0:
        write_shards(written, {"x": np.arange(FILES * ROWS)}, num_shards=FILES)
    strategy.comm.Barrier()
    folder = Path("/dev/shm/copied-set") if copied else written
    if copied and strategy.rank % 2 == 0:
        shutil.copytree(written, folder, copy_function=shutil.copy)  # with other times
    strategy.comm.Barrier()
    try:
        data = strategy.distribute_dataset(HDF5Dataset(folder, "x").shuffle(seed=1).batch(4))
        own = [number for batch in data for number in batch.tolist()]
    finally:
        strategy.comm.Barrier()
        if copied and strategy.rank % 2 == 0:
            shutil.rmtree(folder)
    assert sorted(number for numbers in strategy.comm.allgather(own) for number in numbers) == list(range(FILES * ROWS))
