"""Members of structures in tables as columns: Parquet, Arrow and JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpistrat.data import ArraySpec, from_tables
from mpistrat.errors import ShardError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {"pose": {"x": n, "at": {"t": n / 2, "tags": [n] * (n % 3)}}, "pose.x": -n, "n": n, "a,b": n} for n in range(10)
]
TABLE = pyarrow.Table.from_pylist(ROWS)


def written(kind: str, folder: Path, table: object = TABLE) -> Path:
    path = folder / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=4)
    elif kind == "arrow":
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, TABLE.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_members_are_columns(kind: str, tmp_path: Path) -> None:
    dataset = from_tables(written(kind, tmp_path), {"t": "pose.at.t", "tags": "pose.at.tags", "n": "n", "c": "a,b"})
    assert dataset.element_spec["t"] == ArraySpec((), np.float64)
    assert dataset.element_spec["tags"] == ArraySpec((None,), np.int64)
    order = [9, 0, 3, 3, 5]
    found = dataset.rows(order)
    np.testing.assert_array_equal(found["t"], [ROWS[n]["pose"]["at"]["t"] for n in order], strict=True)
    assert [row.tolist() for row in found["tags"]] == [ROWS[n]["pose"]["at"]["tags"] for n in order]
    assert found["n"].tolist() == found["c"].tolist() == order


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_a_column_goes_before_a_member_of_that_name(kind: str, tmp_path: Path) -> None:
    assert from_tables(written(kind, tmp_path), "pose.x").rows([3]).tolist() == [-3]


def test_what_is_not_there(tmp_path: Path) -> None:
    path = written("parquet", tmp_path)
    for name in ("pose.no", "pose.at.t.more", "no.x", "n.x", "pose."):
        with pytest.raises(ShardError, match=f"expected a column '{name}', got columns"):
            len(from_tables(path, name))
    with pytest.raises(ShardError, match="a.parquet: pose: expected numbers, times, text or lists of them, got struct"):
        len(from_tables(path, "pose"))


def test_nulls_of_structures(tmp_path: Path) -> None:
    """A member of a missing structure is NaN, or an error of integers."""
    table = pyarrow.table({"a": [{"f": 1.5, "i": 1}, None, {"f": None, "i": 3}]})
    path = written("parquet", tmp_path, table)
    np.testing.assert_array_equal(from_tables(path, "a.f").rows([0, 1, 2]), [1.5, np.nan, np.nan])
    with pytest.raises(ShardError, match="1 nulls of 3"):
        from_tables(path, "a.i").rows([0])
