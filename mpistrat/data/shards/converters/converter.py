"""The protocol of converters: rows from other file kinds, of which each rank reads its share in batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ....base.errors import ShardError, explain
from ..columns import Columns

__all__ = ["Converter", "PresumptionError", "bad_input", "batch_rows"]

_BATCH_BYTES = 1 << 23


class PresumptionError(Exception):
    """The error of a row whose kind differs from the presumed one."""


class Converter(ABC):
    """Rows of some files.

    Attributes:
        rows: the number of rows.
        attributes: HDF5 attributes by field.
        notes: remarks on the conversion for the user.
    """

    rows: int
    attributes: Mapping[str, Mapping[str, Any]]
    notes: list[str]

    @property
    def presumed(self) -> bool:
        """True if only some of the files' content was checked, so that `batches` may raise."""
        return False

    def settle(self) -> None:  # noqa: B027 - nothing to do unless something is presumed
        """Check all content of the files, so that nothing is presumed."""

    def why_text(self, name: str) -> str:
        """Return the first cell that makes a column text, and its row; "" for a column requested as text."""
        return ""

    @abstractmethod
    def batches(self, start: int, stop: int) -> Iterator[Columns]:
        """Return the rows from `start` to `stop` in batches.

        Raises:
            PresumptionError: when the rows are not as presumed. Call `settle`, and take all batches again.
        """


def bad_input(path: object, expected: str, got: object, remedy: str = "") -> ShardError:
    """Return the error of a file that cannot be converted."""
    return ShardError(explain("shards write", str(path), expected=expected, got=got, remedy=remedy))


def batch_rows(*arrays: tuple[np.dtype[Any], tuple[int, ...]]) -> int:
    """Return the number of rows of these dtypes and shapes in a batch."""
    row_bytes = sum(dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for dtype, shape in arrays)
    return max(1, _BATCH_BYTES // max(1, row_bytes))
