"""The digits that ship with the package are the UCI test set, as scikit-learn gives it."""

import numpy as np
import pytest

from mpistrat.examples.digits_data import load


def test_the_uci_test_set():
    """Numbers of each class: optdigits.names, table of the testing set."""
    pixels, labels = load()
    assert pixels.shape == (1797, 64) and pixels.dtype == labels.dtype == np.uint8
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert pixels.min() == 0 and pixels.max() == 16


def test_equal_to_scikit_learn_s():
    digits = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed").load_digits()
    pixels, labels = load()
    np.testing.assert_array_equal(pixels, digits.data)
    np.testing.assert_array_equal(labels, digits.target)
