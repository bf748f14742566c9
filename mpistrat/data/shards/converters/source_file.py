"""A file that a source reads as rows: tables, HDF5, tar archives, TFRecord, Zarr."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from ...nodes.node import Node
from ...spec import ArraySpec
from ..columns import Columns
from .converter import Converter, bad_input, batch_rows

__all__ = ["SourceFile"]


@final
class SourceFile(Converter):
    """The rows of one file, in order.

    Args:
        path: for errors.
        rows: the source; its rows are dicts of arrays.
        left_out: fields that are not read, and why.
    """

    def __init__(self, path: Path, rows: Node, left_out: Mapping[str, str]) -> None:
        self._node = rows
        self.rows = rows.cardinality()
        self.attributes: dict[str, Any] = {}
        self.notes = [f"left out: {name}, {why}" for name, why in left_out.items()]
        self._alone = isinstance(rows.row_spec, ArraySpec)  # a single array, which gets the name of its file
        self.specs: dict[str, ArraySpec] = {path.stem: rows.row_spec} if self._alone else rows.row_spec
        for name, spec in self.specs.items():
            if not isinstance(spec, ArraySpec):
                remedy = "Leave it out with --select, or write the shards with ms.data.write_shards."
                raise bad_input(path, "fields of one array each", f"{name!r} of several", remedy)

    def batches(self, start: int, stop: int) -> Iterator[Columns]:
        specs = self.specs.values()
        step = batch_rows(*((spec.dtype, tuple(length or 1 for length in spec.shape)) for spec in specs))
        for first in range(start, stop, step):
            positions = np.arange(first, min(first + step, stop))
            rows = self._node.gather(np.zeros_like(positions), positions)
            yield dict.fromkeys(self.specs, rows) if self._alone else rows
