"""Contiguous, unfiltered data through a memory map of the file."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import take_rows

__all__ = ["MappedReader"]


class MappedReader:
    """Rows of contiguous data, copied as bytes: alignment and byte order do not matter."""

    kind = "memory map"

    def __init__(self, file_bytes: mmap.mmap, offset: int, rows: int, row_bytes: int) -> None:
        flat = np.frombuffer(file_bytes, np.uint8, count=rows * row_bytes, offset=offset)
        self._rows = flat.reshape(rows, row_bytes)

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        take_rows(self._rows, rows, out.reshape(len(rows), -1).view(np.uint8) if out.size else out)
