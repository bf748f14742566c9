"""1,797 handwritten digits of 8 x 8 pixels, as HDF5 shards.

From digits.npz next to this file: the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI
Machine Learning Repository, 1998, CC BY 4.0), pixels 0 to 16. scikit-learn's `load_digits` returns the same in the same order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import mpistrat as ms

__all__ = ["TEST_ROWS", "load", "write"]

TEST_ROWS = 360


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 (1797, 64) with values 0 to 16, and their labels, uint8 (1797,).

    Example:
        >>> images, labels = load()
        >>> images.shape, labels[:3].tolist()
        ((1797, 64), [0, 1, 2])
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        return file["pixels"], file["labels"]


def write(folder: Path, dtype: str) -> None:
    """Write train-*.h5 and test-*.h5 to a folder, always with the same split. Call it on one rank."""
    pixels, digits = load()
    order = np.random.default_rng(2024).permutation(len(digits))
    images = (pixels[order] / 16).astype(dtype)
    labels = digits[order].astype(np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("test", slice(0, TEST_ROWS)), ("train", slice(TEST_ROWS, None))):
        ms.data.write_shards(folder / f"{name}-*.h5", {"image": images[rows], "label": labels[rows]}, num_shards=4)
