"""Tables of Parquet, Arrow, CSV and JSON lines beside pyarrow: every type, shuffles and resume by units, damage, nulls."""

from __future__ import annotations

import datetime
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.data import ArraySpec, Dataset, HDF5Dataset, from_tables, write_shards
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from mpistrat.errors import MissingDependencyError, ShardError
from tests.harness.shards_command import mpistrat

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")
csv = pytest.importorskip("pyarrow.csv")

ROWS = 23


def table(first: int = 0, stop: int = ROWS) -> Any:
    rows = range(first, stop)
    tensors = np.arange(ROWS * 6, dtype="f4").reshape(ROWS, 2, 3)[first:stop]
    days = [datetime.date(2020, 1, 1) + datetime.timedelta(row) for row in rows]
    return pa.table(
        {
            "i": pa.array(rows, pa.int32()),
            "f": pa.array([None if row == 3 else row / 2 for row in rows]),
            "text": [f"row {row}" for row in rows],
            "bytes": [bytes([row]) for row in rows],
            "flag": [row % 2 == 0 for row in rows],
            "list": pa.array([list(range(row % 3)) for row in rows], pa.list_(pa.int16())),
            "vector": pa.array([[row, row + 1] for row in rows], pa.list_(pa.float32(), 2)),
            "time": pa.array([datetime.datetime.combine(day, datetime.time()) for day in days], pa.timestamp("us")),
            "day": pa.array(days),
            "kind": pa.array([f"kind {row % 3}" for row in rows]).dictionary_encode(),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(tensors),
            "struct": [{"a": row} for row in rows],
        }
    )


SPEC = {
    "i": ArraySpec((), "i4"),
    "f": ArraySpec((), "f8"),
    "text": ArraySpec((), object),
    "bytes": ArraySpec((), object),
    "flag": ArraySpec((), bool),
    "list": ArraySpec((None,), "i2"),
    "vector": ArraySpec((2,), "f4"),
    "time": ArraySpec((), "datetime64[us]"),
    "day": ArraySpec((), "datetime64[D]"),
    "kind": ArraySpec((), object),
    "tensor": ArraySpec((2, 3), "f4"),
}


@pytest.fixture(params=["parquet", "arrow"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Three files; units of 4, 4, 2, 4, 4, 3 and 2 rows."""
    for number, (first, stop) in enumerate([(0, 10), (10, 21), (21, 23)]):
        if request.param == "parquet":
            parquet.write_table(table(first, stop), tmp_path / f"part-{number}.parquet", row_group_size=4)
        else:
            path = str(tmp_path / f"part-{number}.arrow")
            with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table().schema) as writer:
                writer.write_table(table(first, stop), max_chunksize=4)
    return tmp_path


ORDER = [22, 0, 3, 3, 9, 10, 21]


def test_every_type(folder: Path) -> None:
    dataset = from_tables(folder)
    assert dataset.element_spec == SPEC
    assert len(dataset) == ROWS
    rows, whole = dataset.rows(ORDER), table()
    for name, spec in SPEC.items():
        assert rows[name].dtype == (object if None in spec.shape else spec.dtype)
        expected = [whole.column(name)[row].as_py() for row in ORDER] if name != "tensor" else None
        found = rows[name].tolist()
        if name == "list":
            assert [row.tolist() for row in found] == expected
            assert all(row.dtype == "i2" for row in found)
        elif name == "f":
            assert [None if np.isnan(value) else value for value in found] == expected
        elif name == "tensor":
            assert found == np.arange(ROWS * 6).reshape(ROWS, 2, 3)[ORDER].tolist()
        else:
            assert found == expected
    assert "left out: struct (struct<a: int64>)" in str(dataset)
    assert "3 " in str(dataset)
    assert "in 7 units of i int32[]" in str(dataset)


def test_columns_have_the_form_that_was_asked_for(folder: Path) -> None:
    assert [int(x) for x in from_tables(folder, "i")] == list(range(ROWS))
    i, flag = from_tables(folder, ("i", "flag")).rows([5])
    assert (i.tolist(), flag.tolist()) == ([5], [False])
    assert list(from_tables(folder, {"x": "i"}).rows([5])) == ["x"]
    assert list(from_tables(folder, ["i", "text"]).rows([5])) == ["i", "text"]
    with pytest.raises(ShardError, match="expected a column 'no'"):
        len(from_tables(folder, "no"))
    with pytest.raises(ShardError, match="struct: expected numbers, .*got struct<a: int64>"):
        len(from_tables(folder, "struct"))
    with pytest.raises(ValueError, match="columns: expected None, a name"):
        from_tables(folder, [])


def test_a_shuffle_reads_each_unit_once(folder: Path) -> None:
    dataset = from_tables(folder, "i")
    assert dataset.node.chunk_starts().tolist() == [0, 4, 8, 10, 14, 18, 21, 23]
    shuffled = dataset.shuffle(seed=2)
    rows = [int(x) for batch in shuffled.batch(5) for x in batch]
    assert sorted(rows) == list(range(ROWS))
    assert rows != list(range(ROWS))
    assert dataset.node.counters.chunk_reads == 7
    assert "in blocks" in str(shuffled)


def test_resumed_on_other_ranks(folder: Path) -> None:
    def iterators(ranks: int, state: dict[str, int]) -> list[Any]:
        made = []
        for rank in range(ranks):
            rows = from_tables(folder, "i").shuffle(seed=5).batch(4)
            made.append(iter(distribute(rows, Workers([1] * ranks, rank))))
            made[-1].restore(state)
        return made

    def rest(parts: list[Any]) -> list[list[int]]:
        return [[int(x) for part in step for x in part] for step in zip(*parts, strict=True)]

    alone = rest(iterators(1, {"epoch": 1, "next": 0}))
    first = iterators(2, {"epoch": 1, "next": 0})
    steps = [[int(x) for each in first for x in next(each)] for _ in range(2)]
    assert steps + rest(iterators(3, first[0].state())) == alone
    assert sorted(itertools.chain(*alone)) == list(range(ROWS))


def test_files_of_text(tmp_path: Path) -> None:
    some = table().select(["i", "f", "text"])
    csv.write_csv(some, tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"i": {row}, "list": [{row}, 0.5]}}' for row in range(5)))
    for pattern in ("a.csv", "*.csv"):
        rows = from_tables(tmp_path / pattern).rows([9, 2])
        assert {name: array.tolist() for name, array in rows.items()} == {
            "i": [9, 2], "f": [4.5, 1.0], "text": ["row 9", "row 2"],
        }  # fmt: skip
    lines = from_tables(tmp_path / "a.jsonl")
    assert lines.rows([4])["i"].tolist() == [4]
    assert lines.rows([4])["list"][0].tolist() == [4.0, 0.5]


def test_long_rows_of_text(tmp_path: Path) -> None:
    """Lines within quotes, and rows that are longer than pyarrow's blocks of 1 MiB."""
    words = [f"two\nlines, {row} " + "x" * 300_000 * (row % 7) for row in range(20)]
    csv.write_csv(pa.table({"text": words}), tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": word}, indent=1) + "\n" for word in words))
    for name in ("a.csv", "a.jsonl"):
        assert from_tables(tmp_path / name, "text").rows(range(20)).tolist() == words


def test_dictionaries_of_views(tmp_path: Path) -> None:
    """As polars writes categories."""
    path = str(tmp_path / "a.arrow")
    for kind, values in ((pa.string_view(), ["b", "a"]), (pa.binary_view(), [b"b", b"a"])):
        column = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.uint32()), pa.array(values, kind))
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, pa.schema({"x": column.type})) as writer:
            writer.write_table(pa.table({"x": column}))
        assert from_tables(path, "x").rows([0, 1, 2]).tolist() == [values[1], values[0], values[1]]


def test_tensors_whose_axes_are_permuted(folder: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 3), permutation=[1, 0])
    stored = pa.FixedSizeListArray.from_arrays(pa.array(range(18), pa.int32()), 6)
    tensors = pa.ExtensionArray.from_storage(kind, stored)
    parquet.write_table(pa.table({"x": tensors}), folder / "b.parquet")
    found = from_tables(folder / "b.parquet", "x").batch(3).peek()
    assert found.tolist() == tensors.to_numpy_ndarray().tolist()
    assert from_tables(folder / "b.parquet", "x").element_spec == ArraySpec((3, 2), "i4")


def test_feather_of_pyarrow(tmp_path: Path) -> None:
    feather.write_feather(table(), tmp_path / "a.feather", chunksize=5, compression="zstd")
    assert from_tables(tmp_path / "a.feather", ("i", "text")).rows([20])[1].tolist() == ["row 20"]


def test_caches_and_shards_of_tables(folder: Path, tmp_path: Path) -> None:
    dataset = from_tables(folder, ["i", "vector", "text", "list"])
    write_shards(tmp_path / "shards", dataset, rows_per_shard=9, layout="chunked")
    for rows in (dataset.cache().rows(ORDER), HDF5Dataset(tmp_path / "shards").rows(ORDER)):
        assert rows["i"].tolist() == ORDER
        assert rows["vector"].tolist() == [[row, row + 1] for row in ORDER]
        assert rows["text"].tolist() == [f"row {row}" for row in ORDER]
        assert [row.tolist() for row in rows["list"]] == [list(range(row % 3)) for row in ORDER]


@pytest.mark.parametrize("column", ["i", "text", "flag", "list", "vector"])
def test_nulls_that_have_no_value_are_errors(tmp_path: Path, column: str) -> None:
    whole = table()
    values = whole.column(column).to_pylist()
    values[6] = [None, 1.0] if column == "list" else None
    nulls = pa.table({column: pa.array(values, whole.schema.field(column).type), "x": range(ROWS)})
    try:
        parquet.write_table(nulls, tmp_path / "a.parquet", row_group_size=5)
    except pa.ArrowNotImplementedError as error:  # by pyarrow 16
        pytest.skip(str(error))
    dataset = from_tables(tmp_path, column)
    assert len(dataset.rows([0, 4])) == 2
    reason = r"values without nulls.*1 nulls? of"
    if column == "vector":  # which pyarrow 25 and older cannot read
        reason = rf"({reason}|5 rows, got ArrowInvalid: .* lists)"
    with pytest.raises(ShardError, match=rf"a\.parquet: unit 1: expected {reason}"):
        dataset.rows([5])
    assert from_tables(tmp_path, "x").rows([6]).tolist() == [6]


def test_times_without_a_value(tmp_path: Path) -> None:
    times = pa.array([None, datetime.datetime(2020, 1, 1)], pa.timestamp("ms"))
    parquet.write_table(pa.table({"t": times}), tmp_path / "a.parquet")
    assert np.isnat(from_tables(tmp_path, "t").rows([0, 1])).tolist() == [True, False]


def test_damage_and_change(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(table(), path, row_group_size=5, compression="none")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ShardError, match=r"a\.parquet: expected a whole parquet file"):
        len(from_tables(path))
    path.write_bytes(whole)
    dataset = from_tables(path)
    assert len(dataset) == ROWS
    parquet.write_table(table(0, 9), path)
    with pytest.raises(ShardError, match=r"a\.parquet.*must not change"):
        iter(dataset)
    with pytest.raises(ShardError, match="must not change"):
        dataset.rows([8])


def test_files_of_other_columns(tmp_path: Path) -> None:
    for name, x in (("a", pa.array([1, 2])), ("b", pa.array([1.0, 2.0]))):
        parquet.write_table(pa.table({"x": x}), tmp_path / f"{name}.parquet")
    with pytest.raises(ShardError, match=r"b\.parquet: expected 'x' as int64\[\], like .*a\.parquet, got float64"):
        len(from_tables(tmp_path))
    with pytest.raises(ShardError, match="expected a file, got no such file"):
        from_tables(tmp_path / "c.parquet")
    with pytest.raises(ShardError, match="expected at least one file"):
        from_tables(tmp_path / "*.csv")
    (tmp_path / "c.csv").write_text("x\n1\n")
    with pytest.raises(ValueError, match="expected files of one format"):
        from_tables(tmp_path)
    assert len(from_tables(tmp_path, format="csv")) == 1
    with pytest.raises(ValueError, match="format: expected None or one of parquet, arrow, csv, jsonl"):
        from_tables(tmp_path, format="xls")


def test_a_column_of_nulls_in_another_file(tmp_path: Path) -> None:
    """A type without values fits the numbers of other files, if these may be missing."""
    parquet.write_table(pa.table({"x": [1.5], "y": [1]}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"x": pa.nulls(1), "y": pa.nulls(1)}), tmp_path / "b.parquet")
    np.testing.assert_array_equal(from_tables(tmp_path, "x").rows([0, 1]), [1.5, np.nan])
    with pytest.raises(ShardError, match=r"b\.parquet: unit 0: expected values without nulls"):
        from_tables(tmp_path, "y").rows([0, 1])
    (tmp_path / "a.csv").write_text("x,y\n1,a\n")
    (tmp_path / "b.csv").write_text("x,y\n")
    assert from_tables(tmp_path / "*.csv", "x").rows([0]).tolist() == [1]
    parquet.write_table(pa.table({"x": [{"a": 1}], "y": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ShardError, match=r"b\.parquet: expected 'x' as float64\[\], .* got struct<a: int64>"):
        len(from_tables(tmp_path / "*.parquet", "x"))


def test_columns_of_one_name(tmp_path: Path) -> None:
    columns = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["x", "x", "y"])
    parquet.write_table(columns, tmp_path / "a.parquet")
    csv.write_csv(columns, tmp_path / "a.csv")
    for path in (tmp_path / "a.parquet", tmp_path / "a.csv"):
        dataset = from_tables(path)
        assert dataset.rows([0])["y"].tolist() == [3]
        assert "left out: x (several columns of this name)" in str(dataset)
        with pytest.raises(ShardError, match="x: expected numbers.*, got several columns of this name"):
            len(from_tables(path, "x"))


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(table(), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        MissingDependencyError, match=r'from_tables: expected pyarrow.*pip install "mpistrat\[tables\]"'
    ):
        len(from_tables(tmp_path))


def test_other_files_have_other_fingerprints(tmp_path: Path) -> None:
    prints = []
    for number, rows in enumerate([[1, 2], [1, 2], [1, 3]]):
        (tmp_path / str(number)).mkdir()
        parquet.write_table(pa.table({"x": rows}), tmp_path / str(number) / "a.parquet")
        prints.append(from_tables(tmp_path / str(number)).node.fingerprint())
    assert prints[0] == prints[1] != prints[2]
    assert isinstance(from_tables(tmp_path / "0"), Dataset)


def test_the_command_writes_shards_of_tables(tmp_path: Path) -> None:
    parquet.write_table(table(), tmp_path / "a.parquet", row_group_size=5)
    (tmp_path / "a.jsonl").write_text('{"i": 1}\n{"i": 2}\n')
    mpistrat("shards", "write", tmp_path / "numbers", tmp_path / "a.parquet", "--select", "i,vector,tensor")
    rows = HDF5Dataset(tmp_path / "numbers").rows(ORDER)
    assert rows["i"].tolist() == ORDER
    assert rows["tensor"].tolist() == np.arange(ROWS * 6).reshape(ROWS, 2, 3)[ORDER].tolist()
    mpistrat("shards", "write", tmp_path / "lines", tmp_path / "a.jsonl")
    assert HDF5Dataset(tmp_path / "lines", "i").rows([1]).tolist() == [2]
    done = mpistrat("shards", "write", tmp_path / "no", tmp_path / "a.parquet", "--select", "struct", status=1)
    assert "struct: expected numbers, times, text or lists of them" in done.stderr
