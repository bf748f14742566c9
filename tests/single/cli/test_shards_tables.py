"""Tables as input of `mpistrat shards`: what a column is taken for, and numbers read whole instead of cell by cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpistrat.errors import ShardError
from tests.harness.shards_command import ROWS, mpistrat, read, table


def test_a_table(tmp_path: Path) -> None:
    table(tmp_path / "t.csv")
    done = mpistrat("shards", "write", "set", "t.csv", cwd=tmp_path, status=2)
    assert "text in ['name']" in done.stderr
    assert "--layout chunked" in done.stderr
    done = mpistrat("shards", "write", "set", "t.csv", "--layout", "chunked", "--dtype", "a=float32", cwd=tmp_path)
    assert "column 'b': 1 empty cell became NaN" in done.stdout
    found = read(tmp_path / "set")
    assert found["id"].tolist() == list(range(ROWS))
    assert found["a"].dtype == np.float32
    assert found["a"].tolist() == [i / 8 for i in range(ROWS)]
    assert np.isnan(found["b"][3])
    assert found["b"][4] == -4.0
    assert found["name"].tolist() == [f'é, "{i}"\nnext' for i in range(ROWS)]


def test_the_numbers_of_a_table_as_one_array(tmp_path: Path) -> None:
    table(tmp_path / "t.tsv", "\t")
    words = ["--array", "v", "--dtype", "v=float32", "--dtype", "id=str", "--layout", "chunked"]
    mpistrat("shards", "write", "set", "t.tsv", *words, cwd=tmp_path)
    found = read(tmp_path / "set")
    assert found["v"].shape == (ROWS, 2)
    assert found["v"][7].tolist() == [7 / 8, -7]
    assert found["id"][7] == "007"
    document = json.loads(mpistrat("shards", "info", "set", "--json", cwd=tmp_path).stdout)
    assert document["fields"][0]["attributes"] == {"columns": ["a", "b"]}


def test_text_becomes_booleans_by_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,z\nTrue,1\nFalse,2\nfalse,3\n")
    mpistrat("shards", "write", "set", "t.csv", "--dtype", "a=bool", cwd=tmp_path)
    assert read(tmp_path / "set")["a"].tolist() == [True, False, False]
    done = mpistrat("shards", "write", "other", "t.csv", "--dtype", "z=bool", cwd=tmp_path, status=2)
    assert "--dtype z: expected values that bool holds, got 2" in done.stderr


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "-2"], np.int64),
        (["1", "2.5"], np.float64),
        (["1", ""], np.float64),
        (["1e3", "nan", "inf"], np.float64),
        (["1", "x"], object),
        (["1_000", "2"], object),
        (["123456789012345678901234567890", "1"], object),
        (["1.5", "123456789012345678901234567890"], np.float64),
        (["123456789012345678901234567890", "1.5"], np.float64),
        (["true", "false"], object),
    ],
)
def test_what_a_column_is_taken_for(tmp_path: Path, cells: list[str], kind: Any) -> None:
    from mpistrat.data.shards.converters.table import Table

    (tmp_path / "t.csv").write_text("a,z\n" + "".join(f"{cell},1\n" for cell in cells))
    batch = next(Table(tmp_path / "t.csv", None, ",", None, ()).batches(0, len(cells)))
    assert batch["a"].dtype == kind
    if kind is object:
        assert batch["a"].tolist() == cells


CELLS = ["1", "-2", "+3", "007", "2.5", "1e3", "-1.5E-3", ".5", "", "nan", "-Infinity", " 1", "x", "1_0", "9" * 19, "é"]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_numpy_reads_numbers_as_they_are_read_cell_by_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Each column holds cells of the first few kinds, so that many files hold numbers only, and blocks are of a few lines."""
    from mpistrat.data.shards.converters import converter, table

    kinds = data.draw(st.lists(st.integers(1, len(CELLS)), min_size=1, max_size=3))
    row = st.tuples(*(st.sampled_from(CELLS[:kind]) for kind in kinds))
    delimiter, end = data.draw(st.sampled_from(",; ")), data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    lines = [delimiter.join(cells) for cells in data.draw(st.lists(row, min_size=1, max_size=9))]
    lines += data.draw(st.lists(st.sampled_from(['"1"' + delimiter + "2", "1" + delimiter, "1", "-"]), max_size=1))
    path = tmp_path / "t.csv"
    path.write_bytes(end.join([delimiter.join("abc"[: len(kinds)]), *lines]).encode())
    start = data.draw(st.integers(0, 3))

    def read_table(*, settled: bool) -> Any:
        try:
            rows = table.Table(path, None, delimiter, None, ())
            if settled:
                rows.settle()
            try:
                found = list(rows.batches(start, max(start, rows.rows)))
            except converter.PresumptionError:
                assert rows.presumed
                rows.settle()
                found = list(rows.batches(start, max(start, rows.rows)))
        except ShardError as error:
            return str(error)
        return rows.rows, rows.notes, [{n: (a.dtype, a.astype(str).tolist()) for n, a in p.items()} for p in found]

    with monkeypatch.context() as patch:
        for name, size in {"_FIRST_BLOCK": 8, "_BLOCK": 24, "_SAMPLE": 1, "_LINES": 3}.items():
            patch.setattr(table, name, size)
        quick = read_table(settled=False)
        assert quick == read_table(settled=True)
        patch.setattr(table.NumericReader, "lines", lambda self, lines: None)
        assert quick == read_table(settled=True)


@pytest.mark.parametrize(
    ("late", "kind", "note"),
    [
        ("2.5", np.float64, ""),
        ("", np.float64, "column 'b': 1 empty cell became NaN"),
        ("word", object, ""),
        ("9" * 25, object, ""),
    ],
)
def test_a_column_that_changes_its_kind_late(tmp_path: Path, late: str, kind: Any, note: str) -> None:
    """The set is as if all of the file had been looked at first."""
    a, b = np.arange(300_000), [str(i % 7) for i in range(300_000)]
    b[250_000] = late
    (tmp_path / "t.csv").write_text("a,b\n" + "".join(f"{x},{y}\n" for x, y in zip(a.tolist(), b, strict=True)))
    layout = "chunked" if kind is object else "contiguous"
    done = mpistrat("shards", "write", "set", "t.csv", "--layout", layout, "--rows-per-shard", 80_000, cwd=tmp_path)
    assert note in done.stdout
    assert "4 shards, 300000 rows" in done.stdout
    found = read(tmp_path / "set")
    assert found["a"].dtype == np.int64
    assert np.array_equal(found["a"], a)
    assert found["b"].dtype == kind
    expected = np.array(b, object) if kind is object else np.array([float(cell or "nan") for cell in b])
    assert np.array_equal(found["b"], expected, equal_nan=kind is not object)
    assert len(list((tmp_path / "set").iterdir())) == 5


@pytest.mark.parametrize(
    ("cells", "note"),
    [
        (["9007199254740993", "1"], ""),
        (["9007199254740993", ""], "row 1: '9007199254740993' becomes 9007199254740992.0"),
        (["1.5", "9007199254740993"], "row 2: '9007199254740993' becomes 9007199254740992.0"),
        (["9007199254740992", "1.5"], ""),
        (["1.5", "-1e400"], "row 2: '-1e400' becomes -inf"),
        (["inf", "1e400"], "row 2: '1e400' becomes inf"),
        (["inf", "-Infinity", "1e300", "0.1234567890123456789"], ""),
    ],
)
@pytest.mark.parametrize("late", [0, 300_000])  # rows of other blocks before
def test_numbers_that_become_others_are_noted(tmp_path: Path, cells: list[str], note: str, late: int) -> None:
    if late and note:
        note = note.replace("row ", "row 30000", 1)
    (tmp_path / "t.csv").write_text("a,z\n" + "7,1\n" * late + "".join(f"{cell},1\n" for cell in cells))
    done = mpistrat("shards", "write", "set", "t.csv", cwd=tmp_path)
    assert ("float64 does not hold all numbers" in done.stdout) == bool(note)
    assert note in done.stdout
    assert ("--dtype a=str keeps them" in done.stdout) == bool(note)


def test_numbers_that_become_others_in_an_array_are_noted(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n" + "1,2\n" * 300_000 + "9007199254740993,2\n1,0.5\n")
    done = mpistrat("shards", "write", "set", "t.csv", "--array", "x", cwd=tmp_path)
    assert "column 'a': float64 does not hold all numbers: row 300001: '9007199254740993'" in done.stdout


def test_a_late_line_with_too_many_cells_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n" + "1,2\n" * 300_000 + "1,2,3\n" + "1,2\n" * 10)
    done = mpistrat("shards", "write", "set", "t.csv", cwd=tmp_path, status=1)
    assert "expected 2 cells in every line, as the first has, got 3 in line 300002" in done.stderr
    assert not list(tmp_path.glob("set/*"))


def test_numbers_are_not_taken_apart_cell_by_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.data.shards.converters import table

    x = np.random.default_rng(0).normal(size=(20_000, 3))
    lines = [f"{a!r},{b!r},{i}" for i, (a, b, _) in enumerate((x / 1000).tolist())]
    (tmp_path / "t.csv").write_text("a,b,i\n" + "\n".join([*lines[:9000], ",7,9000", *lines[9001:]]) + "\n")
    taken = []
    look_at_cells = table.Table._look_at_cells
    monkeypatch.setattr(
        table.Table,
        "_look_at_cells",
        lambda self, rows, empty: taken.append(len(rows)) or look_at_cells(self, rows, empty),
    )
    source = table.Table(tmp_path / "t.csv", None, ",", None, ())
    found = [
        np.concatenate(column) for column in zip(*(piece.values() for piece in source.batches(5, 20_000)), strict=True)
    ]
    assert len(taken) == 1 and 0 < taken[0] < 2000  # once the first lines, to learn what the columns hold
    assert source.notes == ["column 'a': 1 empty cell became NaN"]
    assert np.isnan(found[0][8995]) and np.array_equal(np.delete(found[0], 8995), np.delete(x[5:, 0] / 1000, 8995))
    assert found[2].dtype == np.int64 and np.array_equal(found[2], np.arange(5, 20_000))


@pytest.mark.parametrize("first", ["0,0.5", "a,1", "x,nan", "2019,2020"])
def test_a_first_line_of_numbers_is_not_taken_for_names(tmp_path: Path, first: str) -> None:
    (tmp_path / "t.csv").write_text(f"{first}\n1,2\n")
    done = mpistrat("shards", "write", "set", "t.csv", cwd=tmp_path, status=1)
    assert "expected a first line that names the columns, got numbers in it" in done.stderr
    assert "--header no" in done.stderr and "--header yes" in done.stderr
    assert not list(tmp_path.glob("set/*"))


@pytest.mark.parametrize("mark", ["", "\N{ZERO WIDTH NO-BREAK SPACE}"])  # a byte order mark, as Excel writes it
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("quote", ["", '"'])
def test_a_table_without_names(tmp_path: Path, mark: str, end: str, quote: str) -> None:
    rows = [f"{quote}{i}{quote},{i / 2}" for i in range(9)]
    (tmp_path / "t.csv").write_bytes((mark + end.join(rows)).encode())
    mpistrat("shards", "write", "set", "t.csv", "--header", "no", cwd=tmp_path)
    found = read(tmp_path / "set")
    assert found["column_0"].tolist() == list(range(9))
    assert found["column_1"].tolist() == [i / 2 for i in range(9)]


def test_names_that_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("2019,2020\n1,2\n3,4\n")
    mpistrat("shards", "write", "set", "t.csv", "--header", "yes", "--select", "2020", cwd=tmp_path)
    assert read(tmp_path / "set")["2020"].tolist() == [2, 4]


def test_the_index_that_pandas_writes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(",a\n0,1\n")
    done = mpistrat("shards", "write", "set", "t.csv", cwd=tmp_path, status=1)
    assert "to_csv(..., index=False)" in done.stderr


def test_the_first_cell_that_is_no_number_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n" + "".join(f"{i},{'NA' if i in (4, 6) else i}\n" for i in range(9)))
    done = mpistrat("shards", "write", "set", "t.csv", cwd=tmp_path, status=2)
    assert "text in ['b']; 'b': row 5: 'NA'" in done.stderr
    done = mpistrat("shards", "write", "set", "t.csv", "--layout", "chunked", cwd=tmp_path)
    assert "note: column 'b' is text, as in row 5: 'NA'" in done.stdout
    done = mpistrat("shards", "write", "other", "t.csv", "--layout", "chunked", "--dtype", "b=str", cwd=tmp_path)
    assert "is text" not in done.stdout
