"""Random chains of all operators over simulated ranks, whose number changes in the middle: each row once, in one order."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpistrat.base import partition
from mpistrat.data import Dataset
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from tests.models.dataset_model import NAMES, SOURCES, Chain, Model, apply, chained, has_spec

operators = st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.integers(0, 3))
workers = st.lists(st.integers(1, 3), min_size=1, max_size=4)  # the replicas of each


def made(n: int, source: str, chain: Chain, size: int) -> tuple[Dataset, Model]:
    """A chain that ends in batches of so many rows, unless it consists of batches before."""
    return apply(*chained(n, source, chain), "batch", size - 1, 0)


def step_of(iterators: list[Any], replicas: list[int]) -> list[Any]:
    """The rows of the next step of all ranks, in the order of the replicas."""
    parts = [next(iterator) for iterator in iterators]
    blocks = [block.tolist() for part in parts for block in getattr(part, "values", [part])]
    rows = [row for block in blocks for row in block]
    shares = [high - low for low, high in partition.bounds(len(rows), sum(replicas))]
    assert [len(block) for block in blocks] == shares  # as even as can be
    assert {iterator.global_batch_size for iterator in iterators} == {len(rows)}
    return rows


def begun(build: Any, replicas: list[int], state: dict[str, int], ahead: int) -> list[Any]:
    """An iterator on each rank, which makes the chain for itself."""
    iterators = []
    for index in range(len(replicas)):
        iterators.append(iter(distribute(build(), Workers(replicas, index), buffer_size=ahead)))
        iterators[-1].restore(state)
    return iterators


@settings(deadline=None, max_examples=250)
@given(
    n=st.integers(0, 25),
    source=st.sampled_from(SOURCES),
    chain=st.lists(operators, max_size=5),
    size=st.integers(1, 4),
    epoch=st.integers(0, 2),
    changes=st.lists(st.tuples(workers, st.integers(0, 4)), max_size=3),
    last=workers,
    ahead=st.sampled_from([0, 0, 1]),
)
def test_each_row_once_and_in_one_order(
    n: int, source: str, chain: Chain, size: int, epoch: int, changes: Any, last: list[int], ahead: int
) -> None:
    assume(has_spec(made(n, source, chain, size)[0]))
    dataset, model = made(n, source, chain, size)
    expected = model(epoch)
    if dataset.node.random_access and dataset.node.locality(*np.empty((2, 0), np.int64)) is not None:
        # Rows of chunks have an order of their own within a batch: that of one rank.
        alone = begun(lambda: dataset, [1], {"epoch": epoch, "next": 0}, 0)
        ordered = [step_of(alone, [1]) for _ in expected]
        assert [sorted(batch) for batch in ordered] == [sorted(batch) for batch in expected]
        expected = ordered

    def build() -> Dataset:
        return made(n, source, chain, size)[0]

    state, seen = {"epoch": epoch, "next": 0}, []
    for replicas, steps in changes:
        iterators = begun(build, replicas, state, ahead)
        seen += [step_of(iterators, replicas) for _ in range(min(steps, len(expected) - len(seen)))]
        state = iterators[0].state()
        assert all(iterator.state() == state for iterator in iterators)
        for iterator in iterators:
            iterator.close()
    iterators = begun(build, last, state, ahead)
    seen += [step_of(iterators, last) for _ in range(len(expected) - len(seen))]
    assert seen == expected
    assert [next(iterator, None) for iterator in iterators] == [None] * len(last)  # all end together
