"""Norms on a GPU: sums of squares, and clipping scales, without transfers to the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from string import Template
from types import ModuleType
from typing import Any, final

import numpy as np

from ..comm.arrays import dtype_name, import_cupy, on_device_of
from ..optimizers.kernels import THREADS, DeviceScale, options
from .interface import Range

__all__ = ["DeviceSquares", "scales", "source", "totals_of"]

_BLOCK = 4096  # elements that 64 lanes add up sequentially
_PARTIALS = 256  # per sum, added up by one thread

# All sums have a fixed order: GPUs with equal sums compute equal scales, so no rank sends its own.
_SOURCE = r"""
extern "C" __global__ void lanes(
    const $real *__restrict__ values, $real *__restrict__ sums, const long long *__restrict__ bounds, const long long n) {
    const long long lane = blockIdx.x * (long long)blockDim.x + threadIdx.x, block = lane / 64;
    if (block >= n) return;
    const long long last = bounds[2 * block + 1];
    $real sum = 0;
    for (long long i = bounds[2 * block] + lane % 64; i < last; i += 64) sum = sum + values[i] * values[i];
    sums[lane] = sum;
}
extern "C" __global__ void halves($real *__restrict__ sums, const long long n) {
    const long long block = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (block >= n) return;
    $real *own = sums + block * 64;
    for (int half = 32; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) own[lane] = own[lane] + own[lane + half];
}
extern "C" __global__ void partials(
    const $real *__restrict__ sums, double *__restrict__ out, const long long *__restrict__ starts, const long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, span = i / $partials;
    if (span >= n) return;
    double sum = 0;
    for (long long block = starts[span] + i % $partials; block < starts[span + 1]; block += $partials)
        sum = sum + sums[block * 64];
    out[i] = sum;
}
extern "C" __global__ void totals(const double *__restrict__ partials, double *__restrict__ out, const long long n) {
    const long long span = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (span >= n) return;
    double sum = 0;
    for (int part = 0; part < $partials; part++) sum = sum + partials[span * $partials + part];
    out[span] = sum;
}
extern "C" __global__ void scales(
    const double *__restrict__ totals, double *__restrict__ out, const long long n, const double limit, const int together) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= (together ? 1 : n)) return;
    const long long first = together ? 0 : i, last = together ? n : i + 1;
    double total = 0;
    for (long long span = first; span < last; span++) total = total + totals[span];
    double scale = total - total;  // NaN where the sum is not finite
    if (scale == 0) scale = total == 0 ? 1 : limit * (1 / sqrt(total) < 1 / limit ? 1 / sqrt(total) : 1 / limit);
    for (long long span = first; span < last; span++) out[span] = scale;
}
"""
_TYPES = {"float32": "float", "float64": "double"}


def source(real: str) -> str:
    """Return the CUDA source of the kernels, for sums of float32 or float64.

    Example:
        >>> "sqrt(total)" in source("float32")
        True
    """
    return Template(_SOURCE).substitute(real=_TYPES[real], partials=_PARTIALS)


@functools.cache
def _kernel(cupy: ModuleType, name: str, real: str) -> Any:
    return cupy.RawKernel(source(real), name, options(cupy))


def _launch(name: str, real: str, count: int, *arguments: Any) -> None:
    _kernel(import_cupy(name), name, real)((-(-count // THREADS),), (THREADS,), arguments)


@final
class DeviceSquares:
    """The sums of squares of some spans of a flat array on a GPU.

    Args:
        like: an array on that GPU, of the dtype.
        spans: the element ranges of each.
    """

    def __init__(self, like: Any, spans: Sequence[Sequence[Range]]) -> None:
        blocks = [
            [(low, min(low + _BLOCK, high)) for first, high in ranges for low in range(first, high, _BLOCK)]
            for ranges in spans
        ]
        bounds = np.array([block for some in blocks for block in some], np.int64)
        starts = np.cumsum([0, *map(len, blocks)], dtype=np.int64)
        self.count, self._blocks, self._real = len(spans), len(bounds), dtype_name(like.dtype)
        self._end = int(bounds.max(initial=0))
        cupy = import_cupy("DeviceSquares")
        with on_device_of(like):
            self._bounds, self._starts = cupy.asarray(bounds.reshape(-1)), cupy.asarray(starts)
            self._sums = cupy.empty(64 * self._blocks, like.dtype)
            self._parts = cupy.empty(_PARTIALS * self.count, np.float64)

    def write(self, values: Any, out: Any) -> None:
        """Write the sums of an array's squares into a flat float64 array."""
        with on_device_of(values):
            _launch(
                "lanes",
                self._real,
                64 * self._blocks,
                values[: self._end],
                self._sums,
                self._bounds,
                np.int64(self._blocks),
            )
            _launch("halves", self._real, self._blocks, self._sums, np.int64(self._blocks))
            _launch(
                "partials", self._real, self._parts.size, self._sums, self._parts, self._starts, np.int64(self.count)
            )
            _launch("totals", self._real, self.count, self._parts, out, np.int64(self.count))


def totals_of(squares: Sequence[tuple[DeviceSquares, Any]]) -> Any:
    """Return the sums of squares of all spans of arrays, on the GPU of the first one."""
    cupy, first = import_cupy("totals_of"), squares[0][1]
    with on_device_of(first):
        found = cupy.empty(sum(each.count for each, _ in squares), np.float64)
    low = 0
    for each, values in squares:
        each.write(values, found[low : low + each.count])
        low += each.count
    return found


def scales(totals: Any, limit: float, together: bool) -> list[DeviceScale]:
    """Return the factors that limit the norms of gradients: of each span, or of all together."""
    cupy, count = import_cupy("scales"), np.int64(totals.size)
    with on_device_of(totals):
        found = cupy.empty(totals.size, np.float64)
        _launch("scales", "float64", totals.size, totals, found, count, np.float64(limit), np.int32(together))
    return [DeviceScale(found, place) for place in range(totals.size)]
