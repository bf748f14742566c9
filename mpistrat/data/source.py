"""What the sources of chains have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .dataset import Addresses, Dataset

__all__ = ["RowSource"]


class RowSource(Dataset):
    """Rows that come from no other dataset; each is an element, and has its position for an address."""

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return ()

    @property
    def batching(self) -> None:
        return None

    def locate(self, epoch: int, position: int) -> Addresses:
        return np.array([epoch], np.int64), np.array([position], np.int64)

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return self
