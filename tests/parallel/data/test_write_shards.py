"""Every rank writes its own shards; together they are one set, or none."""

import re
from pathlib import Path

import numpy as np
import pytest


def rows_of(rank):
    """The rows of a rank, no two of whose counts are equal; rank 1 has none."""
    count = 0 if rank == 1 else 7 * rank + 5
    return {"x": 1000 * rank + np.arange(3 * count).reshape(count, 3), "rank": np.full(count, rank, np.int32)}


def check_nothing_new(comm, folder, before):
    comm.Barrier()
    assert sorted(Path(folder).iterdir()) == before
    comm.Barrier()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunk_rows": 3}], ids=["contiguous", "gzip"])
def test_the_set_is_the_ranks_rows_in_rank_order(mpi_tmp_path, options):
    from mpi4py import MPI

    from mpistrat.data import HDF5Dataset, ShardWriter

    comm = MPI.COMM_WORLD
    mine = rows_of(comm.rank)
    for _ in range(2):  # the second time over the first set
        with ShardWriter(mpi_tmp_path / "all-*.h5", rows_per_shard=4, comm=comm, **options) as writer:
            for i in range(0, len(mine["x"]), 3):
                writer.write({name: array[i : i + 3] for name, array in mine.items()})
        comm.Barrier()
        parts = [rows_of(rank) for rank in range(comm.size)]
        counts = [len(part["x"]) for part in parts]
        shards = sum(-(-count // 4) for count in counts)
        names = [f"all-{i:05d}-of-{shards:05d}.h5" for i in range(shards)]
        assert [path.name for path in writer.paths] == names
        assert sorted(path.name for path in mpi_tmp_path.iterdir()) == [*names, "all-manifest.json"]
        found = HDF5Dataset(mpi_tmp_path / "all-*.h5", verify=True)
        rows = found.rows(range(len(found)))
        for name in ("x", "rank"):
            assert np.array_equal(rows[name], np.concatenate([part[name] for part in parts]))
        comm.Barrier()


@pytest.mark.ranks(2, 3)
def test_a_function_of_the_rank_and_strings(mpi_tmp_path):
    from mpi4py import MPI

    from mpistrat.base.partition import block
    from mpistrat.data import HDF5Dataset, write_shards

    comm = MPI.COMM_WORLD
    write_shards(
        mpi_tmp_path,
        lambda rank, size: ({"i": i, "text": "é" * i} for i in range(*block(10, size, rank))),
        compression="lzf",
        comm=comm,
    )
    found = HDF5Dataset(mpi_tmp_path).rows(range(10))
    assert found["i"].tolist() == list(range(10))
    assert found["text"].tolist() == ["é" * i for i in range(10)]
    comm.Barrier()


@pytest.mark.ranks(1, 2, 4)
def test_a_set_without_rows(mpi_tmp_path):
    from mpi4py import MPI

    from mpistrat.data import HDF5Dataset, ShardWriter

    comm = MPI.COMM_WORLD
    with ShardWriter(mpi_tmp_path, comm=comm) as writer:
        if comm.rank == comm.size - 1 or comm.rank == 1:
            writer.write({"x": np.zeros((0, 2))})
    assert [path.name for path in writer.paths] == ["00000-of-00001.h5"]
    assert len(HDF5Dataset(mpi_tmp_path)) == 0
    comm.Barrier()
    with pytest.raises(ValueError, match="rows to write"), ShardWriter(mpi_tmp_path, comm=comm):
        pass
    comm.Barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", ["argument", "rows", "context", "close", "rename"])
def test_an_error_on_one_rank_is_one_on_all_and_leaves_nothing(mpi_tmp_path, monkeypatch, where):
    from mpi4py import MPI

    from mpistrat.data import HDF5Dataset, ShardWriter
    from mpistrat.data.shards.new_shard import NewShard
    from mpistrat.errors import ShardError

    comm = MPI.COMM_WORLD
    guilty = comm.size - 1
    with ShardWriter(mpi_tmp_path, comm=comm) as writer:
        writer.write({"x": np.arange(3)})
    comm.Barrier()
    before = sorted(mpi_tmp_path.iterdir())
    comm.Barrier()

    def fail(*args):
        raise OSError("no space left on device")

    if comm.rank == guilty and where == "close":
        monkeypatch.setattr(NewShard, "finish", fail)
    if comm.rank == 0 and where == "rename":
        monkeypatch.setattr("mpistrat.data.shards.writer.write_unfinished", fail)
    kinds = {"argument": ValueError, "rows": ValueError, "context": KeyError}
    own = {**kinds, "close": OSError, "rename": OSError}[where]
    culprit = 0 if where == "rename" else guilty
    with pytest.raises(own if comm.rank == culprit else ShardError) as caught:
        layout = "wrong" if comm.rank == guilty and where == "argument" else "contiguous"
        with ShardWriter(mpi_tmp_path, comm=comm, layout=layout, rows_per_shard=2) as writer:
            writer.write({"x": np.arange(100, 105)})
            if comm.rank == guilty and where == "rows":
                writer.write({"y": np.arange(100, 105)})
            if comm.rank == guilty and where == "context":
                raise KeyError("mine")
    if comm.rank != culprit:
        assert re.search(f"got rank {culprit}: {own.__name__}", str(caught.value))
    monkeypatch.undo()
    check_nothing_new(comm, mpi_tmp_path, before)
    assert HDF5Dataset(mpi_tmp_path, verify=True).rows(range(3 * comm.size))["x"].tolist() == [0, 1, 2] * comm.size
    comm.Barrier()


@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree_are_told(mpi_tmp_path):
    from mpi4py import MPI

    from mpistrat.data import ShardWriter
    from mpistrat.errors import CollectiveMismatchError

    comm = MPI.COMM_WORLD
    with pytest.raises(CollectiveMismatchError, match=r"rank 0.*layout='contiguous'.*; rank.*layout='chunked'"):
        ShardWriter(mpi_tmp_path, layout="chunked" if comm.rank else "contiguous", comm=comm)
    dtype = np.float32 if comm.rank == 1 else np.float64
    with pytest.raises(CollectiveMismatchError, match="as on rank 0, got .*float32|<f4.* on rank 1"):  # noqa: SIM117
        with ShardWriter(mpi_tmp_path, comm=comm) as writer:
            writer.write({"x": np.zeros(3, dtype)})
    check_nothing_new(comm, mpi_tmp_path, [])


@pytest.mark.ranks(1, 2, 3)
def test_a_table_whose_column_changes_its_kind_on_one_rank(mpi_tmp_path):
    from mpi4py import MPI

    from mpistrat.cli.main import main
    from mpistrat.data import HDF5Dataset

    comm = MPI.COMM_WORLD
    count = 200_001
    b = [str(i % 7) for i in range(count)]
    b[150_000] = "0.5"
    if comm.rank == 0:
        (mpi_tmp_path / "t.csv").write_text("a,b\n" + "".join(f"{i},{cell}\n" for i, cell in enumerate(b)))
    comm.Barrier()
    assert main(["shards", "write", str(mpi_tmp_path / "set"), str(mpi_tmp_path / "t.csv")]) == 0
    found = HDF5Dataset(mpi_tmp_path / "set", verify=True).rows(range(count))
    assert np.array_equal(found["a"], np.arange(count))
    assert found["b"].tolist() == list(map(float, b))
    comm.Barrier()
