"""Private memory on a device: NumPy on CPUs, CuPy on GPUs. The GPU branches have not yet been run on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cluster.devices import parse
from ..comm.arrays import array_module, import_cupy, is_gpu, on_device_of

__all__ = ["move_like", "read_only", "zeros"]


def zeros(shape: int | tuple[int, ...], dtype: np.dtype, device: str) -> Any:
    """Return a new zeroed array on a device."""
    kind, index = parse(device)
    if kind == "cpu":
        return np.zeros(shape, dtype)
    cupy = import_cupy("Variable")
    with cupy.cuda.Device(index):
        return cupy.zeros(shape, dtype)


def move_like(value: Any, target: Any) -> Any:
    """Return a value where `target` lies; a NumPy array stays as it is for a NumPy target."""
    if not is_gpu(target):
        return value
    with on_device_of(target):
        return array_module(target).asarray(value)


def read_only(array: Any) -> Any:
    """Return a view that cannot be written to; CuPy has none, so there it is the array itself."""
    if is_gpu(array):
        return array
    view = array.view()
    view.flags.writeable = False
    return view
