"""Real ranks read their own parts of one dataset: each sample once, in one order, without a word between them."""

import numpy as np
import pytest


def gathered(comm, rows):
    """All ranks' rows in rank order, on every rank."""
    counts = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([len(rows)], np.int64), counts)
    everything = np.empty(counts.sum(), np.int64)
    comm.Allgatherv(np.ascontiguousarray(rows, np.int64), [everything, counts])
    return everything.tolist(), counts.tolist()


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_rank_reads_its_part_of_the_shards():
    import tempfile
    from pathlib import Path

    from mpi4py import MPI

    from mpistrat.data import HDF5Dataset, write_shards
    from mpistrat.data.distribution.distributed_dataset import distribute
    from mpistrat.data.distribution.workers import Workers

    comm = MPI.COMM_WORLD
    name = np.zeros(512, np.uint8)
    scratch = None
    if comm.rank == 0:
        scratch = tempfile.TemporaryDirectory()
        write_shards(scratch.name, {"x": np.arange(303.0).reshape(101, 3), "y": np.arange(101)}, num_shards=3)
        encoded = np.frombuffer(scratch.name.encode(), np.uint8)
        name[: len(encoded)] = encoded
    comm.Bcast(name)
    directory = Path(name.tobytes().rstrip(b"\0").decode())

    whole = HDF5Dataset(directory, verify=True).shuffle(seed=5).batch(16)
    mine = distribute(whole, Workers([1] * comm.size, comm.rank))
    for _ in range(2):
        for step, (expected, batch) in enumerate(zip(whole, mine, strict=True)):
            assert np.array_equal(batch["x"][:, 0], 3.0 * batch["y"])
            rows, counts = gathered(comm, batch["y"])
            assert rows == expected["y"].tolist(), step
            assert max(counts) - min(counts) <= 1
    comm.Barrier()
    if scratch is not None:
        scratch.cleanup()
