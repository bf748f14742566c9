"""The converter of a CSV file: numbers in columns of numbers, text elsewhere. The file is never in memory as a whole."""

from __future__ import annotations

import bisect
import codecs
import contextlib
import csv
import io
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ....base.conversion import not_held
from ....base.errors import explain
from ..columns import Columns
from .converter import Converter, PresumptionError, bad_input
from .numeric_lines import NumericLines, NumericReader

__all__ = ["Table"]

_BLOCK = 1 << 21  # bytes read at a time, up to the end of a line
_FIRST_BLOCK = 1 << 16  # read cell by cell
_LINES = 4096  # lines at a time if a row may span several
_SAMPLE = 256  # lines of a block that are read to determine column types
_INTEGER, _FLOAT, _TEXT = range(3)
_DTYPES: dict[int, np.dtype[Any]] = {_INTEGER: np.dtype(np.int64), _FLOAT: np.dtype(np.float64)}


class _Start(NamedTuple):
    """The start of a block."""

    offset: int  # offset in the file
    line: int  # lines before it
    row: int  # rows before it


@final
class _Block:
    """Successive rows of the file: either lines, or the cells of rows that may span several lines."""

    def __init__(self, start: _Start, data: bytes, cells: list[list[str]] | None) -> None:
        self.start = start
        self.data = data
        self.cells = cells
        self.lines = b"" if cells is not None else _full_lines(data)
        self.rows = len(cells) if cells is not None else self.lines.count(b"\n")


@final
class Table(Converter):
    """The rows of a CSV file whose first line names the columns, or is a row.

    Column types are presumed from the first block and some lines of each other block, if the whole file may be numbers;
    then only `batches` reads every number. Otherwise, and after `settle`, every cell was checked.

    Args:
        path: the file, in UTF-8.
        names: the wanted columns; None for all.
        delimiter: the separator of cells.
        array: the name of one array for all columns of numbers, in their order.
        text: columns that are text in any case.
        header: whether the first line names the columns; None for True, with an error if a name is a number. Without
            names columns are "column_0", "column_1", and so on.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str] | None,
        delimiter: str,
        array: str | None,
        text: Collection[str],
        header: bool | None = None,
    ) -> None:
        self._path = path
        self._delimiter = delimiter
        self._array = array
        self._named = header
        self._plain = True  # whether lines can be read as bytes from the first row on
        self._header, self._first = self._read_header()
        self._numeric = NumericReader(delimiter)
        self._names = list(self._header) if names is None else list(names)
        unknown = sorted(set(self._names) - set(self._header))
        if unknown:
            expected = f"columns of {path}: {self._header}"
            raise ValueError(explain("shards write", "--select", expected=expected, got=f"{unknown}"))
        self._places = [self._header.index(name) for name in self._names]
        self._text = set(text)
        self._scan(thoroughly=False)

    @property
    def presumed(self) -> bool:
        return bool(self._presumed)

    def settle(self) -> None:
        self._scan(thoroughly=True)

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            with self._path.open("rb") as file:
                yield file
        except UnicodeDecodeError as error:
            raise bad_input(self._path, "text in UTF-8", error, "Convert it: iconv -f LATIN1 -t UTF-8.") from error

    def _read_header(self) -> tuple[list[str], _Start]:
        with self._open() as file:
            marked = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
            file.seek(0)
            number, header = next(self._cells(_text(file, 0), 0), (0, []))
        if self._named is False and header:
            return [f"column_{place}" for place in range(len(header))], _Start(len(codecs.BOM_UTF8) * marked, 0, 0)
        if not header or "" in header or len(set(header)) != len(header):
            got = f"{header}" if header else "nothing"
            remedy = "pandas writes no index with to_csv(..., index=False)." if header[:1] == [""] else ""
            raise bad_input(self._path, "a first line that names the columns, each differently", got, remedy)
        if self._named is None and any(_kind([name]) != _TEXT for name in header):
            remedy = "If it is a row, add --header no; if it names the columns, --header yes."
            raise bad_input(self._path, "a first line that names the columns", f"numbers in it: {header}", remedy)
        with self._open() as file:
            lines = [file.readline(_BLOCK) for _ in range(number)]
            self._plain = all(line.endswith(b"\n") for line in lines) and not _odd(b"".join(lines))
            return header, _Start(file.tell(), number, 0) if self._plain else _Start(0, 0, 0)

    def _cells(self, lines: Iterable[str], before: int) -> Iterator[tuple[int, list[str]]]:
        """Yield the number and the cells of each non-empty line, after `before` other lines."""
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        try:
            for cells in reader:
                if cells:
                    yield before + reader.line_num, cells
        except csv.Error as error:
            got = f"line {before + reader.line_num}: {error}"
            raise bad_input(self._path, "a CSV file", got) from error

    def _blocks(self, start: _Start) -> Iterator[_Block]:
        with self._open() as file:
            file.seek(start.offset)
            while data := file.read(size := _BLOCK if start.row else _FIRST_BLOCK):
                data = data if len(data) < size else data[: data.rfind(b"\n") + 1]
                if not (self._plain and data) or b'"' in data or _odd(data):  # a row may continue after these lines
                    file.seek(start.offset)
                    yield from self._blocks_of_cells(file, start)
                    return
                block = _Block(start, data, None)
                yield block
                file.seek(start.offset + len(data))
                start = _Start(file.tell(), start.line + data.count(b"\n"), start.row + block.rows)

    def _blocks_of_cells(self, file: BinaryIO, start: _Start) -> Iterator[_Block]:
        rows = self._cells(_text(file, start.offset), start.line)
        if not self._plain:
            next(rows)  # the header
        while cells := list(itertools.islice(rows, _LINES)):
            yield _Block(start, b"", self._checked(cells))

    def _cells_of(self, block: _Block) -> list[list[str]]:
        if block.cells is not None:
            return block.cells
        lines = io.StringIO(block.data.decode(), newline="")
        return self._checked(self._cells(lines, block.start.line))

    def _checked(self, rows: Iterable[tuple[int, list[str]]]) -> list[list[str]]:
        found = []
        for number, cells in rows:
            if len(cells) != len(self._header):
                got = f"{len(cells)} in line {number}"
                remedy = "Is the delimiter right? See --delimiter."
                expected = f"{len(self._header)} cells in every line, as the first has"
                raise bad_input(self._path, expected, got, remedy)
            found.append(cells)
        return found

    def _scan(self, *, thoroughly: bool) -> None:
        """Count the rows, and determine each column's type."""
        self._kinds = {name: _TEXT if name in self._text else _INTEGER for name in self._names}
        self._first_texts: dict[str, str] = {}  # of columns that were not requested as text
        self._changed: dict[str, str] = {}  # the first number of a column that float64 cannot represent
        self._starts: list[_Start] = []
        self.rows = 0
        self._presumed: set[_Start] = set()  # blocks
        empty = np.zeros(len(self._header), np.int64)  # cells per column
        for block in self._blocks(self._first):
            if block.start not in self._starts[-1:]:
                self._starts.append(block.start)
            lines = self._numeric.lines(block.lines)
            if not thoroughly and self.rows and lines is not None and self._look(lines, empty):
                self._presumed.add(block.start)
            elif lines is None or not self._look(lines, empty, every=True):
                self._look_at_cells(self._cells_of(block), empty)
            self.rows += block.rows
        if self._presumed and _TEXT in self._kinds.values():
            self._scan(thoroughly=True)
            return
        self.notes = [f"column {name!r} is text, as in {where}" for name, where in self._first_texts.items()]
        for name, place in zip(self._names, self._places, strict=True):
            if empty[place] and self._kinds[name] != _TEXT:
                self._kinds[name] = _FLOAT
                cells = "cell" if empty[place] == 1 else "cells"
                self.notes.append(f"column {name!r}: {empty[place]} empty {cells} became NaN")
        numbers = [name for name in self._names if self._kinds[name] != _TEXT]
        if self._array is not None and not numbers:
            raise bad_input(self._path, "a column of numbers for --array", f"text in all of {self._names}")
        if self._array is not None and any(self._kinds[name] == _FLOAT for name in numbers):
            self._kinds.update(dict.fromkeys(numbers, _FLOAT))
        changed = {
            name: self._changed[name] for name in numbers if name in self._changed and self._kinds[name] == _FLOAT
        }
        self.notes += [
            f"column {name!r}: float64 does not hold all numbers: {where}; --dtype {name}=str keeps them"
            for name, where in changed.items()
        ]
        self._numbers = numbers if self._array is not None else []
        self.attributes = {} if self._array is None else {self._array: {"columns": numbers}}

    def _look(self, lines: NumericLines, empty: NDArray[np.int64], *, every: bool = False) -> bool:
        """Count the empty cells; return False if cells are not numbers of the types found so far.

        Every line is read, or only some of them.
        """
        counts = lines.empty_cells(len(self._header)) if lines.has_empty_cells else 0
        found = (lines if every else lines.head(_SAMPLE)).columns(self._dtypes(), "0")
        if counts is None or found is None:
            return False
        empty += counts
        for name, place in zip(self._names, self._places, strict=True):
            if self._kinds[name] == _INTEGER:  # later lines may make it a float column
                for row in np.flatnonzero(not_held(found[place], _DTYPES[_FLOAT]))[:1]:
                    self._note_change(name, row, str(found[place][row]))
        return True

    def _look_at_cells(self, rows: list[list[str]], empty: NDArray[np.int64]) -> None:
        for name, place in zip(self._names, self._places, strict=True):
            cells = [line[place] for line in rows]
            empty[place] += cells.count("")
            known, kind = self._kinds[name], _kind([cell for cell in cells if cell])
            self._kinds[name] = max(known, kind)
            if known < kind == _TEXT:
                row, cell = next((row, cell) for row, cell in enumerate(cells) if cell and _kind([cell]) == _TEXT)
                self._first_texts[name] = f"row {self.rows + row + 1}: {cell!r:.80}"
            if self._kinds[name] != _TEXT:
                numbers = np.array([cell or "nan" for cell in cells]).astype(np.float64)
                large = np.flatnonzero(np.abs(numbers) >= 2**53).tolist()
                changed = next((place for place in large if _is_changed(cells[place])), None)
                if changed is not None:
                    self._note_change(name, changed, cells[changed])

    def _note_change(self, name: str, row: int, cell: str) -> None:
        self._changed.setdefault(name, f"row {self.rows + row + 1}: {cell.strip()!r:.80} becomes {float(cell)}")

    def why_text(self, name: str) -> str:
        return self._first_texts.get(name, "")

    def _dtypes(self) -> list[np.dtype[Any]]:
        dtypes = [_DTYPES[_FLOAT]] * len(self._header)
        for name, place in zip(self._names, self._places, strict=True):
            if self._kinds[name] == _INTEGER:
                dtypes[place] = _DTYPES[_INTEGER]
        return dtypes

    def batches(self, start: int, stop: int) -> Iterator[Columns]:
        rows = 0
        block_number = bisect.bisect_right(self._starts, start, key=lambda each: each.row) - 1
        first = self._starts[block_number].row if start < stop else stop
        for block in self._blocks(self._starts[block_number]) if start < stop else ():
            rows, low, high = first + block.rows, max(0, start - first), max(0, stop - first)
            if low < min(high, block.rows):
                yield self._columns(block, slice(low, high))
            first = rows
            if first >= stop:
                break
        if first < stop:
            raise bad_input(self._path, f"{self.rows} rows, as when it was first read", f"{first} rows")

    def _columns(self, block: _Block, rows: slice) -> Columns:
        columns: Columns = {}
        numbers = []
        lines, found = None, None
        if block.start in self._presumed:
            lines = NumericLines(block.lines, self._delimiter)
        elif _TEXT not in self._kinds.values():
            lines = self._numeric.lines(block.lines)
        if lines is not None:
            found = lines.columns(self._dtypes(), "nan")
        if found is None and block.start in self._presumed:
            raise PresumptionError
        cells = self._cells_of(block)[rows] if found is None else []
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


def _text(file: BinaryIO, offset: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, encoding="utf-8" if offset else "utf-8-sig", newline="")


def _odd(lines: bytes) -> bool:
    """Return True if a line ends with a carriage return alone."""
    return b"\r" in lines and b"\r" in lines.replace(b"\r\n", b"\n")


def _full_lines(data: bytes) -> bytes:
    """Return the non-empty lines, each ended by a newline."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    data = data if data.endswith(b"\n") else data + b"\n"
    while b"\n\n" in data:
        data = data.replace(b"\n\n", b"\n")
    return data.removeprefix(b"\n")


def _kind(cells: list[str]) -> int:
    """Return the most specific type of some cells, none of them empty."""
    if not cells:
        return _INTEGER
    texts = np.array(cells)
    if any("_" in cell for cell in cells):  # Python accepts "_" in numbers, tables do not
        return _TEXT
    for kind, dtype in _DTYPES.items():
        try:
            texts.astype(dtype)
            return kind
        except OverflowError:
            if all(cell.lstrip("+-").isdigit() for cell in cells):
                return _TEXT  # no float has all digits of such a large integer
        except ValueError:
            continue
    return _TEXT


def _is_changed(cell: str) -> bool:
    """Return True for an integer that float64 rounds, or a number so large that it becomes inf."""
    try:
        return int(cell) != float(cell)  # compared exactly
    except ValueError:
        return math.isinf(float(cell)) and "inf" not in cell.lower()
