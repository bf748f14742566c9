"""Sums of rows and columns from parts that begin and end anywhere: those of the whole array."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.step.matrix_sums import MatrixSums, rectangles

SHAPES = st.lists(st.integers(1, 6), min_size=2, max_size=4)


@given(SHAPES, st.data())
def test_any_parts_give_the_sums_and_the_product(shape, data):
    whole = np.arange(1.0, np.prod(shape) + 1).reshape(shape)
    cuts = sorted({0, whole.size, *data.draw(st.lists(st.integers(0, whole.size), max_size=4))})
    sums = MatrixSums(shape)
    padded = np.append(whole, np.full(3, 1e9)).reshape(-1)  # what lies behind the end
    for low, high in zip(cuts, [*cuts[1:-1], whole.size + 3], strict=False):
        sums.add(padded[low:high], low)
    rows, columns = whole.sum(-1), whole.sum(-2)
    np.testing.assert_array_equal(sums.sums, np.append(rows, columns))
    for low, high in zip(cuts, [*cuts[1:-1], whole.size + 3], strict=False):
        sums.product(padded[low:high], low)
    expected = rows[..., None] * columns[..., None, :] / whole.sum((-1, -2), keepdims=True)
    np.testing.assert_allclose(padded[:-3].reshape(shape), expected, rtol=1e-14)
    assert (padded[-3:] == 1e9).all()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 12))
def test_rectangles_are_the_elements_in_order(low, size, width):
    found = [row * width + column for rows, columns in rectangles(low, low + size, width)
             for row in range(rows.start, rows.stop) for column in range(columns.start, columns.stop)]  # fmt: skip
    assert found == list(range(low, low + size))
    assert len(list(rectangles(low, low + size, width))) <= 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_are_of_float64(dtype):
    sums = MatrixSums((1, 3))
    sums.add(np.array([1e8, 1.0, 1.0], dtype), 0)
    assert sums.sums.tolist() == [1e8 + 2, 1e8, 1, 1]
