"""A small set of shards for tests of damage, files beside it, and whether they open."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpistrat.data import HDF5Dataset, write_shards


def small_set(folder: Path) -> list[Path]:
    return write_shards(folder, {"x": np.arange(300.0).reshape(100, 3), "y": np.arange(100)}, num_shards=3)


def plain(path: Path, **arrays: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return path


def open_all(files: Any, **options: Any) -> int:
    return len(HDF5Dataset(files, **options))
