"""The limit of a step on one node: the sum of all gradients and Adam in one loop in C, made for this processor, and two barriers.

Each rank has its part of the weights and slots, and so much of each rank's gradient, in memory of its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import harness
import numpy as np

__all__ = ["LIMIT", "compiled_loop"]

LIMIT = "the same in one compiled loop"
SOURCE = """
#include <math.h>
enum { BLOCK = 4096 };
void step(long n, long k, const float *const *gradients, float *restrict w, float *restrict m, float *restrict v,
          float rate, float b1, float b2, float epsilon) {
    float sum[BLOCK];
    for (long low = 0; low < n; low += BLOCK) {
        long size = n - low < BLOCK ? n - low : BLOCK;
        for (long i = 0; i < size; i++) sum[i] = gradients[0][low + i];
        for (long j = 1; j < k; j++)
            for (long i = 0; i < size; i++) sum[i] += gradients[j][low + i];
        for (long i = 0; i < size; i++) {
            float g = sum[i], mm = m[low + i] + (g - m[low + i]) * (1 - b1), vv = v[low + i] + (g * g - v[low + i]) * (1 - b2);
            m[low + i] = mm;
            v[low + i] = vv;
            w[low + i] -= rate * mm / (sqrtf(vv) + epsilon);
        }
    }
}
"""
_COMPILE = ("-O3", "-march=native", "-ffast-math", "-shared", "-fPIC")


def compiled_loop(comm: Any, count: int) -> harness.Operation | None:
    """Return a step on so many parameters; None on several nodes, or without a C compiler. Collective."""
    if harness.comm_nodes(comm) > 1:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(SOURCE)
        try:
            compiler = [os.environ.get("CC", "cc"), *_COMPILE, str(source), "-o", str(library), "-lm"]
            subprocess.run(compiler, check=True, capture_output=True)
            call = ctypes.CDLL(str(library)).step
        except (OSError, subprocess.CalledProcessError):
            call = None
    if not all(comm.allgather(call is not None)):
        return None
    size = count // comm.size
    gradients = [np.full(size, 1e-3, np.float32) for _ in range(comm.size)]
    arrays = [np.zeros(size, np.float32) for _ in range(3)]
    pointers = (ctypes.c_void_p * comm.size)(*(g.ctypes.data for g in gradients))
    numbers = [ctypes.c_float(number) for number in (1e-3, 0.9, 0.999, 1e-7)]
    words = [ctypes.c_long(size), ctypes.c_long(comm.size), pointers]
    words += [ctypes.c_void_p(array.ctypes.data) for array in arrays]

    def step() -> None:
        comm.Barrier()
        call(*words, *numbers)
        comm.Barrier()

    step.arrays = gradients, arrays  # type: ignore[attr-defined]  # they live as long as it
    return step
