"""The converter of Parquet, Arrow and JSON-lines files, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from ....base import nest
from ...files.tables import TableRows
from ..columns import Columns
from .converter import Converter, batch_rows

__all__ = ["TableFile"]


@final
class TableFile(Converter):
    """The rows of one file, unit by unit."""

    def __init__(self, path: Path, select: Sequence[str] | None) -> None:
        self._rows = TableRows(path, select, None)
        self.rows = self._rows.cardinality()
        self.attributes: dict[str, Any] = {}
        self.notes = [f"left out: {name}, {why}" for name, why in self._rows.left_out.items()]

    def batches(self, start: int, stop: int) -> Iterator[Columns]:
        specs = nest.flatten(self._rows.row_spec)
        step = batch_rows(*((spec.dtype, tuple(length or 1 for length in spec.shape)) for spec in specs))
        for first in range(start, stop, step):
            positions = np.arange(first, min(first + step, stop))
            yield self._rows.gather(np.zeros_like(positions), positions)
