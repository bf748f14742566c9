"""The factor of a LossScaleOptimizer on a GPU, which finds overflows, skips steps and counts them without the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from string import Template
from types import ModuleType
from typing import Any, final

import numpy as np

from ..comm.arrays import dtype_name, import_cupy, to_host
from ..variables.variable import Variable
from .hyperparameters import LEAST_SCALE, MOST_SCALE
from .kernels import THREADS, options

__all__ = ["ROWS", "DeviceLossScale", "source"]

ROWS = 512  # steps whose numbers stay on the GPU: after as many the host reads the count
_MOST_BLOCKS = 1024  # of a launch: threads share one division
_STATE = ("row", "skips", "overflow", "skipped", "in_a_row")  # the first two are those that update kernels read

_SOURCE = r"""
extern "C" __global__ void unscale(
    $real *__restrict__ values, double *__restrict__ state, const float *__restrict__ scale, const long long n) {
    const $real factor = ($real)(1 / (double)scale[0]);
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x) {
        const $real value = values[i] * factor;
        values[i] = value;
        if (!(value - value == 0)) state[$overflow] = 1;
    }
}
extern "C" __global__ void decide(
    double *__restrict__ state, float *__restrict__ scale, long long *__restrict__ changed_at, long long *__restrict__ count,
    const long long number, const long long growth) {
    const bool skips = state[$overflow] != 0;
    const long long own = number - (long long)state[$skipped];  // number of the step without those skipped
    state[$row] = own % $rows;
    state[$skips] = skips;
    state[$overflow] = 0;
    state[$skipped] += skips;
    state[$in_a_row] = skips ? state[$in_a_row] + 1 : 0;
    count[0] = skips ? own - 1 : own;
    if (!skips && count[0] - changed_at[0] < growth) return;
    const double next = (double)scale[0] * (skips ? 0.5 : 2.0);
    scale[0] = (float)(next < $least ? $least : next > $most ? $most : next);
    changed_at[0] = count[0];
}
"""
_TYPES = {"float32": "float", "float64": "double"}


def source(real: str) -> str:
    """Return the CUDA source of the kernels, for sums of float32 or float64.

    Example:
        >>> "overflow" in source("float32")
        False
    """
    places = {name: place for place, name in enumerate(_STATE)}
    return Template(_SOURCE).substitute(
        places, real=_TYPES[real], rows=ROWS, least=repr(LEAST_SCALE), most=repr(MOST_SCALE)
    )


@functools.cache
def _kernel(cupy: ModuleType, name: str, real: str) -> Any:
    return cupy.RawKernel(source(real), name, options(cupy))


@final
class DeviceLossScale:
    """The factor, the decision to skip a step, and the count of skipped steps, on this rank's only GPU.

    All GPUs have equal sums, so they decide alike. The host does not know how many steps were skipped, so it stores the numbers
    of each step in a row on the GPU: the update's kernel reads those of the step that follows the last one not skipped.

    Args:
        scale: the variable with the factor.
        changed_at: the variable with the count of calls at its last change.
        growth: the finite steps before it is doubled.
        on_read: called with the steps skipped in a row, whenever the host has read them.

    Attributes:
        count: the calls that were not skipped, after the last step, as an int64 array without dimensions on the GPU.
    """

    def __init__(self, scale: Variable, changed_at: Variable, growth: int, on_read: Callable[[int], None]) -> None:
        self._scale, self._changed_at, self._growth, self._on_read = scale, changed_at, np.int64(growth), on_read
        self._cupy = import_cupy("LossScaleOptimizer")
        self._state = self._cupy.zeros(len(_STATE), np.float64)
        self._read: np.ndarray | None = np.zeros(len(_STATE))  # None if the GPU may have counted since
        self._rows: dict[Hashable, Any] = {}
        self._of: Hashable = None  # what the rows belong to
        self._since = self._number = 0
        self.count: Any = None

    @property
    def skipped(self) -> int:
        """The steps skipped since `settle`. The host waits for the GPU."""
        if self._read is None:
            self._read = to_host(self._state)
            self._on_read(int(self._read[_STATE.index("in_a_row")]))
        return int(self._read[_STATE.index("skipped")])

    def settle(self) -> int:
        """Return `skipped`, and count anew from now on."""
        skipped, place = self.skipped, _STATE.index("skipped")
        if skipped and self._read is not None:
            self._read[place] = 0
            self._state[place : place + 1] = 0
        self._rows.clear()
        return skipped

    def begin(self, of: Hashable, number: int) -> int:
        """Return the steps to subtract from `number`, the calls so far: those skipped, if the rows cannot be used any longer.

        Args:
            of: the step and its settings, to which rows belong.
            number: the calls so far, with those skipped since `settle`. Equal on all ranks, as is `of`.
        """
        skipped = 0
        if of != self._of or number - self._since >= ROWS:
            skipped = self.settle()
            self._of, self._since = of, number - skipped
        return skipped

    def decide(self, sums: Sequence[Any], number: int) -> None:
        """Divide flat arrays by the factor, in place, decide whether step `number` is skipped, and adapt the factor."""
        self._number, self._read, scale = number, None, self._scale.storage()
        for values in sums:
            kernel = _kernel(self._cupy, "unscale", dtype_name(values.dtype))
            blocks = min(-(-values.size // THREADS), _MOST_BLOCKS)
            kernel((blocks,), (THREADS,), (values, self._state, scale, np.int64(values.size)))
        self.count = self._cupy.empty((), np.int64)
        state = self._state, scale, self._changed_at.storage(), self.count
        _kernel(self._cupy, "decide", "float64")((1,), (1,), (*state, np.int64(number), self._growth))

    def stored(self, place: Hashable, numbers: np.ndarray, store: Any) -> tuple[Any, Any]:
        """See `StoredSteps`."""
        rows = self._rows.get(place)
        if rows is None:
            rows = self._rows[place] = self._cupy.empty(ROWS * numbers.nbytes, np.uint8)
        store((1,), (1,), (rows, np.int64(self._number % ROWS), numbers))
        return rows, self._state
