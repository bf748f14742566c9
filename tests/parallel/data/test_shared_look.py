"""The ranks of a strategy look into the files of a dataset for each other: what they find, and which errors all of them get."""

import os

import numpy as np
import pytest

FILES, ROWS = 5, 7


@pytest.fixture
def strategy():
    import mpistrat as ms

    with ms.MultiWorkerMirroredStrategy() as strategy:
        yield strategy


def write(strategy, folder, damage=None):
    """Files of all kinds of storage, without a manifest; and what `damage` makes of the third."""
    import h5py

    if strategy.rank == 0:
        folder.mkdir()
        for number in range(FILES):
            rows = np.arange(number * ROWS, (number + 1) * ROWS)
            with h5py.File(folder / f"{number}.h5", "w") as file:
                file["plain"] = rows
                file.create_dataset("packed", data=rows, chunks=(3,), compression="gzip", shuffle=True)
                file["text"] = [f"row {row}" for row in rows]
                file["pair"] = np.rec.fromarrays([rows, rows / 2], dtype=[("i", "<i8"), ("x", "<f4")])
        if damage is not None:
            damage(folder / "2.h5")
    strategy.comm.Barrier()


def refuse_to_look(monkeypatch):
    """From now on, who opens a file to see what it holds fails."""
    from mpistrat.data.files import hdf5

    def refuse(*arguments, **options):
        raise AssertionError("a look of one's own")

    monkeypatch.setattr(hdf5, "look", refuse)


@pytest.mark.ranks(1, 2, 3)
def test_ranks_read_what_others_have_found(strategy, mpi_tmp_path, monkeypatch):
    from mpistrat.data import HDF5Dataset

    write(strategy, mpi_tmp_path / "files")
    rows = HDF5Dataset(mpi_tmp_path / "files")
    data = strategy.distribute_dataset(rows.shuffle(seed=1).batch(4))
    refuse_to_look(monkeypatch)
    batches = list(data)
    plain, packed, text, pair = (
        np.concatenate([b[name] for b in batches]) for name in ("plain", "packed", "text", "pair")
    )
    assert np.array_equal(plain, packed)
    assert text.tolist() == [f"row {row}" for row in plain]
    assert np.array_equal(pair["i"], plain)
    assert np.array_equal(pair["x"], (plain / 2).astype(np.float32))
    assert sorted(np.concatenate(strategy.comm.allgather(plain))) == list(range(FILES * ROWS))
    assert len(set(strategy.comm.allgather(rows.fingerprint()))) == 1
    assert rows.peek()["plain"] == 0
    again = strategy.distribute_dataset(rows.batch(4))  # all have looked
    assert len(again) == -(-FILES * ROWS // 4)


@pytest.mark.ranks(2, 3)
def test_a_rank_that_has_looked_by_itself_compares_equal(strategy, mpi_tmp_path):
    from mpistrat.data import HDF5Dataset

    write(strategy, mpi_tmp_path / "files")
    rows = HDF5Dataset(mpi_tmp_path / "files", "packed")
    before = rows.fingerprint() if strategy.rank == 1 else 0
    data = strategy.distribute_dataset(rows.batch(5))
    assert before in (0, rows.fingerprint())
    assert sum(strategy.comm.allgather(sum(len(batch) for batch in data))) == FILES * ROWS


def cut(path):
    os.truncate(path, 1000)


def other_rows(path):
    import h5py

    with h5py.File(path, "a") as file:
        del file["plain"]
        file["plain"] = np.zeros((ROWS, 2))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("damage", "told"), [(os.remove, "no such file"), (cut, "HDF5 refuses"), (other_rows, "like ")]
)
def test_every_rank_gets_the_error_with_the_file(strategy, mpi_tmp_path, damage, told):
    from mpistrat.data import HDF5Dataset
    from mpistrat.errors import ShardError

    write(strategy, mpi_tmp_path / "files", damage)
    names = [mpi_tmp_path / "files" / f"{number}.h5" for number in range(FILES)]
    with pytest.raises(ShardError, match=rf"{names[2]}.*{told}"):
        strategy.distribute_dataset(HDF5Dataset(names).batch(4))
    kept = HDF5Dataset(names, on_error="skip")
    data = strategy.distribute_dataset(kept.batch(4))
    assert [path for path, _ in kept.skipped] == [names[2]]
    assert sum(strategy.comm.allgather(sum(len(batch["plain"]) for batch in data))) == (FILES - 1) * ROWS


@pytest.mark.ranks(2, 3)
def test_a_digest_that_one_rank_finds_wrong(strategy, mpi_tmp_path):
    from mpistrat.data import HDF5Dataset, write_shards
    from mpistrat.errors import ShardError

    if strategy.rank == 0:
        paths = write_shards(mpi_tmp_path / "set", {"x": np.arange(100)}, num_shards=5)
        damaged = bytearray(paths[3].read_bytes())
        damaged[-1] ^= 1
        paths[3].write_bytes(damaged)
    strategy.comm.Barrier()
    with pytest.raises(ShardError, match=r"00003-of-00005\.h5.*digest"):
        strategy.distribute_dataset(HDF5Dataset(mpi_tmp_path / "set").batch(4))
    data = strategy.distribute_dataset(HDF5Dataset(mpi_tmp_path / "set", on_error="skip").batch(4))
    assert sum(strategy.comm.allgather(sum(len(batch["x"]) for batch in data))) == 80


@pytest.mark.ranks(3)
def test_an_error_of_one_rank_is_no_hang(strategy, mpi_tmp_path, monkeypatch):
    from mpistrat.data import HDF5Dataset

    write(strategy, mpi_tmp_path / "files")
    rows = HDF5Dataset(mpi_tmp_path / "files")
    if strategy.rank == 0:
        refuse_to_look(monkeypatch)
    with pytest.raises(AssertionError, match="a look of one's own"):
        strategy.distribute_dataset(rows.batch(4))


@pytest.mark.ranks(2, 3)
def test_ranks_with_files_of_their_own_look_for_themselves(strategy, mpi_tmp_path, tmp_path):
    from mpistrat.data import HDF5Dataset, from_arrays, write_shards
    from mpistrat.errors import CollectiveMismatchError

    write_shards(tmp_path, {"x": np.arange(20)}, num_shards=2)
    data = strategy.distribute_dataset(HDF5Dataset(tmp_path, "x").batch(4))
    assert sum(strategy.comm.allgather(sum(len(batch) for batch in data))) == 20
    rows = from_arrays(np.arange(20)) if strategy.rank == 1 else HDF5Dataset(tmp_path, "x")
    with pytest.raises(CollectiveMismatchError, match="different datasets"):
        strategy.distribute_dataset(rows.batch(4))
