"""Rows read through MPI-IO: those that h5py reads without it, in the same order, whatever else the ranks do meanwhile."""

import os
import subprocess

import numpy as np
import pytest

ROWS = 501


@pytest.fixture(autouse=True)
def parallel_h5py(request):
    """Skip where h5py was built without MPI, as the wheels are."""
    if "mpi" in request.fixturenames:  # a program of its own, under that MPI's Python
        python = request.getfixturevalue("mpi").python
        ask = [python, "-c", "import h5py; print(h5py.get_config().mpi)"]
        parallel = subprocess.run(ask, capture_output=True, text=True, timeout=60).stdout.strip() == "True"
    else:
        import h5py

        parallel = h5py.get_config().mpi
    if not parallel:
        pytest.skip("h5py was built without MPI; docs/developing.md has the command that builds one with MPI")


@pytest.fixture
def strategy():
    import mpistrat as ms

    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        yield strategy


@pytest.fixture
def folder(strategy, mpi_tmp_path):
    """Three files of different length, each field stored in another way; the ranks see the same files."""
    import h5py

    if strategy.rank == 0:
        x = np.arange(4.0 * ROWS).reshape(ROWS, 4)
        for number, part in enumerate((slice(0, 150), slice(150, 400), slice(400, ROWS))):
            with h5py.File(mpi_tmp_path / f"{number}.h5", "w") as file:
                file["plain"] = x[part]
                file.create_dataset("chunked", data=x[part], chunks=(16, 4))
                file.create_dataset("gzip", data=x[part], chunks=(16, 4), compression="gzip", fletcher32=True)
                file.create_dataset("cut", data=x[part], chunks=(16, 2))
                file.create_dataset("text", data=[f"row {i}" for i in range(ROWS)][part], dtype=h5py.string_dtype())
                file["y"] = np.arange(ROWS)[part]
    strategy.comm.Barrier()
    return mpi_tmp_path


@pytest.fixture
def few_blocks(monkeypatch):
    """Keep so few blocks that rows are read again and again, and a shuffle takes blocks for chunks."""
    from mpistrat.data.files import library

    monkeypatch.setattr(library, "_KEPT", 1 << 12)


def gathered(comm, rows):
    """All ranks' row numbers in rank order, on every rank."""
    if comm is None:
        return rows.tolist()
    counts = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([len(rows)], np.int64), counts)
    everything = np.empty(counts.sum(), np.int64)
    comm.Allgatherv(np.ascontiguousarray(rows, np.int64), [everything, counts])
    return everything.tolist()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("order", ["in order", "full", "block"])
@pytest.mark.parametrize("reader", ["auto", "h5py"])
def test_each_row_comes_once_in_the_order_without_mpi_io(strategy, folder, few_blocks, reader, order):
    """A global batch is communicated between steps, while the next one is read in a thread."""
    from mpistrat.data import HDF5Dataset, permute
    from mpistrat.data.feed.distributed import distribute
    from mpistrat.data.feed.plan import Workers

    def batches(driver, reader):
        rows = HDF5Dataset(folder, reader=reader, driver=driver)
        if order != "in order":
            rows = rows.shuffle(64 if order == "block" else None, seed=5, mode=order)
        return rows.batch(50)

    mpio, serial = batches("mpio", reader), distribute(batches(None, "h5py"), Workers([1]))
    data = strategy.distribute_dataset(mpio)
    assert str(data).count("(h5py") == 6, str(data)
    for epoch in range(2):
        seen = []
        for expected, batch in zip(serial, data, strict=True):
            x = 4.0 * batch["y"][:, None] + np.arange(4)
            for name in ("plain", "chunked", "gzip", "cut"):
                assert np.array_equal(batch[name], x), name
            assert batch["text"].tolist() == [f"row {i}" for i in batch["y"]]
            together = gathered(strategy.comm, batch["y"])
            assert together == expected["y"].tolist()
            seen.append(sorted(together))  # inside a batch, rows of chunks that are read as a whole stand together
        assert sorted(row for rows in seen for row in rows) == list(range(ROWS))
        if order != "block":
            positions = np.arange(ROWS)
            rows = positions if order == "in order" else permute(positions, ROWS, seed=5, epoch=epoch)
            assert seen == [sorted(rows[start : start + 50].tolist()) for start in range(0, ROWS, 50)]


@pytest.mark.ranks(1, 2, 3)
def test_threads_read_while_the_ranks_communicate(strategy, folder, few_blocks):
    from mpistrat.data import HDF5Dataset

    def dataset():
        rows = HDF5Dataset(folder, ("gzip", "y"), driver="mpio").shuffle(seed=1)
        return rows.map(lambda x, y: (x[0] - 4 * y, y), num_parallel_calls=3).batch(20).prefetch(3)

    total = np.zeros(1)
    for (zeros, y), (_, other) in zip(dataset(), dataset(), strict=True):  # two at once, in threads of their own
        assert not zeros.any()
        assert np.array_equal(y, other)
        if strategy.comm is not None:
            strategy.comm.Allreduce(np.full(1, float(len(y))), total)
            assert total[0] == len(y) * strategy.size


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("how", ["missing", "truncated", "no HDF5", "virtual"])
def test_what_is_wrong_on_one_rank_is_told_on_every_rank(strategy, tmp_path, how):
    """Here each rank has files of its own."""
    import h5py

    from mpistrat.data import HDF5Dataset
    from mpistrat.errors import ShardError

    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    bad = strategy.size - 1
    for path in paths:
        with h5py.File(path, "w") as file:
            if how == "virtual" and path == paths[1] and strategy.rank == bad:
                layout = h5py.VirtualLayout((1000, 4), "f8")
                layout[:] = h5py.VirtualSource("a.h5", "x", (1000, 4))
                file.create_virtual_dataset("x", layout)
            else:
                file["x"] = np.zeros((1000, 4))
    rows = HDF5Dataset(paths, "x", driver="mpio")
    if strategy.rank == bad and how == "missing":
        paths[1].unlink()
    elif strategy.rank == bad and how == "truncated":
        os.truncate(paths[1], 9000)
    elif strategy.rank == bad and how == "no HDF5":
        paths[1].write_bytes(b"text" * 1000)
    says = {"missing": "no such file|No such file", "virtual": "virtual dataset.*MPI-IO"}.get(how, "refuses")
    with pytest.raises(ShardError, match=rf"(?s)b\.h5.*({says})") as raised:
        strategy.distribute_dataset(rows.batch(10))
    if strategy.rank != bad:
        assert f"rank {bad}: " in str(raised.value)


@pytest.mark.ranks(1, 2, 3)
def test_damage_ends_the_reading_of_the_rank_that_meets_it(strategy, folder, tmp_path):
    """It is met by one rank, in its own time: no other one waits in MPI-IO for it."""
    import shutil

    import h5py

    from mpistrat.data import HDF5Dataset
    from mpistrat.errors import ShardError

    copy = shutil.copy(folder / "1.h5", tmp_path / "copy.h5")
    whole = HDF5Dataset(copy, "gzip", driver="mpio")
    if strategy.rank == strategy.size - 1:
        with h5py.File(copy) as file:
            chunk = file["gzip"].id.get_chunk_info(7)
        with open(copy, "r+b") as damaged:
            damaged.seek(chunk.byte_offset + chunk.size // 2)
            damaged.write(b"\xff" * 16)
        with pytest.raises(ShardError, match=r"copy\.h5: gzip: expected rows"):
            whole.rows(range(len(whole)))
        assert len(whole.rows(range(16))) == 16
    else:
        assert np.array_equal(whole.rows(range(250))[:, 0], 4.0 * np.arange(150, 400))


@pytest.mark.ranks(1, 2)
def test_colons_are_refused(strategy, tmp_path):
    """MPI-IO would take what stands before one for the name of a file system, and open something else, or nothing."""
    import h5py

    from mpistrat.data import HDF5Dataset
    from mpistrat.errors import ShardError

    with h5py.File(tmp_path / "ufs:a.h5", "w") as file:
        file["x"] = np.arange(3)
    assert HDF5Dataset(tmp_path / "ufs:a.h5", "x").rows([2]).tolist() == [2]
    with pytest.raises(ShardError, match=r"ufs:a\.h5: expected a path without a colon"):
        HDF5Dataset(tmp_path / "ufs:a.h5", "x", driver="mpio").rows([2])


@pytest.mark.ranks(1, 2)
def test_few_files_stay_open(strategy, tmp_path):
    """Each takes communicators, of which an MPI has few."""
    import h5py

    from mpistrat.data import HDF5Dataset

    for number in range(50):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.full(3, number)
    rows = HDF5Dataset(tmp_path, "x", driver="mpio")
    assert rows.rows(range(150)).tolist() == [i // 3 for i in range(150)]
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert 1 <= sum(name.startswith(str(tmp_path)) for name in names) <= 32


def _is_link(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


ENDS = """
import os, sys
how, path = sys.argv[1:]
import mpi4py
if how == "serialized":
    mpi4py.rc.thread_level = "serialized"
if how != "mpi first":
    import h5py                        # HDF5 starts before MPI, and does not hear of its end
from mpi4py import MPI
import numpy as np
import h5py
import mpistrat as ms

path = f"{path}/{MPI.COMM_WORLD.rank}/x.h5"
os.mkdir(os.path.dirname(path))
with h5py.File(path, "w") as file:
    file["x"] = np.arange(4_000_000.0).reshape(4000, 1000)        # more than is kept
try:
    rows = ms.data.HDF5Dataset(path, "x", driver="mpio")
except ms.errors.LayoutError as error:
    print(error)
    sys.exit()
strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0"])
iterator = iter(strategy.distribute_dataset(rows.batch(10 * strategy.size)))
other = iter(rows.batch(10).prefetch(2))
next(iterator), next(other)
if how == "strategy closed":
    strategy.close()
    print(sum(len(batch) for batch in other), sum(len(batch) for batch in iterator))
elif how == "exit":
    pass
else:
    MPI.Finalize()
    for read in (lambda: list(other), lambda: rows.rows([3999]), lambda: ms.data.HDF5Dataset(path, driver="mpio")):
        try:
            read()
        except (ms.errors.ClosedError, ms.errors.LayoutError) as error:
            print(type(error).__name__)
print("end")
"""


@pytest.mark.parametrize("how", ["exit", "strategy closed", "MPI ended", "mpi first"])
def test_files_and_strategy_may_end_in_any_order(mpi_run, how, tmp_path):
    """A file that were read or closed after MPI would end the process."""
    result = mpi_run(ENDS.replace("sys.argv[1:]", repr([how, str(tmp_path)])), 2)
    assert result.returncode == 0, result
    middle = {"exit": [], "strategy closed": ["3990 1990"]}.get(how, ["ClosedError", "ClosedError", "LayoutError"])
    assert [text.split("\n")[:-1] for text in result.out] == [[*middle, "end"]] * 2, result


def test_mpi_must_allow_threads(mpi_run, tmp_path):
    result = mpi_run(ENDS.replace("sys.argv[1:]", repr(["serialized", str(tmp_path)])), 2)
    assert result.returncode == 0, result
    assert all("driver: expected MPI_THREAD_MULTIPLE" in text for text in result.out), result
