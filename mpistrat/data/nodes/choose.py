"""Elements taken from several datasets as a dataset of numbers says."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...base.errors import explain
from .combine import compare_specs
from .node import Node
from .stage import common_batching
from .streamed import Streamed

__all__ = ["FUNCTION", "choose"]

FUNCTION = "choose_from_datasets"


def choose(choices: Node, datasets: Sequence[Node], stop_on_empty: bool) -> Node:
    """Take the next element of the dataset whose number comes next among the choices; see `Dataset.choose_from_datasets`."""
    batching = common_batching(FUNCTION, datasets)
    return Streamed(
        f"choose_from_datasets(stop_on_empty_dataset={stop_on_empty})",
        [choices, *datasets],
        functools.partial(_chosen, stop_on_empty),
        row_spec=_common_spec,
        batching=lambda *_: batching,
    )


def _common_spec(choices: Node, *datasets: Node) -> Any:
    first = datasets[0].row_spec
    for number, dataset in enumerate(datasets[1:], 1):
        compare_specs(FUNCTION, first, dataset.row_spec, number)
    spec = choices.row_spec
    scalar = getattr(spec, "shape", None) == () and spec.dtype.kind in "iu"
    if not scalar or choices.batching is not None:
        expected, got = "a dataset of single integers", "batches" if scalar else str(spec)
        raise TypeError(explain(FUNCTION, "choice_dataset", expected=expected, got=got))
    return first


def _chosen(stop_on_empty: bool, epoch: int, choices: Node, *datasets: Node) -> Iterator[Any]:
    iterators = [dataset.elements(epoch) for dataset in datasets]
    nothing = object()
    for position, choice in enumerate(choices.elements(epoch)):
        if position == 0:
            _common_spec(choices, *datasets)  # raises if the datasets do not match
        number = int(np.asarray(choice))
        if not 0 <= number < len(iterators):
            expected = f"numbers in [0, {len(iterators)})"
            raise ValueError(
                explain(FUNCTION, "choice_dataset", expected=expected, got=f"{number} as element {position}")
            )
        element = next(iterators[number], nothing)
        if element is not nothing:
            yield element
        elif stop_on_empty:
            return
