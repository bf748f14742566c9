"""A CSV file as rows: numbers where a column holds nothing else, text elsewhere. Read twice, never held."""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, final

import numpy as np
from numpy.typing import NDArray

from ....errors import explain
from ..columns import Columns
from .numeric_lines import NumericLines
from .source import Source, bad_input

__all__ = ["Table"]

_LINES = 4096  # at a time
_INTEGER, _FLOAT, _TEXT = range(3)
_DTYPES: dict[int, np.dtype[Any]] = {_INTEGER: np.dtype(np.int64), _FLOAT: np.dtype(np.float64)}

_ENDS = ("\n", "\r\n", "\r")


@final
class _Block:
    """Some successive rows of the file.

    Args:
        rows: their lines, or their cells where a quote makes a line more than what stands in it.
        cells: takes lines apart.
    """

    def __init__(self, rows: Any, cells: Callable[[], list[list[str]]] | None = None) -> None:
        self._rows = rows
        self._cells = cells

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lines(self) -> list[str] | None:
        """The lines, none of them empty; None where there are quotes."""
        return None if self._cells is None else self._rows

    @property
    def cells(self) -> list[list[str]]:
        """The cells of each row."""
        return self._rows if self._cells is None else self._cells()


@final
class Table(Source):
    """The rows of a CSV file whose first line names the columns.

    Args:
        path: the file, in UTF-8.
        names: the columns wanted; None for all.
        delimiter: between cells.
        array: a name: all columns of numbers become one array of it, in their order.
        text: columns that are text whatever they hold.
    """

    def __init__(
        self, path: Path, names: Sequence[str] | None, delimiter: str, array: str | None, text: Collection[str]
    ) -> None:
        self._path = path
        self._delimiter = delimiter
        self._array = array
        with self._open() as (self._header, _, _):
            pass
        self._numeric = NumericLines(delimiter)
        self._names = list(self._header) if names is None else list(names)
        unknown = sorted(set(self._names) - set(self._header))
        if unknown:
            expected = f"columns of {path}: {self._header}"
            raise ValueError(explain("shards write", "--select", expected=expected, got=f"{unknown}"))
        self._places = [self._header.index(name) for name in self._names]
        self._kinds = {name: _TEXT if name in text else _INTEGER for name in self._names}
        self._scan()
        self.attributes: dict[str, Any] = {}
        numbers = [name for name in self._names if self._kinds[name] != _TEXT]
        if array is not None:
            if not numbers:
                raise bad_input(path, "a column of numbers for --array", f"text in all of {self._names}")
            self.attributes[array] = {"columns": numbers}
        self._numbers = numbers if array is not None else []

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[list[str], TextIO, int]]:
        """The header, the file behind it, and the number of lines that the header takes."""
        try:
            with self._path.open(encoding="utf-8-sig", newline="") as file:
                number, header = next(self._cells(file, 0), (0, []))
                if not header or "" in header or len(set(header)) != len(header):
                    got = f"{header}" if header else "nothing"
                    raise bad_input(self._path, "a first line that names the columns, each differently", got)
                yield header, file, number
        except UnicodeDecodeError as error:
            raise bad_input(self._path, "text in UTF-8", error, "Convert it: iconv -f LATIN1 -t UTF-8.") from error

    def _cells(self, lines: Iterable[str], before: int) -> Iterator[tuple[int, list[str]]]:
        """The number and the cells of each line that is not empty, behind so many others."""
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        try:
            for cells in reader:
                if cells:
                    yield before + reader.line_num, cells
        except csv.Error as error:
            got = f"line {before + reader.line_num}: {error}"
            raise bad_input(self._path, "a CSV file", got) from error

    def _blocks(self) -> Iterator[_Block]:
        with self._open() as (header, file, number):
            while lines := list(itertools.islice(file, _LINES)):
                if '"' in "".join(lines):  # a cell may go on behind these lines
                    rows = self._cells(itertools.chain(lines, file), number)
                    while cells := list(itertools.islice(rows, _LINES)):
                        yield _Block(self._checked(header, cells))
                    return
                rest = [line for line in lines if line not in _ENDS]
                yield _Block(rest, functools.partial(self._cells_of, header, lines, number))
                number += len(lines)

    def _cells_of(self, header: list[str], lines: list[str], before: int) -> list[list[str]]:
        return self._checked(header, self._cells(lines, before))

    def _checked(self, header: list[str], rows: Iterable[tuple[int, list[str]]]) -> list[list[str]]:
        found = []
        for number, cells in rows:
            if len(cells) != len(header):
                got = f"{len(cells)} in line {number}"
                remedy = "Is the delimiter right? See --delimiter."
                raise bad_input(self._path, f"{len(header)} cells in every line, as the first has", got, remedy)
            found.append(cells)
        return found

    def _scan(self) -> None:
        """Count the rows, and find out what each column holds."""
        self.rows = 0
        empty = dict.fromkeys(self._names, 0)
        for block in self._blocks():
            self.rows += len(block)
            if self._scan_numbers(block, empty):
                continue
            rows = block.cells
            for name, place in zip(self._names, self._places, strict=True):
                cells = [line[place] for line in rows]
                blanks = cells.count("")
                empty[name] += blanks
                self._kinds[name] = max(self._kinds[name], _kind([cell for cell in cells if cell]))
        self.notes = []
        for name in self._names:
            if empty[name] and self._kinds[name] != _TEXT:
                self._kinds[name] = _FLOAT
                cells_ = "cell" if empty[name] == 1 else "cells"
                self.notes.append(f"column {name!r}: {empty[name]} empty {cells_} became NaN")

    def _scan_numbers(self, block: _Block, empty: dict[str, int]) -> bool:
        """Count the empty cells, where all cells are numbers of the kinds found so far; False where they are not."""
        lines = self._numeric.lines(block.lines)
        if lines is None:
            return False
        if lines.columns(self._dtypes()) is not None:
            return True
        counts = lines.empty_cells()
        if counts is None or not counts.any() or lines.columns(self._dtypes(), "0") is None:
            return False
        for name, place in zip(self._names, self._places, strict=True):
            empty[name] += int(counts[place])
        return True

    def _dtypes(self) -> list[np.dtype[Any]]:
        """What each column of the file is read as, where all cells are numbers."""
        dtypes = [_DTYPES[_FLOAT]] * len(self._header)
        for name, place in zip(self._names, self._places, strict=True):
            if self._kinds[name] == _INTEGER:
                dtypes[place] = _DTYPES[_INTEGER]
        return dtypes

    def pieces(self, start: int, stop: int) -> Iterator[Columns]:
        first = 0
        for block in self._blocks():
            low, high = max(0, start - first), max(0, stop - first)
            if low < min(high, len(block)):
                yield self._columns(block, slice(low, high))
            first += len(block)
            if first >= stop:
                break
        if first < stop:
            raise bad_input(self._path, f"{self.rows} rows, as when it was first read", f"{first} rows")

    def _columns(self, block: _Block, rows: slice) -> Columns:
        columns: Columns = {}
        numbers = []
        lines = None if _TEXT in self._kinds.values() else self._numeric.lines(block.lines)
        found = None
        if lines is not None:
            found = lines.columns(self._dtypes()) or lines.columns(self._dtypes(), "nan")
        cells = block.cells[rows] if found is None else []
        for name, place in zip(self._names, self._places, strict=True):
            if found is not None:
                column = np.ascontiguousarray(found[place][rows])
            else:
                column = self._column(name, [line[place] for line in cells])
            if name in self._numbers:
                numbers.append(column)
            else:
                columns[name] = column
        if self._array is not None:
            columns = {self._array: np.stack(numbers, axis=1, dtype=np.result_type(*numbers)), **columns}
        return columns

    def _column(self, name: str, cells: list[str]) -> NDArray[Any]:
        kind = self._kinds[name]
        if kind == _TEXT:
            text = np.empty(len(cells), object)
            text[:] = cells
            return text
        try:
            return np.array([cell or "nan" for cell in cells]).astype(_DTYPES[kind])
        except (ValueError, OverflowError) as error:
            raise bad_input(self._path, f"numbers in column {name!r}, as when it was first read", error) from error


def _kind(cells: list[str]) -> int:
    """What some cells, none of them empty, are at the least."""
    if not cells:
        return _INTEGER
    texts = np.array(cells)
    if any("_" in cell for cell in cells):  # Python's digits, not those of tables
        return _TEXT
    for kind, dtype in _DTYPES.items():
        try:
            texts.astype(dtype)
            return kind
        except OverflowError:
            if all(cell.lstrip("+-").isdigit() for cell in cells):
                return _TEXT  # no float has all digits of so large an integer
        except ValueError:
            continue
    return _TEXT
