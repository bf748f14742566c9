"""Dataset.save and load: TensorFlow's example, every structure that comes back, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.base import nest
from mpistrat.data import ArraySpec, Dataset, HDF5Dataset, from_arrays


def listed(elements: Any) -> list[Any]:
    return [np.asarray(element).tolist() for element in elements]


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    Dataset.range(2).save(tmp_path / "saved_data")
    loaded = Dataset.load(tmp_path / "saved_data")
    assert listed(loaded) == [0, 1]
    assert loaded.node.random_access
    assert loaded.element_spec == ArraySpec((), np.int64)


STRUCTURES = [
    (np.arange(3), np.arange(6.0).reshape(3, 2)),
    {"x": np.arange(3), "label": np.array([True, False, True])},
    ({"image": np.zeros((3, 2, 2), np.uint8), "more": (np.arange(3), {"deep": np.ones(3)})}, np.arange(3)),
    (np.arange(3),),
]


@pytest.mark.parametrize("arrays", STRUCTURES, ids=["tuple", "dict", "nested", "tuple of one"])
@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_structures_come_back(arrays: Any, compression: str | None, tmp_path: Path) -> None:
    rows = from_arrays(arrays)
    rows.save(tmp_path, compression)
    loaded = Dataset.load(tmp_path, compression=compression)
    assert loaded.element_spec == rows.element_spec
    assert len(loaded) == 3
    for saved, read in zip(rows, loaded, strict=True):
        assert nest.paths(read) == nest.paths(saved)
        assert listed(nest.flatten(read)) == listed(nest.flatten(saved))
    assert listed(nest.flatten(loaded.rows([2, 0]))) == listed(nest.flatten(rows.rows([2, 0])))


def test_strings_rows_of_varying_length_and_no_rows(tmp_path: Path) -> None:
    from_arrays((["a", "bc"], [1, 2])).save(tmp_path / "strings")
    assert [(word, int(n)) for word, n in Dataset.load(tmp_path / "strings")] == [("a", 1), ("bc", 2)]
    ragged = Dataset.range(3).map(np.arange, element_spec=ArraySpec((None,), np.int64))
    ragged.save(tmp_path / "ragged")
    assert listed(Dataset.load(tmp_path / "ragged")) == [[], [0], [0, 1]]
    Dataset.range(0).save(tmp_path / "none")
    assert list(Dataset.load(tmp_path / "none")) == []
    numbers = Dataset.range(200).filter(lambda x: x % 3 == 0)  # read in order, in several pieces
    numbers.save(tmp_path / "order")
    assert listed(Dataset.load(tmp_path / "order")) == list(range(0, 200, 3))


def test_dicts_are_plain_shards(tmp_path: Path) -> None:
    from_arrays({"x": np.arange(3), "y": np.arange(3) * 2}).save(tmp_path)
    assert [int(y) for y in HDF5Dataset(tmp_path, fields="y")] == [0, 2, 4]


def test_what_is_saved_is_the_next_epoch(tmp_path: Path) -> None:
    rows = Dataset.range(20).shuffle(seed=1)
    orders = [listed(rows.node.elements(epoch)) for epoch in range(3)]
    assert listed(rows) == orders[0]
    rows.save(tmp_path)
    assert listed(Dataset.load(tmp_path)) == orders[1]
    assert listed(rows) == orders[2]
    rows.save(tmp_path)  # which replaces the older set
    assert listed(Dataset.load(tmp_path)) != orders[1]


def test_what_cannot_be_saved_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Dataset\.save: expected a dataset of rows, got one that is batched"):
        Dataset.range(3).batch(2).save(tmp_path)
    with pytest.raises(ValueError, match=r"Dataset\.save: expected a dataset with an end.*take\(\)"):
        Dataset.counter().save(tmp_path)
    with pytest.raises(ValueError, match=r"compression: expected None, 'NONE' or 'GZIP', got 'SNAPPY'"):
        Dataset.range(3).save(tmp_path, compression="SNAPPY")
    for key in ("a/b", "(0)", 3):
        with pytest.raises(ValueError, match=r"Dataset\.save: expected keys that are valid names in HDF5"):
            from_arrays({key: np.arange(2)}).save(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match=r"none', where there is no such set"):
        Dataset.load(tmp_path / "none")


def test_another_spec_than_the_saved_one_is_told(tmp_path: Path) -> None:
    rows = from_arrays((np.arange(3), np.ones(3, np.float32)))
    rows.save(tmp_path)
    assert len(Dataset.load(tmp_path, rows.element_spec)) == 3
    with pytest.raises(ValueError, match=r"Dataset\.load: element_spec: expected .*float32.*, as was saved, got"):
        Dataset.load(tmp_path, (ArraySpec((), np.int64), ArraySpec((), np.float64)))


def test_a_snapshot_is_made_once_and_is_epoch_0(tmp_path: Path) -> None:
    calls = []

    def squared(x: int) -> int:
        calls.append(int(x))
        return int(x) ** 2

    for source in (Dataset.range(6), Dataset.range(6).filter(lambda x: True)):
        folder = tmp_path / str(source.node.random_access)
        rows = source.map(squared).snapshot(folder)
        assert not folder.exists()
        assert listed(rows) == [0, 1, 4, 9, 16, 25]
        made = len(calls)
        assert listed(rows) == listed(rows.skip(0)) == [0, 1, 4, 9, 16, 25]
        assert sorted(listed(rows.shuffle(6, seed=1))) == [0, 1, 4, 9, 16, 25]
        assert rows.element(3, 2) == 4
        assert len(calls) == made
        again = source.map(squared).snapshot(folder)  # as in a later run
        assert listed(again) == [0, 1, 4, 9, 16, 25]
        assert len(calls) <= made + 1  # what elements look like
    shuffled = Dataset.range(20).shuffle(seed=1)
    kept = shuffled.snapshot(tmp_path / "shuffled", "GZIP")
    assert listed(kept) == listed(kept) == listed(shuffled.node.elements(0))
    words = from_arrays(["a", "bc"]).snapshot(tmp_path / "words")
    assert list(words) == ["a", "bc"]


def test_a_snapshot_of_another_dataset_is_told(tmp_path: Path) -> None:
    list(Dataset.range(6).snapshot(tmp_path))
    with pytest.raises(ValueError, match=r"Dataset\.snapshot: path: expected 7 rows in .*, got 6.*another path"):
        list(Dataset.range(7).snapshot(tmp_path))
    with pytest.raises(ValueError, match=r"Dataset\.snapshot: path: expected rows of float64"):
        list(Dataset.range(6).map(float).snapshot(tmp_path))
    with pytest.raises(ValueError, match=r"Dataset\.snapshot: expected a dataset of rows, got one that is batched"):
        Dataset.range(6).batch(2).snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"Dataset\.snapshot: expected a dataset with an end"):
        Dataset.counter().snapshot(tmp_path)
    with pytest.raises(
        ValueError, match=r"Dataset\.snapshot: compression: expected 'AUTO', 'GZIP' or None, got 'SNAPPY'"
    ):
        Dataset.range(6).snapshot(tmp_path, "SNAPPY")
