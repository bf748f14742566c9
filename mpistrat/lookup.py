"""`ms.lookup`: constant tables from keys to values (TF: tf.lookup)."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from .base.arguments import check_range
from .base.conversion import converted
from .base.errors import explain
from .base.masks import plain_array

__all__ = ["KeyValueTensorInitializer", "StaticHashTable"]

_INTEGERS = np.dtype(np.int64)


@final
class KeyValueTensorInitializer:
    """The keys and values of a table (TF: tf.lookup.KeyValueTensorInitializer).

    Args:
        keys: integers, text or bytes, (n,).
        values: numbers or text, (n,).
        key_dtype, value_dtype: default those of NumPy's arrays.

    Raises:
        TypeError: keys of another kind.
        OverflowError: integers that value_dtype or key_dtype cannot hold.
        ValueError: not as many keys as values; more than one dimension; other values that a dtype cannot hold, such as text
            that is too long.
    """

    def __init__(self, keys: Any, values: Any, key_dtype: Any = None, value_dtype: Any = None) -> None:
        function = "KeyValueTensorInitializer"
        self.keys, self.values = (
            _as_keys(keys, key_dtype, function),
            _converted(values, value_dtype, function, "values"),
        )
        if self.keys.ndim != 1 or self.keys.shape != self.values.shape:
            got = f"keys of shape {self.keys.shape}, values of shape {self.values.shape}"
            raise ValueError(explain(function, "", expected="as many values as keys, in one dimension", got=got))


@final
class StaticHashTable:
    """A constant table from keys to values (TF: tf.lookup.StaticHashTable).

    Each rank has its own table; every call is local. A function that a coordinator schedules may refer to the chief's table: it
    is sent to each worker once, before the first such function, and freed there when the chief has freed it (TF:
    DistributedTable).

    Args:
        initializer: the keys and values.
        default_value: the value of missing keys.
        name: for errors.

    Raises:
        ValueError: a key has two values.
        TypeError: the default value is of another kind than the values.

    Example:
        >>> words = KeyValueTensorInitializer(["tea", "cup"], [7, 8])
        >>> StaticHashTable(words, -1).lookup([["cup", "tea"], ["pot", "cup"]])
        array([[ 8,  7],
               [-1,  8]])
    """

    def __init__(self, initializer: KeyValueTensorInitializer, default_value: Any, name: str = "table") -> None:
        self._initializer, self.default_value, self.name = initializer, default_value, name
        keys, values = initializer.keys, initializer.values
        default = plain_array(default_value, "StaticHashTable", f"{name}: default_value")
        if default.ndim or not np.can_cast(default.dtype, values.dtype, "same_kind"):
            expected, got = f"one value of dtype {values.dtype}", repr(default_value)
            raise TypeError(explain("StaticHashTable", f"{name}: default_value", expected=expected, got=got))
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
        new = np.ones(keys.size, bool)
        new[1:] = keys[1:] != keys[:-1]
        twice = np.flatnonzero(~new[1:] & (values[1:] != values[:-1]))
        if twice.size:
            at = twice[0]
            expected, got = (
                "one value for each key",
                f"{values[at].item()!r} and {values[at + 1].item()!r} for {keys[at].item()!r}",
            )
            raise ValueError(explain("StaticHashTable", name, expected=expected, got=got))
        text = values.dtype.kind in "US"  # the longer of the two
        self._default = default.astype(np.promote_types(default.dtype, values.dtype) if text else values.dtype)
        if values.dtype.kind in "iu" and int(self._default) != int(default):
            expected, got = f"a {values.dtype}", repr(default_value)
            raise TypeError(explain("StaticHashTable", f"{name}: default_value", expected=expected, got=got))
        self._keys, self._values = keys[new], values[new].astype(self._default.dtype)

    @property
    def arguments(self) -> tuple[KeyValueTensorInitializer, Any, str]:
        """The arguments of the constructor."""
        return self._initializer, self.default_value, self.name

    @property
    def key_dtype(self) -> np.dtype:
        """The dtype of the keys: int64, or text or bytes of the longest key's length."""
        return self._keys.dtype

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self._values.dtype

    def size(self) -> int:
        """Return the number of keys."""
        return self._keys.size

    def lookup(self, keys: Any) -> Any:
        """Return a new array of the keys' values, in the keys' shape.

        Raises:
            TypeError: keys of another kind than the table's.
        """
        asked = _as_keys(keys, None if np.size(keys) else self.key_dtype, "StaticHashTable.lookup")
        if asked.dtype.kind != self.key_dtype.kind:
            expected, got = f"keys of dtype {self.key_dtype}", str(asked.dtype)
            raise TypeError(explain("StaticHashTable.lookup", f"{self.name}: keys", expected=expected, got=got))
        if not self._keys.size:
            return np.full(asked.shape, self._default)
        at = np.minimum(np.searchsorted(self._keys, asked), self._keys.size - 1)
        return np.where(self._keys[at] == asked, self._values[at], self._default)

    __getitem__ = lookup

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Return new arrays of all keys, in increasing order, and of their values."""
        return self._keys.copy(), self._values.copy()

    def __len__(self) -> int:
        return self._keys.size

    def __repr__(self) -> str:
        return f"<StaticHashTable {self.name!r} {self.size()} keys, {self.key_dtype} to {self.value_dtype}>"


def _converted(values: Any, dtype: Any, function: str, argument: str) -> np.ndarray:
    """Return a new array of a dtype, by default the values' own."""
    given = plain_array(values, function, argument)
    if dtype is None:
        return given.copy()
    check_range(function, argument, given, np.dtype(dtype))
    return converted(function, argument, given, np.dtype(dtype))


def _as_keys(keys: Any, dtype: Any, function: str) -> np.ndarray:
    """Return keys as an array of int64, text or bytes."""
    array = _converted(keys, dtype, function, "keys")
    if array.dtype.kind in "iu" and np.can_cast(array.dtype, _INTEGERS):
        return array.astype(_INTEGERS)
    if array.dtype.kind not in "US":
        remedy = "Pass key_dtype if there are no keys" if not array.size else "Convert them with astype"
        expected = "integers that int64 can hold, text or bytes"
        raise TypeError(explain(function, "keys", expected=expected, got=str(array.dtype), remedy=remedy))
    return array
