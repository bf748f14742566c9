"""Sets of files on two hosts of two ranks: copies on disks of their own, which have the same names and are not the same files."""

import numpy as np
import pytest

FILES, ROWS = 5, 8


@pytest.fixture
def strategy():
    import mpistrat as ms

    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        yield strategy


def damage(path):
    """Change a bit, and nothing that a copy keeps."""
    import os

    status, data = path.stat(), bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.hosts(2)
@pytest.mark.parametrize("copied", [True, False, "damaged"])
def test_copies_on_each_host(strategy, mpi_tmp_path, copied):
    """A host's /dev/shm is its own. Copies have the times of what was copied, and may have the same numbers of inodes."""
    import shutil
    from pathlib import Path

    from mpistrat.data import HDF5Dataset, write_shards
    from mpistrat.errors import ShardError

    written = mpi_tmp_path / "set"
    if strategy.rank == 0:
        write_shards(written, {"x": np.arange(FILES * ROWS)}, num_shards=FILES)
    strategy.comm.Barrier()
    folder = Path("/dev/shm/copied-set") if copied else written
    if copied and strategy.rank % 2 == 0:
        shutil.copytree(written, folder)
    strategy.comm.Barrier()
    if copied == "damaged" and strategy.rank == strategy.size - 1:
        damage(sorted(folder.glob("*.h5"))[1])
    strategy.comm.Barrier()
    try:
        if copied == "damaged":
            with pytest.raises(ShardError, match="digest"):
                strategy.distribute_dataset(HDF5Dataset(folder, "x", verify=True).batch(4))
            return
        data = strategy.distribute_dataset(HDF5Dataset(folder, "x").shuffle(seed=1).batch(4))
        own = [number for batch in data for number in batch.tolist()]
    finally:
        strategy.comm.Barrier()
        if copied and strategy.rank % 2 == 0:
            shutil.rmtree(folder)
    assert sorted(number for numbers in strategy.comm.allgather(own) for number in numbers) == list(range(FILES * ROWS))
