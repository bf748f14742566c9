"""Names in files, in the environment and on the command line: what is printed of them has no control characters."""

import contextlib

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.cli.main import main
from mpistrat.cross_device.auto import Chooser

BAD = "w\x1b]0;owned\x07\x9b2J\r\nmpistrat WARNING rank 9: forged"


def is_clean(text):
    return all(char.isprintable() or char == "\n" for char in text) and "\nmpistrat WARNING" not in text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a set of HDF5 files whose names, and all names in them, are bad."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / BAD).mkdir()
    for number, rows in enumerate((4, 4, 3)):
        with h5py.File(tmp_path / BAD / f"{BAD}-{number}.h5", "w") as file:
            file.create_dataset(BAD, data=np.arange(float(rows)), compression="gzip").attrs[BAD] = BAD
            if number == 2:
                file.create_dataset(f"other{BAD}", data=np.arange(4.0))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["shards", "info", f"{BAD}/*.h5"], ["shards", "info", f"{BAD}/*-[01].h5"], ["shards", "info", f"{BAD}/none.h5"],
        ["shards", "info", f"{BAD}/*.h5", "--fields", BAD], ["shards", "check", f"{BAD}/*.h5"], ["shards", "write", BAD, BAD],
        ["run", f"none{BAD}"], ["run", "-n", BAD, "true"], ["run", "--strategy", BAD, "true"], ["top", BAD], ["top", "1", BAD],
        ["stacks", BAD], ["resize", BAD], ["plan", "--parameters", "1", "--compute", "1", "--like", BAD],
        ["replay", f"{BAD}/{BAD}-0.h5", "true"], ["replay", BAD, "true"], ["job", "--site", BAD, "true"], ["serve", BAD], [BAD],
    ],
)  # fmt: skip
def test_commands(folder, words, capfd):
    with contextlib.suppress(SystemExit):
        main(words)
    said = capfd.readouterr()
    assert (said.out or said.err) and is_clean(said.out) and is_clean(said.err), said


def test_a_damaged_checkpoint(tmp_path):
    with ms.OneDeviceStrategy() as strategy:
        with strategy.scope():
            ms.Variable(np.zeros(3), name=BAD)
        strategy.save(tmp_path / f"{BAD}.h5")
        with h5py.File(tmp_path / f"{BAD}.h5", "r+") as file:
            (dataset,) = file["variables"].values()
            dataset[0] = 5
        with pytest.raises(OSError, match="is not as it was saved") as error:
            strategy.restore(tmp_path / f"{BAD}.h5")
        assert str(error.value).isprintable()
        with pytest.raises(OSError, match="no such file") as error:
            strategy.restore(tmp_path / BAD)
        assert str(error.value).isprintable()


@pytest.mark.parametrize("fields", [f"none{BAD}", f"other{BAD}", [BAD, f"other{BAD}"]], ids=range(3))
def test_fields_that_are_not_there(folder, fields):
    with pytest.raises((ms.errors.ShardError, ValueError)) as error:
        next(iter(ms.data.HDF5Dataset(f"{BAD}/*.h5", fields=fields)))
    assert str(error.value).isprintable()


def test_what_is_shown_of_datasets_and_tables(folder):
    rows = ms.data.HDF5Dataset(f"{BAD}/{BAD}-0.h5", fields=BAD)
    for dataset in (rows, rows.map(lambda x: x), rows.shuffle(1)):
        with ms.OneDeviceStrategy() as strategy:
            distributed = str(strategy.distribute_dataset(dataset.batch(2)))
        for text in (str(dataset), repr(dataset), distributed):
            assert is_clean(text), text
    rule = {"below": None, "algorithm": "MPI", "why": BAD}
    rules = [{**rule, "device": device, "nodes": nodes} for device in ("cpu", "gpu") for nodes in ("one", "several")]
    assert is_clean(str(Chooser({"rules": rules, "measured": BAD})))
