"""Samples that are groups of HDF5 files, or whole files: order, shapes that differ, attributes, and samples that do not fit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpistrat.data import ArraySpec, from_groups, from_sparse
from mpistrat.errors import ShardError

EPISODES = 12


def steps(number: int) -> int:
    return 2 + number % 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """As robomimic lays its files out."""
    with h5py.File(tmp_path / "demo.hdf5", "w") as file:
        file.create_group("mask")["train"] = np.array([b"demo_0"])
        for number in range(EPISODES):
            group = file.create_group(f"data/demo_{number}")
            group.attrs["num_samples"], group.attrs["task"] = steps(number), f"lift {number}"
            group["actions"] = np.full((steps(number), 7), number, ">f8")
            group["obs/joints"] = np.full((steps(number), 3), number, "f4")
            group["reward"] = number / 2
            group["language"] = [f"words {number}"] * steps(number)
        file["data/total"] = 3
    return tmp_path / "demo.hdf5"


def test_groups_in_natural_order(path: Path) -> None:
    dataset = from_groups(path, within="data")
    assert dataset.element_spec == {
        "actions": ArraySpec((None, 7), "f8"),
        "obs/joints": ArraySpec((None, 3), "f4"),
        "reward": ArraySpec((), "f8"),
    }
    assert [float(sample["reward"]) for sample in dataset] == [number / 2 for number in range(EPISODES)]
    rows = dataset.rows([11, 0])
    assert [row.tolist() for row in rows["actions"]] == [np.full((steps(row), 7), row).tolist() for row in (11, 0)]
    assert "12 samples of actions float64[?, 7]" in str(dataset)
    assert "left out: language (text" in str(dataset)


def test_values_of_all_types_are_those_of_h5py(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(2):
            group = file.create_group(f"s/{number}")
            group["swapped"], group["flags"] = np.arange(3, dtype=">i4") + number, np.array([True, False])
            group["members"] = np.array([([1, 2], number)], [("a", ">f4", (2,)), ("b", "i1")])
            array = np.dtype(("i4", (3,)))
            group.create_dataset("arrays", (2,), array)[...] = np.arange(6).reshape(2, 3) + number
            group.create_dataset("one array", (), array)[()] = [7, 8, number]
            group["texts"], group["text"], group["none"] = np.array([b"ab", b"c"]), "größe", np.zeros((0, 4))
            group.create_dataset("unwritten", (5,), "f4", chunks=(2,), fillvalue=number)
            group["half"], group["sub/größe"] = np.float16(number), np.complex64([1j, number])
            group["kind"] = np.zeros((), h5py.enum_dtype({"a": 0, "b": 1}, "i2"))
            group.create_dataset("reference", data=group.ref)
        for number, sample in enumerate(from_groups(tmp_path / "a.h5", within="s")):
            assert len(sample) == 12
            for name, value in sample.items():
                stored = file[f"s/{number}/{name}"]
                expected = stored.asstr()[()] if name == "text" else stored[()]
                np.testing.assert_array_equal(value, expected)
                if name != "text":
                    assert np.asarray(value).dtype == expected.dtype.newbyteorder("=")


def test_samples_that_are_stored_in_other_ways(tmp_path: Path) -> None:
    """Contiguous bytes of the first sample's type are read without HDF5, the others by it."""
    rows = [np.arange(6).reshape(length, 2) + length for length in (3, 3, 3, 3, 3, 3)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, row in enumerate(rows):
            dtype = ">i4" if number == 2 else "<i4"
            options = {"chunks": (2, 2), "compression": "gzip"} if number == 3 else {}
            file.create_dataset(f"{number}/x", data=row[: number + 1], dtype=dtype, **options)
            file[f"{number}/label"] = np.bytes_("a" * (6 - number))
            file[f"{number}/big"] = np.array(number, ">f8")
    samples = from_groups(tmp_path / "a.h5", within="/")
    assert samples.element_spec == {
        "x": ArraySpec((None, 2), "i4"), "label": ArraySpec((), "S6"), "big": ArraySpec((), "f8"),
    }  # fmt: skip
    for number, sample in enumerate(samples):
        np.testing.assert_array_equal(sample["x"], rows[number][: number + 1].astype(np.int32), strict=True)
        assert (sample["label"], sample["big"]) == (b"a" * (6 - number), number)
        sample["x"][0, 0] = 7  # the user's own


def test_data_that_was_never_written(tmp_path: Path) -> None:
    """It is read as the fill value that the file sets; without one it is an error, as for HDF5Dataset."""
    for name, options in (("filled", {"fillvalue": 7}), ("plain", {}), ("chunked", {"chunks": (1, 2)})):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["0/x"] = np.zeros((3, 2), "f4")
            file.create_dataset("1/x", (3, 2), "f4", **options)
    assert (from_groups(tmp_path / "filled.h5", "x", within="/").rows([1]) == 7).all()
    for name in ("plain", "chunked"):
        with pytest.raises(ShardError, match="/1/x: 3 rows that were never written"):
            from_groups(tmp_path / f"{name}.h5", within="/")


@pytest.mark.parametrize("function", [from_groups, from_sparse])
def test_virtual_datasets_over_other_files_are_refused(tmp_path: Path, function: Callable[..., object]) -> None:
    """HDF5 reads zeros where their files are missing."""
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("gone.h5", "x", (4,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("X").attrs.update({"encoding-type": "csr_matrix", "shape": (2, 4)})
        file["X"].update({"indptr": [0, 2, 4], "indices": [0, 1, 2, 3]})
        file["X"].create_virtual_dataset("data", layout)
    options = {"fields": "data", "within": "/"} if function is from_groups else {}
    with pytest.raises(ShardError, match="a virtual dataset that draws from x in gone.h5, which is not a file"):
        function(tmp_path / "a.h5", **options)


def test_batches_of_other_lengths(path: Path) -> None:
    dataset = from_groups(path, ("obs/joints", "@num_samples", "@task"), within="data")
    joints, length, task = dataset.padded_batch(3).element(0, 1)
    assert joints.shape == (3, 4, 3)
    assert length.tolist() == [2, 3, 4]
    assert joints[:, :, 0].tolist() == [[3, 3, 0, 0], [4, 4, 4, 0], [5, 5, 5, 5]]
    assert task.tolist() == ["lift 3", "lift 4", "lift 5"]
    ragged, *_ = dataset.ragged_batch(2).peek()
    assert [row.shape for row in ragged] == [(2, 3), (3, 3)]


def test_one_sample_per_file(tmp_path: Path) -> None:
    for number in (10, 2):
        with h5py.File(tmp_path / f"file{number}.h5", "w") as file:
            file["kspace"] = np.full((number, 2), number * 1j)
            file.attrs["max"] = float(number)
    dataset = from_groups(tmp_path, ("kspace", "@max"))
    assert dataset.element_spec == (ArraySpec((None, 2), "c16"), ArraySpec((), "f8"))
    assert [(len(kspace), complex(kspace[0, 0]), float(most)) for kspace, most in dataset] == [
        (2, 2j, 2.0),
        (10, 10j, 10.0),
    ]


def test_fields_have_the_form_that_was_asked_for(path: Path) -> None:
    assert from_groups(path, "reward", within="/data/").rows([4]).tolist() == [2.0]
    assert list(from_groups(path, {"r": "reward"}, within="data").rows([0])) == ["r"]
    assert list(from_groups(path, ["reward", "@task"], within="data").peek()) == ["reward", "@task"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("actions", None, "/data/demo_5/actions: no such dataset"),
        ("actions", np.zeros((2, 7), "f4"), r"/data/demo_5/actions of float32\[2, 7\], unlike float64\[\?, 7\]"),
        ("actions", np.zeros(7), r"/data/demo_5/actions of float64\[7\], unlike float64\[\?, 7\]"),
    ],
)
def test_a_sample_that_does_not_fit(path: Path, name: str, value: object, reason: str) -> None:
    with h5py.File(path, "a") as file:
        del file[f"data/demo_5/{name}"]
        if value is not None:
            file[f"data/demo_5/{name}"] = value
    with pytest.raises(
        ShardError, match=rf"from_groups: .*demo\.hdf5: data: expected data that can be read, got {reason}"
    ):
        from_groups(path, name, within="data")


@pytest.mark.parametrize("function", [from_groups, from_sparse])
def test_a_file_that_is_not_hdf5(path: Path, function: Callable[..., object]) -> None:
    path.write_text("not HDF5")
    remedy = "The file is damaged, truncated or not HDF5"
    with pytest.raises(ShardError, match=rf"{function.__name__}: .*expected an HDF5 file.*HDF5 refuses.*{remedy}"):
        function(path)


def test_names_that_do_not_fit(path: Path) -> None:
    with pytest.raises(ShardError, match=r"demo\.hdf5: no: expected data that can be read, got no such group"):
        from_groups(path, within="no")
    with pytest.raises(ShardError, match=r"demo_0/@no: no such attribute among \['num_samples', 'task'\]"):
        from_groups(path, "@no", within="data")
    with pytest.raises(ShardError, match="demo_0/language: text, or rows of varying length, in one sample"):
        from_groups(path, "language", within="data")


def test_links_to_other_files_are_refused(path: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    with h5py.File(path, "a") as file:
        del file["data/demo_3/reward"]
        file["data/demo_3/reward"] = h5py.ExternalLink("other.h5", "x")
    with pytest.raises(ShardError, match=r"demo_3/reward: an external link at /data/demo_3/reward, to other\.h5"):
        from_groups(path, "reward", within="data")


def test_other_samples_have_other_fingerprints(tmp_path: Path) -> None:
    prints = []
    for number, lengths in enumerate([[1, 2], [1, 2], [1], [1, 3]]):
        (tmp_path / str(number)).mkdir()
        with h5py.File(tmp_path / str(number) / "a.h5", "w") as file:
            for each, length in enumerate(lengths):
                file[f"{each}/x"] = np.zeros((length, max(lengths)))
        prints.append(from_groups(tmp_path / str(number), within="/").node.fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_samples_can_be_sent_to_processes(path: Path) -> None:
    samples = from_groups(path, "reward", within="data").node._samples
    assert pickle.loads(pickle.dumps(samples))[4] == 2.0
