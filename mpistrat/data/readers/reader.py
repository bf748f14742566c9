"""What every reader of rows does."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["FieldReader"]


class FieldReader(Protocol):
    """Reads rows of one dataset of one file."""

    kind: str

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy rows, in range and in any order, into a C-contiguous buffer of the file's dtype."""
