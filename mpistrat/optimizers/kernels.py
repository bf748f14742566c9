"""The update rules as CUDA kernels: one pass over any number of elements by one launch; and sums of squares.

`update` and `squares` correspond to those of base/loops, for arrays of CuPy, with the same arguments. Kernels compute in the
order of the NumPy code (rules.py, numpy_rules.py, rule.py), round each result, and fuse no multiplication with an addition. So
they give the bits of a CPU, with two exceptions: CuPy compiles with flush-to-zero, so float32 numbers below 1.2e-38 count as 0;
and Ftrl's power, unless it is a root, may differ in the last places.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterator, Sequence
from string import Template
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..base.loops import Around, Span
from ..comm.arrays import dtype_name, import_cupy, on_device_of

__all__ = [
    "OPTIONS",
    "THREADS",
    "DeviceScale",
    "StoredSteps",
    "options",
    "source",
    "squares",
    "squares_source",
    "update",
]

OPTIONS = ("--fmad=false",)  # of CUDA's compiler: no multiplication is fused with an addition
_HIP_OPTIONS = ("-ffp-contract=off",)  # the same, of AMD's
THREADS = 256  # of a block
MOST_BLOCKS = 1 << 16  # of a launch: a thread takes several elements if there are more
MOST_SEGMENTS = 128  # of a launch: its arguments have at most 4,096 bytes
MOST_NUMBERS = 8  # of a rule


class DeviceScale(NamedTuple):
    """A scale on a GPU: an element of a flat float64 array."""

    array: Any
    place: int

    def cast(self, dtype: np.dtype) -> Any:
        """Return it as an array of one element."""
        return self.array[self.place : self.place + 1].astype(dtype)


class StoredSteps(Protocol):
    """The numbers of steps in the memory of a GPU, which decides whose are used; see `device_scale`."""

    def stored(self, place: Hashable, numbers: np.ndarray, store: Any) -> tuple[Any, Any]:
        """Store the numbers of this step for a kernel at a place, and return its last arguments: all rows, and the state.

        `store` is the kernel that writes a row.
        """


class _Body(NamedTuple):
    """The code of a kernel for element i: g is its gradient, w its weight; slots are arrays, null if unused."""

    numbers: str
    slots: str
    code: str


_BODIES = {
    "sgd": _Body("rate kept nesterov", "momentum", """
        const REAL change = g * rate;
        if (!momentum) {
            w = w - change;
        } else {
            const REAL m = momentum[i] * kept - change;
            momentum[i] = m;
            w = w + (nesterov != 0 ? m * kept - change : m);
        }"""),
    "adam": _Body("alpha rest_1 rest_2 epsilon", "momentum velocity largest", """
        const REAL m = momentum[i] + (g - momentum[i]) * rest_1;
        REAL v = velocity[i] + (g * g - velocity[i]) * rest_2;
        momentum[i] = m;
        velocity[i] = v;
        if (largest) {
            v = larger(largest[i], v);
            largest[i] = v;
        }
        w = w - m * alpha / (root(v) + epsilon);"""),
    "adagrad": _Body("rate epsilon", "accumulator", """
        const REAL a = accumulator[i] + g * g;
        accumulator[i] = a;
        w = w - g * rate / root(a + epsilon);"""),
    "rmsprop": _Body("rate rho rest kept epsilon", "velocity mean momentum", """
        const REAL v = velocity[i] * rho + g * g * rest;
        velocity[i] = v;
        REAL spread = v;
        if (mean) {
            const REAL e = mean[i] * rho + g * rest;
            mean[i] = e;
            spread = v - e * e;
        }
        REAL change = g * rate / root(spread + epsilon);
        if (momentum) {
            change = momentum[i] * kept + change;
            momentum[i] = change;
        }
        w = w - change;"""),
    "adadelta": _Body("rate rho rest epsilon", "squares deltas", """
        const REAL a = squares[i] * rho + g * g * rest;
        const REAL change = root(deltas[i] + epsilon) * g / root(a + epsilon);
        squares[i] = a;
        deltas[i] = deltas[i] * rho + change * change * rest;
        w = w - change * rate;"""),
    "adamax": _Body("pace rest_1 beta_2 epsilon", "momentum norm", """
        const REAL m = momentum[i] + (g - momentum[i]) * rest_1;
        const REAL most = larger(norm[i] * beta_2, g < 0 ? -g : g);
        momentum[i] = m;
        norm[i] = most;
        w = w - m * pace / (most + epsilon);"""),
    "nadam": _Body("rate rest_1 rest_2 of_mean of_gradient growth epsilon", "momentum velocity", """
        const REAL m = momentum[i] + (g - momentum[i]) * rest_1;
        const REAL v = velocity[i] + (g * g - velocity[i]) * rest_2;
        momentum[i] = m;
        velocity[i] = v;
        w = w - (m * of_mean + g * of_gradient) * rate / (root(v * growth) + epsilon);"""),
    "ftrl": _Body("rate power l1 shrinkage more", "accumulator linear", """
        const REAL before = raised(accumulator[i], power);
        const REAL sum = accumulator[i] + g * g;
        const REAL after = raised(sum, power);
        const REAL z = linear[i] + g + w * shrinkage - (after - before) / rate * w;
        accumulator[i] = sum;
        linear[i] = z;
        w = (clipped(z, l1) - z) / (after / rate + more);"""),
    "lion": _Body("rate beta_1 rest_1 beta_2 rest_2", "momentum", """
        const REAL along = momentum[i] * beta_1 + g * rest_1;
        momentum[i] = momentum[i] * beta_2 + g * rest_2;
        w = w - (along > 0 ? 1 : along < 0 ? -1 : along) * rate;"""),
    "accumulate": _Body("", "sum", """
        sum[i] = sum[i] + g;"""),
}  # fmt: skip

# 16-bit numbers are widened and rounded by their bits, as in base/loops: a GPU's own types need a header of the CUDA toolkit.
_FRAME = r"""
struct Float16 { unsigned short bits; };
struct Bfloat16 { unsigned short bits; };
union Single { float value; unsigned int bits; };

__device__ inline float wide(float x) { return x; }
__device__ inline double wide(double x) { return x; }
__device__ inline float wide(Bfloat16 x) {
    Single single;
    single.bits = (unsigned int)x.bits << 16;
    return single.value;
}
__device__ inline float wide(Float16 x) {
    const unsigned int rest = x.bits & 0x7fff;
    Single single;
    if (rest < 0x0400) single.value = (float)rest * 5.9604644775390625e-08f;
    else single.bits = (rest << 13) + (rest >= 0x7c00 ? 0x70000000u : 0x38000000u);
    single.bits |= (unsigned int)(x.bits & 0x8000) << 16;
    return single.value;
}
__device__ inline void put(float *out, float x) { *out = x; }
__device__ inline void put(double *out, double x) { *out = x; }
__device__ inline void put(Bfloat16 *out, float x) {
    Single single;
    single.value = x;
    const unsigned int bits = single.bits;
    out->bits = x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
__device__ inline void put(Float16 *out, float x) {
    Single single;
    single.value = x;
    const unsigned int sign = single.bits >> 16 & 0x8000, rest = single.bits & 0x7fffffff;
    if (x != x) {
        out->bits = sign | 0x7e00;
    } else if (rest >= 0x477ff000) {
        out->bits = sign | 0x7c00;
    } else if (rest >= 0x38800000) {
        out->bits = sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    } else {
        single.bits = rest;
        single.value = single.value + 0.5f;
        out->bits = sign | (single.bits & 0xffff);
    }
}

typedef $real REAL;
typedef $weight WEIGHT;
typedef $gradient GRADIENT;
struct Segment { long long high; REAL scale, decay; };
struct Step {
    long long n;
    REAL number[$most_numbers], factor, calls, limit, kept, rest;
    int clips, overwrites, segments;
    Segment segment[$most_segments];
};
static_assert(sizeof(Step) == $bytes, "NumPy has it in other bytes");

__device__ inline float root(float x) { return sqrtf(x); }
__device__ inline double root(double x) { return sqrt(x); }
__device__ inline REAL raised(REAL x, REAL power) { return power == (REAL)0.5 ? root(x) : (REAL)pow((double)x, (double)power); }
__device__ inline REAL larger(REAL x, REAL y) { return x >= y || x != x ? x : y; }
__device__ inline REAL clipped(REAL x, REAL limit) { return x < -limit ? -limit : x > limit ? limit : x; }

extern "C" __global__ void $name(
    const GRADIENT *__restrict__ gradient, WEIGHT *__restrict__ weights, REAL *__restrict__ sums, REAL *__restrict__ averages,
    $slots const double *__restrict__ scales, $given) {
    $enter
    $numbers
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < step.n; i += gridDim.x * (long long)blockDim.x) {
        int first = 0;
        for (int last = step.segments - 1; first < last;) {
            const int middle = (first + last) / 2;
            if (i < step.segment[middle].high) last = middle;
            else first = middle + 1;
        }
        REAL g = wide(gradient[i]) * step.factor, w = wide(weights[i]) * step.segment[first].decay;
        if (sums) {
            g = (g + sums[i]) / step.calls;
            sums[i] = 0;
        }
        const REAL scale = step.segment[first].scale;  // or its place in scales, -1 for none
        g = g * (!scales ? scale : scale < 0 ? (REAL)1 : (REAL)scales[(long long)scale]);
        if (step.clips) g = clipped(g, step.limit);
        $body
        if (averages) {
            const REAL average = averages[i] * step.kept + w * step.rest;
            averages[i] = average;
            if (step.overwrites) w = average;
        }
        if ($writes || step.overwrites) put(weights + i, w);
    }
}
"""

# The last arguments, and the first lines. A step that the GPU may skip reads its numbers there, see `device_scale`.
_GIVEN = "const Step step", ""
_STORED = (
    "const char *__restrict__ rows, const double *__restrict__ state",
    "if (state[1] != 0) return;\n    const Step &step = ((const Step *)rows)[(long long)state[0]];",
)
_STORE = """
extern "C" __global__ void store(char *__restrict__ rows, const long long row, const Step step) {
    ((Step *)rows)[row] = step;
}
"""

# Sums of squares in the order of `loops.squares`: those of 64 lanes of 4,096 elements one after the other, the lanes by halves.
_SQUARES = r"""
extern "C" __global__ void lanes(const $real *__restrict__ values, $real *__restrict__ sums, const long long n) {
    const long long lane = blockIdx.x * (long long)blockDim.x + threadIdx.x, first = lane / 64 * 4096;
    if (first >= n) return;
    const long long last = first + 4096 < n ? first + 4096 : n;
    $real sum = 0;
    for (long long i = first + lane % 64; i < last; i += 64) sum = sum + values[i] * values[i];
    sums[lane] = sum;
}
extern "C" __global__ void halves($real *__restrict__ sums, $real *__restrict__ totals, const long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    $real *own = sums + i * 64;
    for (int half = 32; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) own[lane] = own[lane] + own[lane + half];
    totals[i] = own[0];
}
"""
_TYPES = {"float32": "float", "float64": "double", "float16": "Float16", "bfloat16": "Bfloat16"}


@functools.cache
def _step_dtype(real: str) -> np.dtype:
    """Return the struct `Step` of the source as a dtype."""
    segment = np.dtype([("high", np.int64), ("scale", real), ("decay", real)], align=True)
    numbers = [("number", real, MOST_NUMBERS), *((name, real) for name in ("factor", "calls", "limit", "kept", "rest"))]
    counts = [(name, np.int32) for name in ("clips", "overwrites", "segments")]
    return np.dtype([("n", np.int64), *numbers, *counts, ("segment", segment, MOST_SEGMENTS)], align=True)


def source(rule: str, weights: str, gradients: str, name: str = "update", stored: bool = False) -> str:
    """Return the CUDA source of a rule's kernel, for the dtypes of weights and gradients.

    With `stored` the GPU has the numbers of the step, in a row that the kernel `store` has written, and may skip the step.

    Example:
        >>> "adam_step" in source("adam", "bfloat16", "float32", "adam_step")
        True
    """
    body, real = _BODIES[rule], _real(weights)
    given, enter = _STORED if stored else _GIVEN
    numbers = [f"const REAL {number} = step.number[{i}];" for i, number in enumerate(body.numbers.split())]
    return Template(_FRAME + _STORE * stored).substitute(
        given=given,
        enter=enter,
        real=_TYPES[real],
        weight=_TYPES[weights],
        gradient=_TYPES[gradients],
        most_numbers=MOST_NUMBERS,
        most_segments=MOST_SEGMENTS,
        bytes=_step_dtype(real).itemsize,
        name=name,
        slots=" ".join(f"REAL *__restrict__ {slot}," for slot in body.slots.split()),
        numbers=" ".join(numbers),
        body=body.code.strip(),
        writes=int(rule != "accumulate"),
    )


def _real(weights: str) -> str:
    return "float32" if weights in ("float16", "bfloat16") else weights


def options(cupy: ModuleType) -> tuple[str, ...]:
    """Return the compiler's options for CuPy's GPUs, of NVIDIA or AMD."""
    return _HIP_OPTIONS if getattr(cupy.cuda.runtime, "is_hip", False) else OPTIONS


@functools.cache
def _kernel(
    cupy: ModuleType, rule: str, weights: str, gradients: str, name: str = "update", stored: bool = False
) -> Any:
    return cupy.RawKernel(source(rule, weights, gradients, stored=stored), name, options(cupy))


def update(
    rule: str,
    numbers: Sequence[float],
    parts: Sequence[Any],
    weights: Any,
    slots: Sequence[Any],
    around: Around,
    overflow: StoredSteps | None = None,
) -> bool:
    """Update weights on a GPU by the sum of the parts; return whether it was done.

    It is not done for several parts, or for a dtype without a kernel.

    Args:
        rule, numbers, slots: of a `CompiledLoop`; slot names are replaced by flat arrays, None for none.
        parts, weights: flat arrays of one size, on one GPU.
        around: the other operations of the pass.
        overflow: decides on the GPU whether the update is skipped.
    """
    kind, gradients = dtype_name(weights.dtype), dtype_name(parts[0].dtype)
    if len(parts) > 1 or kind not in _TYPES or gradients not in (kind, _real(kind)):
        return False
    cupy, step = import_cupy("update"), np.zeros((), _step_dtype(_real(kind)))
    kernel = _kernel(cupy, rule, kind, gradients, "update", overflow is not None)
    step["number"][: len(numbers)] = numbers
    step["factor"], step["calls"] = around.factor, around.calls
    step["clips"], step["limit"] = around.limit is not None, around.limit or 0.0
    if around.momentum is not None:
        step["kept"], step["rest"], step["overwrites"] = around.momentum, 1 - around.momentum, around.overwrites
    device = next((scale.array for _, _, scale in around.scales if isinstance(scale, DeviceScale)), None)
    none = 1.0 if device is None else -1
    places = [(low, high, scale if device is None else scale.place) for low, high, scale in around.scales]
    segments = list(_segments(weights.size, places, around.decays, none))
    low = 0
    with on_device_of(weights):
        for first in range(0, len(segments), MOST_SEGMENTS):
            some = segments[first : first + MOST_SEGMENTS]
            high = some[-1][0]
            step["n"], step["segments"] = high - low, len(some)
            step["segment"][: len(some)] = [(end - low, scale, decay) for end, scale, decay in some]
            arrays = [_pointer(array, low, high) for array in (parts[0], weights, around.sums, around.averages, *slots)]
            blocks = min(-(-(high - low) // THREADS), MOST_BLOCKS)
            last: tuple[Any, ...] = (step,)
            if overflow is not None:
                store = _kernel(cupy, rule, kind, gradients, "store", True)
                last = overflow.stored((arrays[1].data.ptr, high), step, store)
            kernel((blocks,), (THREADS,), (*arrays, np.uintp(0) if device is None else device, *last))
            low = high
    return True


@functools.cache
def _squares(cupy: ModuleType, real: str) -> tuple[Any, Any]:
    code = squares_source(real)
    return cupy.RawKernel(code, "lanes", options(cupy)), cupy.RawKernel(code, "halves", options(cupy))


def squares_source(real: str) -> str:
    """Return the CUDA source of sums of squares, for numbers of float32 or float64."""
    return Template(_SQUARES).substitute(real=_TYPES[real])


def squares(values: Any) -> float:
    """Return the sum of the squares of a flat array of float32 or float64 on a GPU. The host waits for it.

    In the order of `loops.squares`.
    """
    if not values.size:
        return 0.0
    cupy, count = import_cupy("squares"), -(-values.size // 4096)
    lanes, halves = _squares(cupy, dtype_name(values.dtype))
    with on_device_of(values):
        sums, totals = cupy.empty(64 * count, values.dtype), cupy.empty(count, values.dtype)
        lanes((-(-sums.size // THREADS),), (THREADS,), (values, sums, np.int64(values.size)))
        halves((-(-count // THREADS),), (THREADS,), (sums, totals, np.int64(count)))
        return functools.reduce(operator.add, totals.get().tolist(), 0.0)  # sum() of Python 3.12 gives other bits


def _pointer(array: Any, low: int, high: int) -> Any:
    """Return elements [low, high) of an array as an argument of a kernel: a null pointer for None."""
    return np.uintp(0) if array is None else array[low:high]


def _segments(
    size: int, scales: Sequence[Span], decays: Sequence[Span], none: float = 1.0
) -> Iterator[tuple[int, float, float]]:
    """Yield segments of `size` elements with one factor of the gradient and one of the weights: their ends, and both factors.

    `none` is the factor of a gradient without one.

    Example:
        >>> list(_segments(9, [(0, 4, 0.5)], [(2, 9, 0.9)]))
        [(2, 0.5, 1.0), (4, 0.5, 0.9), (9, 1.0, 0.9)]
    """
    ends = sorted(
        {end for span in (*scales, *decays) for end in span[:2] if 0 < end < size} | ({size} if size else set())
    )
    low, left = 0, [list(scales), list(decays)]
    for high in ends:
        factors = []
        for spans, default in zip(left, (none, 1.0), strict=True):
            while spans and spans[0][1] <= low:
                spans.pop(0)
            factors.append(spans[0][2] if spans and spans[0][0] <= low else default)
        yield high, factors[0], factors[1]
        low = high
