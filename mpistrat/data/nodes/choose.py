"""Elements taken from several datasets as a dataset of numbers says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from ...base.errors import explain
from .combine import compare_specs
from .node import UNKNOWN, Node
from .stage import Combined

__all__ = ["Chosen", "FUNCTION"]

FUNCTION = "choose_from_datasets"


@final
class Chosen(Combined):
    """Each element is the next one of the dataset whose number comes next among the choices. It reads in order."""

    def __init__(self, choices: Node, datasets: Sequence[Node], stop_on_empty: bool) -> None:
        super().__init__(FUNCTION, datasets)
        self._choices, self._datasets = choices, tuple(datasets)
        self._parents = (choices, *datasets)
        self._stop_on_empty = stop_on_empty
        self._checked = False

    @property
    def random_access(self) -> bool:
        return False

    @property
    def row_spec(self) -> Any:
        first = self._datasets[0].row_spec
        if not self._checked:
            for number, dataset in enumerate(self._datasets[1:], 1):
                compare_specs(FUNCTION, first, dataset.row_spec, number)
            spec = self._choices.row_spec
            scalar = getattr(spec, "shape", None) == () and spec.dtype.kind in "iu"
            if not scalar or self._choices.batching is not None:
                expected, got = "a dataset of single integers", "batches" if scalar else str(spec)
                raise TypeError(explain(FUNCTION, "choice_dataset", expected=expected, got=got))
            self._checked = True
        return first

    def cardinality(self) -> int:
        return 0 if self._choices.cardinality() == 0 else UNKNOWN

    def _all(self, epoch: int) -> Iterator[Any]:
        iterators = [dataset.elements(epoch) for dataset in self._datasets]
        nothing = object()
        for position, choice in enumerate(self._choices.elements(epoch)):
            _ = self.row_spec  # raises where the datasets do not match
            number = int(np.asarray(choice))
            if not 0 <= number < len(iterators):
                expected = f"numbers in [0, {len(iterators)})"
                raise ValueError(
                    explain(FUNCTION, "choice_dataset", expected=expected, got=f"{number} as element {position}")
                )
            element = next(iterators[number], nothing)
            if element is not nothing:
                yield element
            elif self._stop_on_empty:
                return

    def rebuild(self, parents: Sequence[Node]) -> Node:
        return Chosen(parents[0], parents[1:], self._stop_on_empty)

    def describe(self) -> str:
        return f"choose_from_datasets(stop_on_empty_dataset={self._stop_on_empty})"
