"""Rows that were never written: HDF5 returns zeros for them, and a line in the log says so, unless the file sets a fill value."""

import logging
import re

import h5py
import numpy as np
import pytest

import mpistrat as ms


@pytest.fixture
def notes(caplog):
    """The rows and the warnings of a dataset of some files."""

    def of(files, **settings):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mpistrat"):
            dataset = ms.data.HDF5Dataset(files, **settings)
            rows = [np.asarray(row).copy() for row in dataset]
        return rows, [record.getMessage() for record in caplog.records]

    return of


def partly(path, shape=(100, 4), chunks=(10, 4), rows=60, **settings):
    """A writer that was killed after some rows."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", shape, "f8", chunks=chunks, **settings)
        dataset[:rows] = 1.0
    return path


@pytest.mark.parametrize("reader", ["auto", "h5py"])
@pytest.mark.parametrize(
    ("chunks", "rows", "missing"),
    [
        ((10, 4), 60, 40),
        ((10, 2), 60, 40),  # chunks of parts of rows
        ((7, 3), 60, 37),  # the last chunk with a written row has all of its rows
        ((7, 3), 1, 93),
        ((100, 1), 100, 0),
        ((10, 4), 100, 0),
    ],
)
def test_a_dataset_of_which_a_part_was_written(tmp_path, notes, reader, chunks, rows, missing):
    path = partly(tmp_path / "a.h5", chunks=chunks, rows=rows)
    found, texts = notes(path, fields="x", reader=reader)
    assert len(found) == 100 and found[0][0] == 1
    if missing:
        assert len(texts) == 1
        assert f"{path}: x: {missing} of 100 rows were never written" in texts[0]
        assert "fillvalue=0" in texts[0]
    else:
        assert not texts


def test_columns_that_were_never_written(tmp_path, notes):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (100, 4), "f8", chunks=(10, 2))[:, :2] = 1.0
    _, texts = notes(tmp_path / "a.h5", fields="x")
    assert "100 of 100 rows were never written, or not whole" in texts[0]


@pytest.mark.parametrize(
    "settings", [{"compression": "gzip"}, {"shuffle": True, "fletcher32": True}, {"maxshape": (None, 4)}]
)
def test_all_kinds_of_chunks(tmp_path, notes, settings):
    _, texts = notes(partly(tmp_path / "a.h5", **settings), fields="x")
    assert "40 of 100 rows" in texts[0]


def test_rows_by_which_a_dataset_was_enlarged(tmp_path, notes):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", (20,), "f8", chunks=(10,), maxshape=(None,))
        dataset[:] = 1.0
        dataset.resize(70, axis=0)
    _, texts = notes(tmp_path / "a.h5", fields="x")
    assert "50 of 70 rows" in texts[0]


@pytest.mark.parametrize("value", [0.0, np.nan, -1.0])
def test_a_fill_value_of_the_file_is_meant(tmp_path, notes, value):
    found, texts = notes(partly(tmp_path / "a.h5", fillvalue=value), fields="x")
    assert not texts
    assert np.array_equal(found[-1], np.full(4, value), equal_nan=True)


def test_strings_that_were_never_written(tmp_path, notes):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (20,), h5py.string_dtype(), chunks=(5,))[:5] = "a"
    _, texts = notes(tmp_path / "a.h5", fields="x")
    assert "15 of 20 rows" in texts[0]


def test_each_file_and_dataset_is_named_once(tmp_path, notes):
    for name in ("a", "b"):
        partly(tmp_path / f"{name}.h5")
    _, texts = notes(tmp_path, fields="x")
    assert [text.split(": ")[1] for text in texts] == [str(tmp_path / f"{name}.h5") for name in ("a", "b")]
    assert not notes(tmp_path, fields="x")[1]


@pytest.mark.parametrize("whole", [True, False])
def test_virtual_datasets_over_files_of_which_a_part_was_written(tmp_path, notes, whole):
    source = partly(tmp_path / "source.h5", rows=100 if whole else 60)
    layout = h5py.VirtualLayout((120 if whole else 100, 4), "f8")
    layout[:100] = h5py.VirtualSource(source, "x", (100, 4))
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    _, texts = notes([tmp_path / "v.h5", source], fields="x")
    name, count = ("v.h5", "20 of 120") if whole else ("source.h5", "40 of 100")
    assert len(texts) == 1 and f"{tmp_path / name}: x: {count} rows" in texts[0]


@pytest.mark.parametrize("reader", ["auto", "h5py"])
@pytest.mark.parametrize("rows", [100, 60])
def test_a_fill_value_that_is_undefined(tmp_path, notes, reader, rows):
    """As H5Pset_fill_value(…, NULL) makes it, of which h5py has none. A file of old libraries could not be read."""
    path = partly(tmp_path / "a.h5", rows=rows)
    # Version 2, allocated by chunks, filled always (older versions of h5py) or if set; defined, no bytes: the default.
    defined = rb"(\x02\x03[\x00\x02])\x01\x00{4}"
    data, found = re.subn(defined, lambda match: match[1] + bytes(5), path.read_bytes())
    assert found == 1
    path.write_bytes(data)
    with h5py.File(path) as file:
        assert file["x"].id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
    found, texts = notes(path, fields="x", reader=reader)
    assert np.array_equal(np.stack(found)[:rows], np.ones((rows, 4)))
    assert len(texts) == (rows < 100)
