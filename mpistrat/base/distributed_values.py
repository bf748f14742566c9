"""Values that exist once per replica: PerReplica if they may differ, Mirrored if they are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import nest
from .errors import explain

__all__ = ["DistributedValues", "Mirrored", "PerReplica", "regroup", "select_replica"]

_NUMBERS = (int, float, complex, np.generic)


class DistributedValues:
    """One value for each local replica of this rank, ordered by replica id (TF: tf.distribute.DistributedValues).

    Args:
        values: the local replicas' values; other ranks hold their own.

    Raises:
        ValueError: `values` is empty.
    """

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values: tuple[Any, ...] = tuple(values)
        if not self.values:
            raise ValueError(f"{type(self).__name__}: values: expected one for each local replica, got none")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Raise TypeError: there are several values, one for each local replica."""
        raise self._no_single_value("an array")

    def __float__(self) -> float:
        """Raise TypeError, as for an array."""
        raise self._no_single_value("a number")

    def _no_single_value(self, expected: str) -> TypeError:
        got = f"a {type(self).__name__} of {len(self.values)}"
        remedy = "Take strategy.reduce or strategy.gather, or strategy.local_results for each one"
        return TypeError(explain("DistributedValues", "", expected=expected, got=got, remedy=remedy))

    def __repr__(self) -> str:
        lines = "".join(f"\n  {index}: {value!r}" for index, value in enumerate(self.values))
        return f"{type(self).__name__}:{{{lines}\n}}"


class PerReplica(DistributedValues):
    """Values that may differ between replicas."""

    __slots__ = ()


class Mirrored(DistributedValues):
    """Values that are equal on every replica, one per local device."""

    __slots__ = ()


def regroup(values: Sequence[Any], wrap: type[DistributedValues] = PerReplica, *, keep_numbers: bool = False) -> Any:
    """Return one structure whose leaves hold the local replicas' results.

    A leaf that is the same object on every replica is not wrapped; with one local replica nothing is.

    Args:
        values: one structure for each local replica; their forms must match.
        wrap: the class of the leaves.
        keep_numbers: always wrap numbers, because equal ones may or may not be the same object.

    Raises:
        ValueError: the forms differ, with the path.

    Example:
        >>> regroup([{"loss": 1}, {"loss": 2}])["loss"].values
        (1, 2)
    """
    if len(values) == 1:
        return values[0]

    def group(*leaves: Any) -> Any:
        first = leaves[0]
        same = all(leaf is first for leaf in leaves) and not (keep_numbers and isinstance(first, _NUMBERS))
        return first if same else wrap(leaves)

    return nest.map_structure(group, *values)


def select_replica(local_replica: int, structure: Any) -> Any:
    """Return one local replica's structure: the inverse of `regroup`.

    Example:
        >>> select_replica(1, {"loss": PerReplica([1, 2]), "step": 7})
        {'loss': 2, 'step': 7}
    """

    def pick(leaf: Any) -> Any:
        return leaf.values[local_replica] if isinstance(leaf, DistributedValues) else leaf

    return nest.map_structure(pick, structure)
