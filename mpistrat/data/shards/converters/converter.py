"""The protocol of converters: rows of files of another kind, of which each rank reads its part, some at a time."""

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
    """A later row is of another kind than the first ones."""


class Converter(ABC):
    """Rows of some files.

    Attributes:
        rows: how many there are.
        attributes: HDF5 attributes by field.
        notes: what a user should know of the conversion.
    """

    rows: int
    attributes: Mapping[str, Mapping[str, Any]]
    notes: list[str]

    @property
    def presumed(self) -> bool:
        """Whether the files were looked at in part only, so that `batches` may find something else."""
        return False

    def settle(self) -> None:  # noqa: B027 - where nothing is presumed there is nothing to do
        """Look at all that is in the files: then nothing is presumed."""

    def why_text(self, name: str) -> str:
        """Return the first cell that makes a column text, and its row; "" for a column that was asked for as text."""
        return ""

    @abstractmethod
    def batches(self, start: int, stop: int) -> Iterator[Columns]:
        """Return the rows from `start` to `stop` in batches.

        Raises:
            PresumptionError: when the rows are not what was presumed. `settle`, and take all batches again.
        """


def bad_input(path: object, expected: str, got: object, remedy: str = "") -> ShardError:
    """Return the error about a file that cannot be converted."""
    return ShardError(explain("shards write", str(path), expected=expected, got=got, remedy=remedy))


def batch_rows(*arrays: tuple[np.dtype[Any], tuple[int, ...]]) -> int:
    """Return how many rows of these dtypes and shapes make a batch."""
    row_bytes = sum(dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for dtype, shape in arrays)
    return max(1, _BATCH_BYTES // max(1, row_bytes))
