"""Runs of the digits job for tests: the job in process, and its weights compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import mpistrat as ms

COMMON = ("--epochs", "2", "--global-batch-size", "100", "--dtype", "float64", "--progress", "none")


def run(output: Path, *words: str) -> dict[str, Any]:
    """Train for two epochs with an uneven last batch. Collective."""
    from mpistrat.examples import digits

    return digits.main([*COMMON, "--output", str(output), *words])


def run_alone(output: Path, *words: str) -> Any:
    """Train on this rank alone, whatever the others do."""
    from mpi4py import MPI

    from mpistrat.examples import digits

    options = digits.parse([*COMMON, "--strategy", "one_device", "--output", str(output), *words])
    strategy = ms.OneDeviceStrategy("cpu:0", comm=MPI.COMM_SELF)
    try:
        return digits.train(strategy, options)
    finally:
        strategy.close()


def weights(output: Path) -> dict[str, np.ndarray]:
    """The arrays of weights.h5, slots included, by their path in the file."""
    import h5py

    found: dict[str, np.ndarray] = {}
    with h5py.File(output / "weights.h5") as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


def difference(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    """The largest difference of two sets of weights, relative to the largest weight of its array."""
    if sorted(first) != sorted(second):
        raise AssertionError(f"different names: {sorted(set(first) ^ set(second))}")
    return max(
        float(
            np.max(np.abs(first[name] - second[name]), initial=0.0)
            / max(np.max(np.abs(second[name]), initial=0.0), 1e-300)
        )
        for name in first
        if np.asarray(first[name]).dtype.kind == "f"
    )
