"""The 1,797 handwritten digits that scikit-learn ships (UCI, Alpaydin and Kaynak 1998), as HDF5 shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import mpistrat as ms

__all__ = ["TEST_ROWS", "write"]

TEST_ROWS = 360


def write(folder: Path, dtype: str) -> None:
    """Write train-*.h5 and test-*.h5 into a folder, always with the same split. Not collective: one rank does it.

    Raises:
        MissingDependencyError: without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ms.errors.MissingDependencyError(
            "examples.digits: expected scikit-learn, which holds the images, got none. "
            "Install it: pip install scikit-learn, or this package's extra `examples`"
        ) from None
    digits = load_digits()
    order = np.random.default_rng(2024).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(dtype)
    labels = digits.target[order].astype(np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("test", slice(0, TEST_ROWS)), ("train", slice(TEST_ROWS, None))):
        ms.data.write_shards(folder / f"{name}-*.h5", {"image": images[rows], "label": labels[rows]}, num_shards=4)
