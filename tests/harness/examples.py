"""Messages of tf.train.Example, encoded by hand as Protocol Buffers define it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

__all__ = ["example"]

_BYTES, _FLOATS, _INTEGERS = 1, 2, 3  # fields of Feature


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _feature(values: Sequence[object]) -> bytes:
    if not values:
        return b""
    if isinstance(values[0], bytes):
        return _field(_BYTES, b"".join(_field(1, bytes(value)) for value in values))  # type: ignore[call-overload]
    if isinstance(values[0], float):
        return _field(_FLOATS, _field(1, struct.pack(f"<{len(values)}f", *values)))
    return _field(_INTEGERS, _field(1, b"".join(map(_varint, values))))  # type: ignore[arg-type]


def example(features: Mapping[str, Sequence[object]]) -> bytes:
    """Return a message whose features are lists of int, of float or of bytes.

    Example:
        >>> example({"a": [1]}).hex(" ")
        '0a 0c 0a 0a 0a 01 61 12 05 1a 03 0a 01 01'
    """
    entries = [_field(1, _field(1, name.encode()) + _field(2, _feature(values))) for name, values in features.items()]
    return _field(1, b"".join(entries))
