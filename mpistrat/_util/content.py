"""The bytes of arrays that mean something: types have others, whose values are a matter of chance."""

from __future__ import annotations

import functools

import numpy as np

__all__ = ["with_zero_padding"]

_X87 = np.finfo(np.longdouble).nmant == 63  # then a long double has 80 bits, in 12 or 16 bytes


def with_zero_padding(array: np.ndarray) -> np.ndarray:
    """Return an array whose unused bytes are 0: the array itself where its type has none, else a copy.

    Long doubles have unused bytes, and so have structured types whose fields are aligned or are only some of a row. Arrays that
    are equal then have equal bytes. Types with objects have none that can be compared.

    Example:
        >>> row = np.dtype({"names": ["a"], "formats": ["u1"], "offsets": [1], "itemsize": 3})
        >>> with_zero_padding(np.frombuffer(b"xAzyB?", row)).tobytes()
        b'\\x00A\\x00\\x00B\\x00'
    """
    dtype = array.dtype
    if dtype.names is None and dtype.char not in "gG":
        return array
    used = _used(dtype)
    if used.all():
        return array
    copy = np.array(array, order="C")
    copy.reshape(-1).view(np.uint8).reshape(-1, dtype.itemsize)[:, ~used] = 0
    return copy


@functools.lru_cache(maxsize=64)
def _used(dtype: np.dtype) -> np.ndarray:
    """Return which bytes of an element mean something."""
    used = np.zeros(dtype.itemsize, np.bool_)
    if dtype.subdtype is not None:
        base, _ = dtype.subdtype
        used[:] = np.tile(_used(base), dtype.itemsize // base.itemsize) if base.itemsize else True
    elif dtype.fields is not None:
        for field, offset, *_ in dtype.fields.values():
            used[offset : offset + field.itemsize] |= _used(field)
    elif dtype.char in "gG" and _X87:
        number = np.arange(dtype.itemsize // (2 if dtype.char == "G" else 1)) < 10
        number = number if dtype.isnative else number[::-1]
        used[:] = np.tile(number, 2 if dtype.char == "G" else 1)
    else:
        used[:] = True
    return used
