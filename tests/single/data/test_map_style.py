"""Datasets of objects with a length and items: every kind of sample, workers, changed objects, and errors that name the row."""

from __future__ import annotations

import itertools
import os
import traceback
from typing import Any

import numpy as np
import pytest

from mpistrat.data import AUTOTUNE, ArraySpec, from_map_style
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from tests.harness import samples

WORKERS = pytest.mark.parametrize(
    "workers", [{}, {"workers": 3}, {"workers": 2, "processes": True}], ids=["none", "threads", "processes"]
)


@WORKERS
def test_rows_are_the_objects_items(workers: dict[str, Any]) -> None:
    dataset = from_map_style(samples.Squares(11), **workers)
    squares = [row**2 for row in range(11)]
    assert len(dataset) == 11
    assert dataset.element_spec == ArraySpec((), np.int64)
    assert [int(row) for row in dataset] == squares
    assert [batch.tolist() for batch in dataset.batch(4)] == [squares[:4], squares[4:8], squares[8:]]
    assert dataset.rows([7, 7, 0]).tolist() == [49, 49, 0]
    iterator = iter(dataset.batch(4))
    iterator.restore({"epoch": 1, "next": 2, "length": 3})
    assert [batch.tolist() for batch in iterator] == [squares[8:]]
    assert sorted(dataset.shuffle(seed=3).batch(11).element(0, 0).tolist()) == squares
    assert [int(row) for row in dataset.cache()] == squares


@WORKERS
def test_samples_are_nests_of_arrays(workers: dict[str, Any]) -> None:
    dataset = from_map_style(samples.Nested(3), **workers)
    batch = dataset.batch(3).element(0, 0)
    assert type(batch) is samples.Labelled
    assert type(batch.boxes) is samples.Point
    np.testing.assert_array_equal(batch.image, np.arange(3, dtype=np.uint8).repeat(4).reshape(3, 2, 2), strict=True)
    assert batch.boxes.x.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch.boxes.y["file"].tolist() == ["0.png", "1.png", "2.png"]
    assert batch.boxes.y["area"].tolist() == [0.0, 0.5, 1.0]


def test_several_rows_are_read_at_once_where_the_object_can() -> None:
    rows = samples.Rows(10)
    batches = list(from_map_style(rows).batch(4))
    assert batches[2]["tokens"].tolist() == [[8, 9], [9, 10]]
    assert batches[0]["text"].tolist() == ["row 0", "row 1", "row 2", "row 3"]
    assert rows.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_lists_of_any_length() -> None:
    rows = [[1], [], [2, 3]]
    dataset = from_map_style(rows, element_spec=ArraySpec((None,), np.int64))
    assert dataset.padded_batch(3).element(0, 0).tolist() == [[1, 0], [0, 0], [2, 3]]
    with pytest.raises(
        ValueError, match=r"from_map_style\(list\): row 2: expected int64\[1\], got int64\[2\].*element_spec"
    ):
        from_map_style([[1], [5], [2, 3]]).batch(3).element(0, 0)


def test_an_object_without_rows() -> None:
    assert list(from_map_style([], element_spec=ArraySpec((2,), "f4")).batch(2)) == []
    with pytest.raises(ValueError, match="expected a first sample.*Give element_spec"):
        _ = from_map_style([]).element_spec


@pytest.mark.parametrize("kind", [samples.FailsAt5, samples.FailsTogether])
@WORKERS
def test_an_error_names_the_row(kind: Any, workers: dict[str, Any]) -> None:
    for stage in (lambda rows: rows, lambda rows: rows.shuffle(seed=1).batch(4)):
        with pytest.raises(KeyError, match="not five") as caught:
            list(stage(from_map_style(kind(9), **workers)))
        text = "".join(traceback.format_exception(caught.value))
        assert f"from_map_style({kind.__name__}): raised at row 5 of epoch 0" in text
        assert 'raise KeyError("not five")' in text
    assert [int(row) for row in from_map_style(kind(9), **workers).ignore_errors()] == [0, 1, 2, 3, 4, 6, 7, 8]


def test_a_row_that_is_nothing() -> None:
    with pytest.raises(ValueError, match=r"row 5: expected arrays, numbers or strings, got None"):
        list(from_map_style(samples.NothingAt5(9)))


def test_processes_are_others_and_know_nothing_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    pids, launched = from_map_style(samples.OtherProcesses(8), workers=2, processes=True).batch(8).element(0, 0)
    assert len(set(pids.tolist())) == 2
    assert os.getpid() not in pids
    assert not launched.any()


def test_a_process_that_dies_is_named() -> None:
    rows = from_map_style(samples.DiesAt5(9), workers=2, processes=True)
    with pytest.raises(RuntimeError, match=r"from_map_style: process \d of DiesAt5 \(pid \d+\) was killed by signal 9"):
        list(rows.batch(3))


def test_what_cannot_be_sent_to_processes() -> None:
    with pytest.raises(TypeError, match=r"from_map_style: samples: expected an object that can be pickled.*lock"):
        from_map_style(samples.Locked(3), workers=2, processes=True)
    assert [int(row) for row in from_map_style(samples.Locked(3), workers=2)] == [0, 1, 4]


def test_what_is_no_object_of_samples() -> None:
    class Loader:
        dataset = (1, 2)

        def __len__(self) -> int:
            return 1

    class NoLength:
        def __getitem__(self, row: int) -> int:
            return row

    for wrong, remedy in [
        (Loader(), "Pass its `dataset`"),
        (NoLength(), "NoLength without a length .*from_generator"),
        (iter([1]), "no __getitem__.*from_generator"),
        ({"x": [1]}, "a dict. Pass a list"),
        ("files", "a str. Pass a list"),
    ]:
        with pytest.raises(TypeError, match=f"from_map_style: samples: expected .*{remedy}"):
            from_map_style(wrong)
    for workers in (-2, 1.5, "2"):
        with pytest.raises((TypeError, ValueError), match="from_map_style: workers"):
            from_map_style([1], workers=workers)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"from_map_style: element_spec\['x'\]: expected an ArraySpec"):
        from_map_style([1], element_spec={"x": np.int64})
    assert "AUTOTUNE threads" in str(from_map_style([1], workers=AUTOTUNE))


def test_an_object_whose_length_changes() -> None:
    rows = [1, 2, 3]
    dataset = from_map_style(rows)
    rows.append(4)
    with pytest.raises(ValueError, match=r"expected 3 samples, as when the dataset was made, got 4"):
        iter(dataset)


def test_lists_of_equal_length_with_other_items_have_other_fingerprints() -> None:
    files, others = ["a.png", "b.png"], ["b.png", "a.png"]
    prints = [from_map_style(each).node.fingerprint() for each in (files, list(files), others, files[:1])]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert from_map_style(samples.Squares(2)).node.fingerprint() is None


@pytest.mark.parametrize("kind", [samples.Squares, samples.Rows])
def test_resumed_on_other_ranks(kind: Any) -> None:
    """Each row once, in one order, though the ranks change from 2 to 3 after two steps."""

    def iterators(ranks: int, state: dict[str, int]) -> list[Any]:
        made = []
        for rank in range(ranks):
            rows = from_map_style(kind(23), workers=rank).shuffle(seed=5).batch(6)
            made.append(iter(distribute(rows, Workers([1] * ranks, rank))))
            made[-1].restore(state)
        return made

    def labels(parts: list[Any]) -> list[int]:
        return [int(x) for part in parts for x in (part["tokens"][:, 0] if kind is samples.Rows else np.sqrt(part))]

    first = iterators(2, {"epoch": 1, "next": 0})
    steps = [labels([next(each) for each in first]) for _ in range(2)]
    steps += [labels(list(parts)) for parts in zip(*iterators(3, first[0].state()), strict=True)]
    order = from_map_style(range(23)).shuffle(seed=5)
    order.set_epoch(1)
    assert list(itertools.chain(*steps)) == [int(row) for row in order]
    assert sorted(itertools.chain(*steps)) == list(range(23))
