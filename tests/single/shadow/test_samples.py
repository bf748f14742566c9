"""What is kept of tensors for `ms.shadow`, and how large a difference rounding explains."""

import math

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.shadow.samples import difference, epsilon_of, host, row_digests, sample, sample_like, tolerance


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("elements", [0, 4, 1 << 16])
def test_a_rank_keeps_the_elements_of_its_rows_that_one_process_keeps(axis, elements):
    whole = np.random.default_rng(0).normal(size=(5, 6, 7))
    rows = whole.shape[axis]
    kept = sample(whole, rows, elements)
    mine = np.take(whole, [1, 3], axis)
    found = sample_like(mine, 2, kept.shape, kept.axis, kept.values.shape[-1])
    assert np.array_equal(found.values, kept.values[[1, 3]])
    assert kept.values.shape == (rows, whole.size // rows if elements != 4 else 16)


@pytest.mark.parametrize(("shape", "rows"), [((5, 2, 6), 3), ((4, 6), 3), ((6,), 3), ((5, 3, 6, 1), 3)])
def test_a_tensor_that_does_not_fit_is_left_out(shape, rows):
    """Recorded with 4 rows on the second axis."""
    assert sample_like(np.zeros(shape), rows, (5, 4, 6), 1, 30) is None


def test_a_tensor_without_an_axis_of_rows_is_left_out():
    assert sample(np.zeros((8, 3)), 4, 0) is None  # perhaps 4 rows of two each, perhaps not
    assert sample(np.zeros((8, 3)), None, 0).values.shape == (24,)


def test_differences_of_numbers_that_are_none():
    nan, inf = math.nan, math.inf
    ours, theirs = np.array([1.0, nan, nan, inf, inf, -inf]), np.array([1.5, nan, 0.0, inf, 1.0, inf])
    assert difference(ours, theirs).tolist() == [0.5, 0.0, inf, 0.0, inf, inf]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("count", [16, 1024, 65536])
def test_sums_in_other_orders_differ_by_less_than_the_tolerance_and_not_by_orders_of_magnitude(dtype, count):
    rng = np.random.default_rng(count)
    for _ in range(20):
        numbers = rng.normal(size=count).astype(dtype)
        sums = [np.add.accumulate(rng.permutation(numbers), dtype=dtype)[-1] for _ in range(2)]
        largest = float(np.abs(np.add.accumulate(numbers.astype(float))).max())
        limit = tolerance(0.0, epsilon_of(np.dtype(dtype).name), count, largest)
        assert abs(float(sums[0]) - float(sums[1])) <= limit
        assert limit <= 4 * epsilon_of(np.dtype(dtype).name) * math.sqrt(count) * largest


def test_rows_are_told_from_each_other_by_any_bit():
    rows = np.zeros((4, 3), np.float32)
    rows[1, 2], rows[2, 2] = -0.0, np.float32(1e-45)
    first = row_digests(rows, 4)
    assert len(set(first.tolist())) == 3
    assert first[0] == first[3]
    assert np.array_equal(row_digests(rows[::-1], 4), first[::-1])


def test_only_floating_numbers_are_compared():
    assert host(np.arange(3)) is None
    assert host("text") is None
    array, dtype = host(ms.IndexedSlices(np.ones((2, 2), np.float32), np.array([1, 1]), (3, 2)))
    assert dtype == "float32"
    assert array.tolist() == [[0, 0], [2, 2], [0, 0]]


def train(rate=0.1, factor=1.0, steps=4):
    rng = np.random.default_rng(0)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(rng.normal(size=50).astype(np.float32), name="w")
            optimizer = ms.optimizers.Adam(rate)

        def step(x):
            ms.shadow.tensor("product", x @ w.array)
            optimizer.apply_gradients([(np.float32(factor) * (x.T @ (x @ w.array)), w)])

        for _ in range(steps):
            strategy.run(step, args=(rng.normal(size=(64, 50)).astype(np.float32),))


def test_a_gradient_wrong_by_a_thousandth_is_found(tmp_path):
    with ms.shadow.record(tmp_path):
        train()
    for _ in range(2):
        with ms.shadow.round_off(tmp_path):
            train()
    with ms.shadow.compare(tmp_path) as report:
        train()
    assert (report.steps, report.left_out) == (4, {})
    with (
        pytest.raises(ms.errors.DifferenceError, match=r"gradient of w: .* 1\.001 times") as found,
        ms.shadow.compare(tmp_path),
    ):
        train(factor=1.001)
    assert (found.value.step, found.value.ranks) == (1, (0,))


def test_a_repetition_measures_what_training_magnifies(tmp_path):
    """Adam's step by the sign of a gradient that is 0 but for rounding is as long as any: nothing can be concluded."""

    def noise():
        with ms.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                w = ms.Variable(np.full(3, 1 / 3, np.float32), name="w")
                optimizer = ms.optimizers.Adam(0.1)
            strategy.run(lambda: optimizer.apply_gradients([(w.array * np.float32(3) - np.float32(1), w)]))

    with ms.shadow.record(tmp_path):
        noise()
    with ms.shadow.round_off(tmp_path):
        noise()
    with ms.shadow.compare(tmp_path) as report:
        noise()
    assert any("gradient of w" in name for name in report.left_out)


def test_contexts_do_not_nest(tmp_path):
    with (
        pytest.raises(ValueError, match="ms.shadow.record: the program took no step that ms.shadow sees"),
        ms.shadow.record(tmp_path),
        pytest.raises(ValueError, match="one context of ms.shadow, got one inside another"),
        ms.shadow.record(tmp_path / "other"),
    ):
        pass
    with pytest.raises(ValueError, match="of: expected one of rows, sum, all, got 'mean'"):
        ms.shadow.tensor("x", np.zeros(3), of="mean")
