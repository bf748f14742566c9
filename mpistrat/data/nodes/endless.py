"""Endless sources: a counter and random numbers, each a function of the position and the epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base.arguments import integer
from ...base.errors import explain
from ..permutation import DEFAULT_SEED, random_words_at
from ..spec import ArraySpec
from .node import INFINITE, Node, Traits
from .stage import InputRows

__all__ = ["counter", "random"]


Compute = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[Any]]  # numbers, of epochs and positions


@final
class _Numbers(InputRows):
    """Endless numbers that a function computes from epochs and positions."""

    traits = Traits(repeated=True)

    def __init__(self, text: str, dtype: np.dtype[Any], compute: Compute) -> None:
        self._text, self._spec, self._compute = text, ArraySpec((), dtype), compute

    @property
    def row_spec(self) -> ArraySpec:
        return self._spec

    def cardinality(self) -> int:
        return INFINITE

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[Any]:
        return self._compute(epochs, positions)

    def describe(self) -> str:
        return self._text


def counter(start: Any = 0, step: Any = 1, dtype: Any = np.int64) -> Node:
    """Make a dataset that counts in steps from a number, without end; random access.

    Args:
        start: the first number.
        step: the difference of successive numbers; negative to count down.
        dtype: the numbers' dtype.

    Raises:
        TypeError: for a start or step that is not a number, and for a dtype other than integers and floats.
        ValueError: for a start or step that the dtype cannot represent.

    Example:
        >>> [int(x) for x in ms.data.Dataset.counter(start=2, step=5).take(4)]
        [2, 7, 12, 17]
    """
    for argument, value in (("start", start), ("step", step)):
        if np.ndim(value) or np.asarray(value).dtype.kind not in "iuf":
            raise TypeError(explain("Dataset.counter", argument, expected="a number", got=repr(value)))
    dtype = np.dtype(dtype)
    if dtype.kind not in "iuf":
        raise TypeError(explain("Dataset.counter", "dtype", expected="one of integers or floats", got=str(dtype)))
    if dtype.kind != "f":
        limits = np.iinfo(dtype)
        for argument, value in (("start", start), ("step", step)):
            within = argument == "step" or limits.min <= value <= limits.max
            if not np.isfinite(value) or value != int(value) or not within:
                remedy = "Give another dtype."
                raise ValueError(
                    explain("Dataset.counter", argument, expected=f"a {dtype}", got=repr(value), remedy=remedy)
                )
        start, step = int(start), int(step)
    text = f"counter({start}, {step}): {ArraySpec((), dtype)}"
    return _Numbers(text, dtype, lambda epochs, positions: (start + step * positions).astype(dtype))


def random(seed: int | None = None, rerandomize_each_iteration: bool | None = None) -> Node:
    """Make a dataset of random integers in [0, 2**32), as int64, without end; random access.

    They depend on the seed, the epoch and the position, and are the same for any number of ranks.

    Args:
        seed: any integer, the same on every rank; None is 0 in every run (TensorFlow draws one per run).
        rerandomize_each_iteration: whether each epoch has different numbers; None is False.

    Example:
        >>> numbers = ms.data.Dataset.random(seed=4).take(10)
        >>> list(numbers) == list(numbers)
        True
    """
    seed = integer("Dataset.random", "seed", DEFAULT_SEED if seed is None else seed)
    each_epoch = bool(rerandomize_each_iteration)

    def words(epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        numbers = np.empty(positions.shape, np.int64)
        keys = epochs if each_epoch else np.zeros_like(epochs)
        for key in np.unique(keys).tolist():
            here = keys == key
            numbers[here] = random_words_at((seed, key), positions[here]) >> np.uint64(32)
        return numbers

    text = f"random(seed={seed}, rerandomize_each_iteration={each_epoch})"
    return _Numbers(text, np.dtype(np.int64), words)
