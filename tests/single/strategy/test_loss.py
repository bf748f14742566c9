"""The scale of losses: the numbers of TensorFlow's documentation, and of uneven batches."""

import weakref

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import context
from mpistrat.base import global_batch
from mpistrat.nn import compute_average_loss, scale_regularization_loss
from tests.harness.strategies import without_mpi


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setattr(global_batch, "_ledgers", weakref.WeakSet())  # without the strategies of other tests
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


def losses_of(strategy, element, loss=compute_average_loss):
    return strategy.reduce("SUM", strategy.run(loss, args=(element,)))


def fours(strategy, rows, batch):
    """Batches of fours: the mean over any global batch is 4."""
    return strategy.distribute_dataset(ms.data.from_arrays(np.full(rows, 4.0)).batch(batch))


def test_the_size_belongs_to_the_batch_not_to_the_one_drawn_last(two):
    uneven = two.distribute_dataset(ms.data.from_arrays(np.array([4.0, 4, 10, 4, 4])).batch(3))
    iterator = iter(fours(two, 6, 4))
    first, second = next(iterator), next(iterator)
    assert [losses_of(two, first), losses_of(two, second)] == [4.0, 4.0]
    assert [losses_of(two, a) for a, _ in zip(fours(two, 8, 8), fours(two, 2, 2), strict=True)] == [4.0]
    assert [losses_of(two, batch) for batch in list(uneven)] == [6.0, 4.0]
    found = []
    for batch in uneven:
        list(fours(two, 2, 2))
        found.append((losses_of(two, batch), ms.context.global_batch_size()))
    assert found == [(6.0, 3), (4.0, 2)]
    del iterator
    assert ms.context.global_batch_size() is None


def test_what_is_made_of_the_batch_counts_by_its_rows(two):
    for batch in two.distribute_dataset(
        ms.data.from_arrays(np.array([4.0, 4, 10, 4, 4, 4, 4, 4])).batch(5)
    ):  # 3 + 2, 2 + 1
        list(fours(two, 16, 16))
        size = len(np.concatenate(batch.values))
        halves = ms.PerReplica([part * 0.5 for part in two.local_results(batch)])
        sizes = two.run(lambda half: _size_or_error(), args=(halves,))
        assert sizes.values == ((5, 5) if size == 5 else ("ambiguous", 3))
        assert two.run(ms.context.global_batch_size).values == (size,) * 2  # a step without arguments


def _size_or_error():
    try:
        return ms.context.global_batch_size()
    except ms.errors.ContextError:
        return "ambiguous"  # 2 rows here were of 5 before, and are now of 3


def test_views_count_as_the_batch(two):
    for batch in two.distribute_dataset(ms.data.from_arrays(np.arange(8.0)).batch(5)):
        size = len(np.concatenate(batch.values))
        list(fours(two, 16, 16))
        for view in (lambda part: part[::-1], lambda part: part[-1:], lambda part: part.reshape(-1, 1).T):
            seen = ms.PerReplica([view(part) for part in two.local_results(batch)])
            sizes = two.run(lambda x: ms.context.global_batch_size(), args=(seen,))
            assert sizes.values == (size,) * 2


def test_arrays_of_ones_own_are_taken_as_even(two):
    batch = next(iter(fours(two, 8, 8)))
    assert losses_of(two, ms.PerReplica([np.full(1, 4.0), np.full(1, 2.0)])) == 3.0
    assert two.run(lambda x: ms.context.global_batch_size(), args=(np.ones(1),)) is None
    assert losses_of(two, batch) == 4.0


def test_several_batches_in_one_step(two):
    def step(a, b, losses, **told):
        return compute_average_loss(losses, **told)

    for a, b in zip(fours(two, 8, 8), fours(two, 3, 3), strict=True):
        for losses in (a, b):
            assert two.reduce("SUM", two.run(step, args=(a, b, losses))) == 4.0
        three = ms.PerReplica([np.full(3, 4.0)] * 2)
        with pytest.raises(ms.errors.ContextError, match=r"batches of 3 and 8 rows.*global_batch_size\(x\)"):
            two.run(step, args=(a, b, three))
        with pytest.raises(ms.errors.ContextError, match=r"batches of 3 and 8 rows.*global_batch_size\(x\)"):
            two.run(lambda a, b: ms.context.global_batch_size(), args=(a, b))
        sizes = two.run(
            lambda x: (ms.context.global_batch_size(x["a"]), ms.context.global_batch_size([x["b"]])),
            args=({"a": a, "b": b},),
        )
        assert [size.values for size in sizes] == [(8, 8), (3, 3)]
        assert ms.context.global_batch_size(a) == 8
        with pytest.raises(ValueError, match=r"batches of 3 and 8 rows"):
            ms.context.global_batch_size((a, b))
        with pytest.raises(ValueError, match="an array of another origin"):
            ms.context.global_batch_size(three)


def test_batches_that_were_changed_and_kept_are_no_guess(two):
    """A last batch of 2 + 1 rows: replica 0 cannot tell it from one of 2 + 2."""
    data = two.distribute_dataset(ms.data.from_arrays(np.ones(7)).batch(4))
    kept = [ms.PerReplica([2 * part for part in two.local_results(batch)]) for batch in data]
    assert [len(part.values[0]) for part in kept] == [2, 2]
    with pytest.raises(ms.errors.ContextError, match=r"compute_average_loss: global_batch_size: .*2 losses"):
        losses_of(two, kept[0])
    assert losses_of(two, kept[1], lambda x: compute_average_loss(x, global_batch_size=3)) == 2.0


def test_a_batch_that_nobody_holds_is_forgotten(two, monkeypatch):
    monkeypatch.setattr(global_batch, "_forget_at", 1024)  # whatever was alive in earlier tests
    data = two.distribute_dataset(ms.data.from_arrays(np.zeros(30_000)).batch(4))
    kept = [batch for step, batch in enumerate(data) if step % 100 == 0]
    assert len(global_batch._arrays) < 2 * 1024
    assert {ms.context.global_batch_size(batch) for batch in kept} == {4}


def test_outside_of_steps_it_is_the_batch_of_the_strategy_in_use(two):
    """As in a loop of torch on ranks with one replica each."""
    data = two.distribute_dataset(ms.data.from_arrays(np.arange(5.0)).batch(5))
    for batch in data:
        for part in two.local_results(batch):
            assert compute_average_loss(np.full(len(part), 10.0)) == 10.0 * len(part) / 5
    with pytest.raises(ms.errors.ContextError, match="4 losses"):
        compute_average_loss(np.ones(4))
    two.close()
    assert compute_average_loss(np.ones(4)) == 1.0
