"""Samples of tensors, digests of rows, and the difference that rounding explains.

**Tolerance.** Two correct programs that add in different orders differ by rounding. The difference of a tensor is judged by

    4 · (d + ε · √n · s)

- ε: of the coarsest floating dtype seen so far in the run, 2⁻²³ for float32;
- n: its summands: the elements of the widest row of the pass, times the rows of the global batch if it is a sum over rows; of
  parameters at the start of a step as of the last update;
- s: its largest absolute value. ε √n s is the probable error of a sum of n numbers (Higham and Mary, SIAM J. Sci. Comput.
  2019), which grows with √n, not n, since roundings have random signs;
- d: how far rounding carries in this program up to this tensor, measured: the largest difference between the recorded run and
  runs of the same program whose parameters are multiplied by 1 ± ε √(fan-in) before each step (Monte Carlo arithmetic, Parker
  1997). It grows from step to step as fast as training magnifies errors; an update by the sign of a gradient that is only
  rounding, as Adam's, is in it.

The factor 4 is for the chance of few runs. A tensor whose tolerance exceeds half of s cannot be judged, and counts as such.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base.types import IndexedSlices

__all__ = [
    "TensorSample",
    "difference",
    "epsilon_of",
    "host",
    "row_digests",
    "sample",
    "sample_like",
    "tolerance",
]

_FACTOR = 4.0
_LEAST_OF_ROW = 16  # elements of each row, however many rows there are
_EPSILON = {"bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2}


class TensorSample(NamedTuple):
    """Some elements of a tensor, at fixed positions, or all.

    Attributes:
        values: of shape (rows, elements) for a tensor of rows, else (elements,); float64.
        shape: of the tensor.
        axis: its axis of rows; None if it has none.
        width: elements of a row, or of the tensor.
    """

    values: np.ndarray
    shape: tuple[int, ...]
    axis: int | None
    width: int


def host(value: Any) -> tuple[np.ndarray, str] | None:
    """Return a value of floating numbers as a NumPy array with the name of its dtype; None for any other value."""
    if isinstance(value, IndexedSlices):
        value = value.to_dense()
    dtype = str(getattr(value, "dtype", "")).rpartition(".")[2]
    if "float" not in dtype:
        return None
    value = _in_host_memory(value)
    if hasattr(value, "detach"):
        value = (value.to_dense() if value.is_sparse else value).double().numpy()
    return np.asarray(value), dtype


def _in_host_memory(value: Any) -> Any:
    """Return an array of NumPy for one of CuPy, a tensor on the CPU without gradients for one of torch, else the value."""
    if hasattr(value, "detach"):
        return value.detach().cpu()
    return value.get() if hasattr(value, "get") and not isinstance(value, np.ndarray) else value


def epsilon_of(dtype: str) -> float:
    """Return the distance between 1 and the next number of a floating dtype.

    Example:
        >>> epsilon_of("float32") == 2.0**-23
        True
    """
    return _EPSILON[dtype] if dtype in _EPSILON else float(np.finfo(dtype).eps)


def sample(array: np.ndarray, rows: int | None, elements: int) -> TensorSample | None:
    """Return a sample of at most `elements`, 0 for all; of a tensor of rows from each row. None if no axis has the rows."""
    axis = None
    if rows is not None:
        axis = next((axis for axis, extent in enumerate(array.shape) if extent == rows), None)
        if axis is None:
            return None
    width = math.prod(array.shape) // (rows or 1) if rows != 0 else math.prod(array.shape[1:])
    count = width
    if elements:
        count = min(width, max(elements // max(rows, 1), _LEAST_OF_ROW) if rows is not None else elements)
    return _sampled(array, axis, width, count)


def sample_like(
    array: np.ndarray, rows: int | None, shape: Sequence[int], axis: int | None, count: int
) -> TensorSample | None:
    """Return the same elements as those of a recorded tensor; None if the shapes do not fit.

    Args:
        array: the tensor on this rank.
        rows: of this rank; None if it is no tensor of rows.
        shape, axis: of the recorded tensor.
        count: the recorded elements, of each row if there are rows.
    """
    expected = list(shape)
    if rows is not None and axis is not None:
        expected[axis] = rows
    if list(array.shape) != expected or (rows is None) != (axis is None):
        return None
    width = math.prod(extent for place, extent in enumerate(shape) if place != axis)
    return _sampled(array, axis, width, count)


def _sampled(array: np.ndarray, axis: int | None, width: int, count: int) -> TensorSample:
    places = np.unique(np.linspace(0, width - 1, count).astype(np.int64)) if count else np.empty(0, np.int64)
    shape = (-1,) if axis is None else (array.shape[axis], width)
    flat = (array if axis is None else np.moveaxis(array, axis, 0)).reshape(shape)
    return TensorSample(flat[..., places].astype(np.float64), array.shape, axis, width)


def difference(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the absolute differences; two NaNs, and two equal infinities, are equal, and a NaN alone is infinitely far."""
    with np.errstate(invalid="ignore"):
        far = np.abs(ours - theirs)
    far[(ours == theirs) | (np.isnan(ours) & np.isnan(theirs))] = 0.0
    far[np.isnan(far)] = np.inf
    return far


def tolerance(deviation: float, epsilon: float, summands: float, scale: float) -> float:
    """Return the largest difference that rounding explains.

    Example:
        >>> tolerance(0.0, 2.0**-23, 16, 1.0) == 16 * 2.0**-23
        True
    """
    return _FACTOR * (deviation + epsilon * math.sqrt(max(summands, 1.0)) * scale)


def row_digests(array: Any, rows: int) -> np.ndarray:
    """Return a number for each row, which changes with any of its bits."""
    array = _in_host_memory(array)
    if hasattr(array, "detach"):
        array = array.float().numpy() if "bfloat16" in str(array.dtype) else array.numpy()
    flat = np.ascontiguousarray(array).reshape(rows, -1) if rows else np.empty((0, 0))
    texts = flat.dtype == object  # whose bytes are addresses
    data = (repr(row.tolist()).encode() if texts else row.tobytes() for row in flat)
    found = (hashlib.blake2b(each, digest_size=8).digest() for each in data)
    return np.array([int.from_bytes(each, "little") for each in found], np.uint64)
