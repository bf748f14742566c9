"""The scale of losses: the numbers of TensorFlow's documentation, and of uneven batches."""

import numpy as np
import pytest
from strategy_stand import without_mpi

import mpistrat as ms
from mpistrat import context
from mpistrat.nn import compute_average_loss, scale_regularization_loss


@pytest.fixture
def two():
    with without_mpi(2) as made:
        yield made
    context.set_global_batch_size(None)


UNEVEN = ms.PerReplica([np.array([1.0, 2.0, 3.0]), np.array([10.0])])  # 3 + 1 examples


def test_an_uneven_batch_of_known_size(two):
    parts = two.run(lambda losses: compute_average_loss(losses, global_batch_size=4), args=(UNEVEN,))
    assert parts.values == (1.5, 2.5)
    assert two.reduce("SUM", parts) == 4.0  # (1 + 2 + 3 + 10) / 4


def test_the_size_that_a_dataset_tells(two):
    data = two.distribute_dataset(ms.data.from_arrays(np.array([1.0, 2, 3, 10, 20])).batch(4))
    sums = [two.reduce("SUM", two.run(compute_average_loss, args=(batch,))) for batch in data]
    assert sums == [4.0, 20.0]  # the last batch has one example


def test_without_a_known_size_the_batch_is_taken_as_even(two):
    parts = two.run(compute_average_loss, args=(UNEVEN,))
    assert parts.values == (1.0, 5.0)  # TensorFlow's default: 6 / 6 and 10 / 2


@pytest.mark.parametrize(
    ("weights", "expected"),
    [(2.0, 2.0), ([1.0, 0.0, 1.0], 4 / 6), ([[1.0], [0.0], [1.0]], 4 / 6), (np.array([0, 0, 3]), 1.5)],
)
def test_weights(two, weights, expected):
    losses = np.array([1.0, 2.0, 3.0])
    found = two.run(lambda: compute_average_loss(losses, sample_weight=weights, global_batch_size=6))
    assert found.values == (expected, expected)


def test_losses_of_several_dimensions(two):
    losses = np.arange(6.0).reshape(2, 3)
    found = two.run(lambda: compute_average_loss(losses, sample_weight=[1.0, 2.0], global_batch_size=4))
    assert found.values[0] == (3 + 2 * 12) / 4


def test_dtypes_are_kept(two):
    for dtype in (np.float32, np.float16):
        found = two.run(lambda d=dtype: compute_average_loss(np.ones(3, d), sample_weight=2, global_batch_size=4))
        assert type(found.values[0]) is dtype


def test_no_examples(two):
    assert two.run(lambda: compute_average_loss(np.zeros(0))).values == (0.0, 0.0)
    assert two.run(lambda: compute_average_loss(np.zeros(0), global_batch_size=0)).values == (0.0, 0.0)


@pytest.mark.parametrize("size", [-1, 2.5, "4", None])
def test_sizes(two, size):
    if size is None:
        return
    with pytest.raises(ValueError, match="global_batch_size"):
        two.run(lambda: compute_average_loss(np.ones(1), global_batch_size=size))


def test_arguments(two):
    with pytest.raises(ValueError, match="at least one dimension"):
        two.run(lambda: compute_average_loss(1.0))
    with pytest.raises(ValueError, match="sample_weight"):
        two.run(lambda: compute_average_loss(np.ones(3), sample_weight=np.ones(2)))


def test_regularization(two):
    found = two.run(lambda: scale_regularization_loss(np.array([1.0, 2.0, 3.0])))
    assert found.values == (3.0, 3.0)
    assert two.reduce("SUM", found) == 6.0


def test_contexts(two):
    assert compute_average_loss([1.0, 3.0]) == 2.0  # outside of scopes: one replica
    assert scale_regularization_loss(5.0) == 5.0
    with two.scope():
        for call in (lambda: compute_average_loss([1.0]), lambda: scale_regularization_loss(1.0)):
            with pytest.raises(RuntimeError, match="replica context"):
                call()
