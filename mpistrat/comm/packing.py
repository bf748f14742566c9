"""Packing (fusion) of many arrays into few flat ones: the assignment of arrays to packs, and the copies in and out.

Arrays for computations are packed by dtype (`Pack`); arrays that are only sent, of any dtypes, as bytes (`to_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..base.errors import explain
from .arrays import array_module

__all__ = ["Forms", "Pack", "forms_of", "num_bytes", "of_bytes", "pack_sizes", "plan_packs", "to_bytes"]

#: Shapes and dtypes of arrays.
Forms = Sequence[tuple[tuple[int, ...], np.dtype]]

_LINE = 64  # bytes; each of several arrays is padded to a multiple, for the dtype of the next


@final
@dataclass(frozen=True)
class Pack:
    """Arrays of one dtype that are sent as one flat array.

    Attributes:
        indices: the planned arrays in it, in order.
        shapes: their shapes.
        dtype: their dtype.
    """

    indices: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype

    def pack(self, arrays: Sequence[Any]) -> Any:
        """Return the flat array of this pack's members of all planned arrays; a single contiguous member is not copied."""
        xp = array_module(arrays[self.indices[0]])
        parts = [xp.ascontiguousarray(arrays[index]).reshape(-1) for index in self.indices]
        return parts[0] if len(parts) == 1 else xp.concatenate(parts)

    def unpack(self, flat: Any) -> list[Any]:
        """Return views in the members' shapes of a flat array in the form of `pack`, of any dtype."""
        members, low = [], 0
        for shape in self.shapes:
            size = int(np.prod(shape, dtype=np.int64))
            members.append(flat[low : low + size].reshape(shape))
            low += size
        return members


def plan_packs(arrays: Sequence[Any], bytes_per_pack: int | None = 0) -> list[Pack]:
    """Return packs of arrays of equal dtype, in order, of at most `bytes_per_pack` bytes; 0 or None makes one for each dtype.

    Dtypes are in the order of their first array. An array larger than a pack is a separate one.

    Example:
        >>> [pack.indices for pack in plan_packs([np.zeros(2), np.zeros(2, np.int8), np.zeros(3)], 16)]
        [(0,), (2,), (1,)]
    """
    groups: dict[np.dtype, list[int]] = {}
    for index, array in enumerate(arrays):
        groups.setdefault(array.dtype, []).append(index)
    packs = []
    for dtype, members in groups.items():
        for part in _cut(members, [arrays[index].nbytes for index in members], bytes_per_pack or 0):
            packs.append(Pack(tuple(part), tuple(tuple(arrays[index].shape) for index in part), dtype))
    return packs


def _cut(members: list[int], sizes: list[int], limit: int) -> list[list[int]]:
    parts: list[list[int]] = []
    filled = 0
    for member, size in zip(members, sizes, strict=True):
        if not parts or (limit and filled + size > limit):
            parts.append([])
            filled = 0
        parts[-1].append(member)
        filled += size
    return parts


def pack_sizes(total: int, num_packs: int) -> list[int]:
    """Return the lengths of the parts of a flat array; the last takes the remainder.

    Example:
        >>> pack_sizes(10, 3)
        [3, 3, 4]

    Raises:
        ValueError: num_packs is not positive.
    """
    if num_packs < 1:
        raise ValueError(explain("pack_sizes", "num_packs", expected=">= 1", got=num_packs))
    size = total // num_packs
    return [size] * (num_packs - 1) + [total - size * (num_packs - 1)]


def forms_of(arrays: Sequence[np.ndarray]) -> Forms:
    """Return the shapes and dtypes of arrays."""
    return [(array.shape, array.dtype) for array in arrays]


def _layout(forms: Forms) -> tuple[list[tuple[int, int]], int]:
    """Return the byte ranges of arrays placed one after the other, and the total bytes."""
    places, end = [], 0
    for shape, dtype in forms:
        nbytes = math.prod(shape) * dtype.itemsize
        places.append((end, end + nbytes))
        end += nbytes if len(forms) == 1 else -(-nbytes // _LINE) * _LINE
    return places, end


def num_bytes(forms: Forms) -> int:
    """Return the number of bytes from `to_bytes` for arrays of these shapes and dtypes.

    Example:
        >>> num_bytes([((3,), np.dtype(np.float64)), ((2, 2), np.dtype(np.int8))])
        128
    """
    return _layout(forms)[1]


def to_bytes(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays one after the other as flat uint8; a single contiguous array is not copied."""
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0]).reshape(-1).view(np.uint8)
    places, nbytes = _layout(forms_of(arrays))
    packed = np.zeros(nbytes, np.uint8)
    for array, (low, high) in zip(arrays, places, strict=True):
        packed[low:high] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def of_bytes(packed: np.ndarray, forms: Forms) -> list[np.ndarray]:
    """Return arrays of these shapes and dtypes as views of bytes from `to_bytes`."""
    return [
        packed[low:high].view(dtype).reshape(shape)
        for (low, high), (shape, dtype) in zip(_layout(forms)[0], forms, strict=True)
    ]
