"""A CSV file as rows: numbers where a column holds nothing else, text elsewhere. Read twice, never held."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ....errors import explain
from ..columns import Columns
from .source import Source, bad_input

__all__ = ["Table"]

_LINES = 4096  # at a time
_INTEGER, _FLOAT, _TEXT = range(3)
_DTYPES: dict[int, np.dtype[Any]] = {_INTEGER: np.dtype(np.int64), _FLOAT: np.dtype(np.float64)}

_Lines = Generator[tuple[int, list[str]], None, None]  # the number and the cells of each


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
        self._header, lines = self._open()
        lines.close()
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

    def _open(self) -> tuple[list[str], _Lines]:
        """The header, and the numbered lines behind it."""
        lines = self._lines()
        header = next(lines, (0, []))[1]
        if not header or "" in header or len(set(header)) != len(header):
            got = f"{header}" if header else "nothing"
            raise bad_input(self._path, "a first line that names the columns, each differently", got)
        return header, lines

    def _lines(self) -> _Lines:
        try:
            with self._path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, delimiter=self._delimiter, strict=True)
                for cells in reader:
                    if cells:
                        yield reader.line_num, cells
        except UnicodeDecodeError as error:
            raise bad_input(self._path, "text in UTF-8", error, "Convert it: iconv -f LATIN1 -t UTF-8.") from error
        except csv.Error as error:
            raise bad_input(self._path, "a CSV file", f"line {reader.line_num}: {error}") from error

    def _blocks(self) -> Iterator[list[list[str]]]:
        header, lines = self._open()
        while block := list(itertools.islice(lines, _LINES)):
            for number, cells in block:
                if len(cells) != len(header):
                    got = f"{len(cells)} in line {number}"
                    remedy = "Is the delimiter right? See --delimiter."
                    raise bad_input(self._path, f"{len(header)} cells in every line, as the first has", got, remedy)
            yield [cells for _, cells in block]

    def _scan(self) -> None:
        """Count the rows, and find out what each column holds."""
        self.rows = 0
        empty = dict.fromkeys(self._names, 0)
        for block in self._blocks():
            self.rows += len(block)
            for name, place in zip(self._names, self._places, strict=True):
                cells = [line[place] for line in block]
                blanks = cells.count("")
                empty[name] += blanks
                self._kinds[name] = max(self._kinds[name], _kind([cell for cell in cells if cell]))
        self.notes = []
        for name in self._names:
            if empty[name] and self._kinds[name] != _TEXT:
                self._kinds[name] = _FLOAT
                cells_ = "cell" if empty[name] == 1 else "cells"
                self.notes.append(f"column {name!r}: {empty[name]} empty {cells_} became NaN")

    def pieces(self, start: int, stop: int) -> Iterator[Columns]:
        first = 0
        for block in self._blocks():
            rows = block[max(0, start - first) : max(0, stop - first)]
            if rows:
                yield self._columns(rows)
            first += len(block)
            if first >= stop:
                break
        if first < stop:
            raise bad_input(self._path, f"{self.rows} rows, as when it was first read", f"{first} rows")

    def _columns(self, rows: list[list[str]]) -> Columns:
        columns: Columns = {}
        numbers = []
        for name, place in zip(self._names, self._places, strict=True):
            column = self._column(name, [cells[place] for cells in rows])
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
