"""Partitioners: the number of shards of a variable that several servers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..arena.values import parse_dtype
from ..base.errors import explain

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner", "check_partitions"]


class Partitioner(ABC):
    """A function that returns the number of shards of a variable (TF: tf.distribute.experimental.partitioners.Partitioner).

    Any function `f(shape, dtype, axis=0)` that returns such a list can be used instead.
    """

    @abstractmethod
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards of each axis: 1 on all axes but one. The same on every rank.

        Args:
            shape: of the variable.
            dtype: of its elements.
            axis: the axis to divide.
        """


@final
class FixedShardsPartitioner(Partitioner):
    """A fixed number of shards, but no more than rows (TF: FixedShardsPartitioner).

    Args:
        num_shards: the number of shards.

    Raises:
        ValueError: num_shards < 1.
        TypeError: no integer.

    Example:
        >>> FixedShardsPartitioner(2)((10, 3), "float32")
        [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = _positive("FixedShardsPartitioner", "num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        return _on_axis(shape, axis, self.num_shards)

    def __repr__(self) -> str:
        return f"FixedShardsPartitioner({self.num_shards})"


@final
class MinSizePartitioner(Partitioner):
    """The most shards of at least `min_shard_bytes` each (TF: MinSizePartitioner).

    The bound holds for the smallest shard. TensorFlow rounds up, so its shards can be smaller than documented: 40 bytes become
    two shards of 20 where each should have at least 30.

    Args:
        min_shard_bytes: least bytes of a shard.
        max_shards: most shards.
        bytes_per_string: the size of a text element.

    Raises:
        ValueError: a number < 1.
        TypeError: no integer.

    Example:
        >>> MinSizePartitioner(min_shard_bytes=4, max_shards=10)((6, 1), "float32")
        [6, 1]
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16) -> None:
        self.min_shard_bytes = _positive("MinSizePartitioner", "min_shard_bytes", min_shard_bytes)
        self.max_shards = _positive("MinSizePartitioner", "max_shards", max_shards)
        self.bytes_per_string = _positive("MinSizePartitioner", "bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        rows, row = _rows(shape, dtype, axis, self.bytes_per_string)
        rows_per_shard = -(-self.min_shard_bytes // row) if row else max(1, rows)
        return _on_axis(shape, axis, min(self.max_shards, rows // rows_per_shard))

    def __repr__(self) -> str:
        return f"MinSizePartitioner({self.min_shard_bytes}, {self.max_shards}, {self.bytes_per_string})"


@final
class MaxSizePartitioner(Partitioner):
    """The fewest shards of at most `max_shard_bytes` each, or of one row (TF: MaxSizePartitioner).

    Args:
        max_shard_bytes: most bytes of a shard.
        max_shards: most shards, even if they are then larger; None for any number.
        bytes_per_string: the size of a text element.

    Raises:
        ValueError: a number < 1.
        TypeError: no integer.

    Example:
        >>> MaxSizePartitioner(max_shard_bytes=8)((6, 1), "float32")
        [3, 1]
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16) -> None:
        self.max_shard_bytes = _positive("MaxSizePartitioner", "max_shard_bytes", max_shard_bytes)
        self.max_shards = None if max_shards is None else _positive("MaxSizePartitioner", "max_shards", max_shards)
        self.bytes_per_string = _positive("MaxSizePartitioner", "bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        rows, row = _rows(shape, dtype, axis, self.bytes_per_string)
        rows_per_shard = max(1, self.max_shard_bytes // row if row else rows)
        shards = -(-rows // rows_per_shard)
        return _on_axis(shape, axis, shards if self.max_shards is None else min(self.max_shards, shards))

    def __repr__(self) -> str:
        return f"MaxSizePartitioner({self.max_shard_bytes}, {self.max_shards}, {self.bytes_per_string})"


def check_partitions(result: Any, shape: Sequence[int], name: str = "result") -> int:
    """Return the number of shards of a variable's rows, from the result of a partitioner.

    Raises:
        TypeError: no list of integers.
        ValueError: not one number for each axis; a number < 1; another axis than the first; more shards than rows.

    Example:
        >>> check_partitions([3, 1], (13, 4))
        3
    """
    shape = tuple(shape)
    if not isinstance(result, (list, tuple)) or not all(_is_integer(number) for number in result):
        expected = f"a list of {len(shape)} integers for shape {shape}"
        raise TypeError(explain("variable_partitioner", name, expected=expected, got=f"{result!r:.60}"))
    if len(result) != len(shape) or any(number < 1 for number in result):
        expected = f"a number >= 1 for each axis of shape {shape}"
        raise ValueError(explain("variable_partitioner", name, expected=expected, got=result))
    if any(number > 1 for number in result[1:]):
        expected = f"1 on all axes but the first, for shape {shape}"
        raise ValueError(explain("variable_partitioner", name, expected=expected, got=result))
    if shape and result[0] > max(1, shape[0]):
        expected = f"at most {max(1, shape[0])} shards for shape {shape}"
        raise ValueError(explain("variable_partitioner", name, expected=expected, got=result))
    return int(result[0]) if shape else 1


def _is_integer(number: Any) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def _positive(function: str, argument: str, number: Any) -> int:
    if not _is_integer(number):
        raise TypeError(explain(function, argument, expected="an integer", got=repr(number)))
    if number < 1:
        raise ValueError(explain(function, argument, expected=">= 1", got=number))
    return int(number)


def _on_axis(shape: Sequence[int], axis: int, shards: int) -> list[int]:
    """Return 1 for all axes but one, which gets `shards`: at least 1, at most its length. A scalar has no axes."""
    if not shape:
        return []
    _check_axis(shape, axis)
    partitions = [1] * len(shape)
    partitions[axis] = max(1, min(shards, shape[axis]))
    return partitions


def _rows(shape: Sequence[int], dtype: Any, axis: int, bytes_per_string: int) -> tuple[int, int]:
    """Return the number of rows, and the bytes of one."""
    if not shape:
        return 1, 0
    _check_axis(shape, axis)
    others = np.prod([length for i, length in enumerate(shape) if i != axis % len(shape)], dtype=np.int64)
    text = dtype != "bfloat16" and np.dtype(dtype).kind in "SUO"
    return shape[axis], int(others) * (bytes_per_string if text else parse_dtype(dtype, "Partitioner").itemsize)


def _check_axis(shape: Sequence[int], axis: int) -> None:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(explain("Partitioner", "axis", expected=f"an axis of shape {tuple(shape)}", got=axis))
