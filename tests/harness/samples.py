"""Objects with a length and an item for each row; processes import them from here."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Squares:
    """Rows 0, 1, 4, 9 … as PyTorch's map-style datasets are written."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        assert type(row) is int
        if not 0 <= row < self.length:
            raise IndexError(row)
        return row**2


class Rows(Squares):
    """Rows as those of Hugging Face's datasets: dicts of Python's own values, several at once by `__getitems__`."""

    asked: list[list[int]]

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.asked = []

    def __getitem__(self, row: int) -> Any:
        return {"tokens": [row, row + 1], "label": row % 3, "text": f"row {row}"}

    def __getitems__(self, rows: list[int]) -> list[Any]:
        self.asked.append(rows)
        return [self[row] for row in rows]


class FailsAt5(Squares):
    def __getitem__(self, row: int) -> Any:
        if row == 5:
            raise KeyError("not five")
        return row


class OddRowsFail(Squares):
    def __getitem__(self, row: int) -> Any:
        if row % 2:
            raise KeyError(row)
        return row


class FailsTogether(FailsAt5):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


class DiesAt5(Squares):
    def __getitem__(self, row: int) -> Any:
        if row == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return row


class NothingAt5(Squares):
    def __getitem__(self, row: int) -> Any:
        return None if row == 5 else row


class OtherProcesses(Squares):
    def __getitem__(self, row: int) -> Any:
        launched = sum(name.startswith(("PMI_", "PMIX_", "OMPI_", "HYDRA_")) for name in os.environ)
        return os.getpid(), launched


class Locked(Squares):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.lock = threading.Lock()


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Labelled:
    image: Any
    boxes: Any


class ArrayLike:
    """As a tensor of another library."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.values, dtype)


class Nested(Squares):
    def __getitem__(self, row: int) -> Any:
        image = ArrayLike(np.full((2, 2), row, np.uint8))
        return Labelled(image, Point([row, row], {"file": Path(f"{row}.png"), "area": row / 2}))
