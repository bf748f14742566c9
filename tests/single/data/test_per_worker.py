"""One dataset function a worker: its context, uneven ends, zero rows."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from mpistrat import context
from mpistrat.data import ArraySpec, InputContext, PerReplicaDataset, from_arrays
from mpistrat.distributed_values import PerReplica


class Ranks:
    """Simulated ranks, one a thread, with a sum over them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.values: list[Any] = [None] * size
        self.calls = 0

    def sum_over_ranks(self, rank: int) -> Any:
        def total(counts: np.ndarray) -> np.ndarray:
            self.values[rank] = counts
            self.barrier.wait()
            result = np.sum(self.values, axis=0)
            if self.barrier.wait() == 0:
                self.calls += 1
            return result

        return total

    def run(self, function: Any) -> list[Any]:
        results: list[Any] = [None] * self.size

        def body(rank: int) -> None:
            results[rank] = function(rank, self.sum_over_ranks(rank))

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        return results


def test_get_per_replica_batch_size() -> None:
    assert InputContext(2, 0, 8).get_per_replica_batch_size(32) == 4
    with pytest.raises(ValueError, match=r"global_batch_size: expected a multiple of the 8 replicas, got 33"):
        InputContext(2, 0, 8).get_per_replica_batch_size(33)


@pytest.mark.parametrize("wrong", [(0, 0, 1), (1, 1, 1), (1, -1, 1), (1, 0, 0)])
def test_a_context_that_cannot_be(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="InputContext"):
        InputContext(*wrong)


def test_uneven_workers_step_together_to_the_longest() -> None:
    """Lengths 3 and 5 make 5 steps; the short worker's last two have zero rows."""

    def worker(rank: int, sum_over_ranks: Any) -> list[tuple[int, int | None]]:
        data = [np.full((2, 4), rank)] * (3, 5)[rank]
        dataset = PerReplicaDataset(data, sum_over_ranks=sum_over_ranks)
        seen = []
        for batch in dataset:
            assert batch.shape[1:] == (4,)
            seen.append((len(batch), context.global_batch_size()))
        return seen

    short, long = Ranks(2).run(worker)
    assert short == [(2, 4)] * 3 + [(0, 2)] * 2
    assert long == [(2, 4)] * 3 + [(2, 2)] * 2


def test_one_sum_a_step() -> None:
    ranks = Ranks(2)
    ranks.run(lambda rank, total: list(PerReplicaDataset([np.zeros(1)] * (rank + 1), sum_over_ranks=total)))
    assert ranks.calls == 3  # two steps and the end


def test_a_worker_with_no_data_at_all_knows_the_spec_of_a_dataset() -> None:
    def worker(rank: int, sum_over_ranks: Any) -> list[tuple[int, ...]]:
        data = from_arrays({"x": np.zeros((4 * rank, 3), np.float32)}).batch(2)
        return [batch["x"].shape for batch in PerReplicaDataset(data, sum_over_ranks=sum_over_ranks)]

    assert Ranks(2).run(worker) == [[(0, 3)] * 2, [(2, 3)] * 2]


def test_a_worker_with_no_data_and_no_spec_is_told() -> None:
    dataset = PerReplicaDataset([], sum_over_ranks=lambda counts: counts + 1)
    with pytest.raises(ValueError, match="at least one batch on every worker"):
        next(iter(dataset))


def test_several_local_replicas_take_one_element_each() -> None:
    steps = list(PerReplicaDataset([{"x": np.full(i + 1, i)} for i in range(5)], num_local_replicas=2))
    assert all(isinstance(step["x"], PerReplica) for step in steps)
    assert [[values.tolist() for values in step["x"].values] for step in steps] == [
        [[0], [1, 1]],
        [[2, 2, 2], [3, 3, 3, 3]],
        [[4, 4, 4, 4, 4], []],
    ]


def test_every_iter_is_an_epoch_of_the_iterable() -> None:
    dataset = PerReplicaDataset(from_arrays(np.arange(40)).shuffle(seed=1).batch(40))
    first, second = (next(iter(dataset)).tolist() for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("prefetch", [0, 2])
def test_statistics_spec_and_prefetch(prefetch: int) -> None:
    dataset = PerReplicaDataset([np.zeros((2, 3))] * 4, prefetch=prefetch)
    assert dataset.element_spec is None
    assert len(list(dataset)) == 4
    assert dataset.element_spec == ArraySpec((None, 3), np.float64)
    stats = dataset.stats()
    assert (stats.steps, stats.samples, stats.bytes) == (4, 8, 4 * 2 * 3 * 8)


def test_wrong_use_is_explained() -> None:
    with pytest.raises(TypeError, match="iterable of batches"):
        PerReplicaDataset(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="get_per_replica_batch_size"):
        PerReplicaDataset(from_arrays(np.arange(3)))
    with pytest.raises(ValueError, match="local replica"):
        PerReplicaDataset([], num_local_replicas=0)
