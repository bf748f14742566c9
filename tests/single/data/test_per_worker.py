"""One dataset function a worker: its context, uneven ends, zero rows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat import context
from mpistrat.base.distributed_values import PerReplica
from mpistrat.data import (
    INFINITE,
    SHARD_HINT,
    UNKNOWN,
    ArraySpec,
    DistributedDataset,
    HDF5Dataset,
    InputContext,
    InputReplicationMode,
    from_arrays,
)
from mpistrat.data.feed.from_function import call_dataset_fn
from mpistrat.data.feed.plan import Workers
from mpistrat.errors import ShardError


def made(
    data: Any, replicas: tuple[int, ...] = (1,), index: int = 0, mode: str = "PER_WORKER", **settings: Any
) -> DistributedDataset:
    """What a worker has of a dataset function that returns these data, or calls them with the context."""
    function = data if callable(data) else lambda context: data
    steps = call_dataset_fn(function, Workers(replicas, index), InputReplicationMode[mode])
    return DistributedDataset(steps, **settings)


def agreed(
    data: Any, rank: int, sum_over_ranks: Any, replicas: tuple[int, ...] = (1, 1), mode: str = "PER_WORKER"
) -> Any:
    """As `made`, after the ranks have told each other how many steps they can make, as strategies have them do."""
    function = data if callable(data) else lambda context: data
    steps = call_dataset_fn(function, Workers(replicas, rank), InputReplicationMode[mode])
    steps.agree(sum_over_ranks)
    return DistributedDataset(steps, sum_over_ranks=sum_over_ranks)


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
        dataset = made(data, sum_over_ranks=sum_over_ranks)
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
    ranks.run(lambda rank, total: list(made([np.zeros(1)] * (rank + 1), sum_over_ranks=total)))
    assert ranks.calls == 3  # two steps and the end


def test_a_worker_with_no_data_at_all_knows_the_spec_of_a_dataset() -> None:
    def worker(rank: int, sum_over_ranks: Any) -> list[tuple[int, ...]]:
        data = from_arrays({"x": np.zeros((4 * rank, 3), np.float32)}).batch(2)
        return [batch["x"].shape for batch in made(data, sum_over_ranks=sum_over_ranks)]

    assert Ranks(2).run(worker) == [[(0, 3)] * 2, [(2, 3)] * 2]


def test_a_worker_with_no_data_and_no_spec_is_told() -> None:
    dataset = made([], sum_over_ranks=lambda counts: counts + 1)
    with pytest.raises(ValueError, match="at least one batch on every worker"):
        next(iter(dataset))


def test_several_local_replicas_take_one_element_each() -> None:
    steps = list(made([{"x": np.full(i + 1, i)} for i in range(5)], (2,)))
    assert all(isinstance(step["x"], PerReplica) for step in steps)
    assert [[values.tolist() for values in step["x"].values] for step in steps] == [
        [[0], [1, 1]],
        [[2, 2, 2], [3, 3, 3, 3]],
        [[4, 4, 4, 4, 4], []],
    ]


def test_every_iter_is_an_epoch_of_the_iterable() -> None:
    dataset = made(from_arrays(np.arange(40)).shuffle(seed=1).batch(40))
    first, second = (next(iter(dataset)).tolist() for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("prefetch", [0, 2])
def test_statistics_spec_and_prefetch(prefetch: int) -> None:
    dataset = made([np.zeros((2, 3))] * 4, buffer_size=prefetch)
    assert dataset.element_spec is None
    assert len(list(dataset)) == 4
    assert dataset.element_spec == ArraySpec((None, 3), np.float64)
    stats = dataset.stats()
    assert (stats.steps, stats.samples, stats.bytes) == (4, 8, 4 * 2 * 3 * 8)


def test_wrong_use_is_explained() -> None:
    with pytest.raises(TypeError, match="iterable of batches"):
        made(3)
    with pytest.raises(ValueError, match="first axis of rows, got a scalar"):
        next(iter(made([1.0, 2.0])))
    with pytest.raises(ValueError, match="get_per_replica_batch_size"):
        made(from_arrays(np.arange(3)))


def test_contexts_count_workers_or_replicas() -> None:
    """Two workers with 2 and 1 replicas: one context a worker, or one a replica (TF: input_pipeline_id)."""
    for mode, expected in {
        "PER_WORKER": [[InputContext(2, 0, 3)], [InputContext(2, 1, 3)]],
        "PER_REPLICA": [[InputContext(3, 0, 3), InputContext(3, 1, 3)], [InputContext(3, 2, 3)]],
    }.items():
        for index in (0, 1):
            seen: list[InputContext] = []
            made(lambda context, seen=seen: seen.append(context) or [], (2, 1), index, mode)
            assert seen == expected[index]


def test_per_replica_each_replica_reads_its_own() -> None:
    dataset = made(
        lambda c: [np.full(2, 10 * c.input_pipeline_id + i) for i in range(3)][c.input_pipeline_id :],
        (2,),
        mode="PER_REPLICA",
    )
    steps = [[block.tolist() for block in step.values] for step in dataset]
    assert steps == [[[0, 0], [11, 11]], [[1, 1], [12, 12]], [[2, 2], []]]


def test_state_of_datasets_of_ours() -> None:
    """Two ranks with 3 and 5 batches stop after any step, and two others go on from there."""
    data = [from_arrays(np.arange(100 * rank, 100 * rank + (6, 10)[rank])).shuffle(seed=1).batch(2) for rank in (0, 1)]

    def read(steps: int, state: Any) -> Any:
        def worker(rank: int, sum_over_ranks: Any) -> Any:
            iterator = iter(made(data[rank], sum_over_ranks=sum_over_ranks))
            if state is not None:
                iterator.restore(state)
            seen = [batch.tolist() for _, batch in zip(range(steps), iterator, strict=False)]
            found = iterator.state()
            iterator.close()
            return seen, found

        return Ranks(2).run(worker)

    whole = [seen for seen, _ in read(9, None)]
    assert [len(steps) for steps in whole] == [5, 5]
    for stop in range(6):
        first = read(stop, None)
        assert [state for _, state in first] == [{"epoch": 0, "next": stop}] * 2
        second = read(9, first[0][1])
        assert [one[0] + two[0] for one, two in zip(first, second, strict=True)] == whole


@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_state_with_several_local_replicas(mode: str) -> None:
    dataset = made(lambda context: from_arrays(np.arange(9)).batch(1), (2,), mode=mode)
    whole = [[block.tolist() for block in step.values] for step in dataset]
    for stop in range(len(whole) + 1):
        iterator = iter(dataset)
        iterator.restore({"epoch": 0, "next": stop})
        assert [[block.tolist() for block in step.values] for step in iterator] == whole[stop:]


def test_what_is_no_dataset_of_ours_cannot_be_resumed() -> None:
    iterator = iter(made([np.zeros(1)] * 3))
    iterator.restore({"epoch": 0, "next": 1})
    with pytest.raises(ValueError, match="expected a dataset of ms.data, to start after the first element"):
        next(iterator)


def test_the_end_holds_until_restored() -> None:
    ranks = Ranks(2)

    def worker(rank: int, sum_over_ranks: Any) -> Any:
        iterator = iter(made(from_arrays(np.arange(2 * rank + 1)).batch(1), sum_over_ranks=sum_over_ranks))
        first = [len(batch) for batch in iterator]
        assert next(iterator, None) is None  # asks nobody
        iterator.restore({"epoch": 0, "next": 2})
        return first, [len(batch) for batch in iterator]

    assert ranks.run(worker) == [([1, 0, 0], [0]), ([1, 1, 1], [1])]
    assert ranks.calls == 4 + 2


def test_the_length_is_not_known() -> None:
    dataset = made(from_arrays(np.arange(4)).batch(2))
    assert dataset.cardinality() == UNKNOWN
    with pytest.raises(TypeError, match="an end that only reading shows"):
        len(dataset)


def test_known_lengths_need_few_sums() -> None:
    """Of 150 steps 0, 64 and 128 ask; the other question is how many steps there are."""
    ranks = Ranks(2)

    def worker(rank: int, sum_over_ranks: Any) -> Any:
        dataset = agreed(from_arrays(np.arange((7, 299)[rank])).batch(2), rank, sum_over_ranks)
        assert dataset.cardinality() == len(dataset) == 150
        return [(len(batch), context.global_batch_size()) for batch in dataset]

    short, long = ranks.run(worker)
    assert [rows for rows, _ in short] == [2] * 3 + [1] + [0] * 146
    assert [rows for rows, _ in long] == [2] * 149 + [1]
    assert [total for _, total in short] == [total for _, total in long] == [4] * 3 + [3] + [2] * 145 + [1]
    assert ranks.calls == 1 + 3


def test_a_length_that_one_rank_does_not_know() -> None:
    ranks = Ranks(2)

    def worker(rank: int, sum_over_ranks: Any) -> Any:
        data = [np.zeros(1)] * 3 if rank else from_arrays(np.arange(9)).batch(1)
        dataset = agreed(data, rank, sum_over_ranks)
        assert dataset.cardinality() == UNKNOWN
        return [len(batch) for batch in dataset]

    assert ranks.run(worker) == [[1] * 9, [1] * 3 + [0] * 6]
    assert ranks.calls == 1 + 10


def test_a_length_without_end() -> None:
    ranks = Ranks(2)

    def worker(rank: int, sum_over_ranks: Any) -> Any:
        rows = from_arrays(np.arange(3)).batch(2)
        dataset = agreed(rows.repeat() if rank else rows, rank, sum_over_ranks)
        assert dataset.cardinality() == INFINITE
        return [context.global_batch_size() for _, _ in zip(range(130), dataset, strict=False)]

    assert ranks.run(worker) == [[4, 2] + [2, 1] * 64] * 2
    assert ranks.calls == 1 + 3


@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
@pytest.mark.parametrize("stop", [0, 1, 63, 64, 65, 99, 100])
def test_known_lengths_from_any_step_on(mode: str, stop: int) -> None:
    """Ranks of two replicas and of one; the state is read in the middle, after a peek, by others and by the same."""
    ranks = Ranks(2)

    def worker(rank: int, sum_over_ranks: Any) -> None:
        def function(context: InputContext) -> Any:
            count = 200 if mode == "PER_WORKER" else 100 - 20 * context.input_pipeline_id
            return from_arrays(np.arange(count - 30 * rank)).shuffle(seed=1).batch(1)

        def read(iterator: Any, most: int = 1000) -> list[Any]:
            steps = [step for _, step in zip(range(most), iterator, strict=False)]
            values = [step.values if isinstance(step, PerReplica) else (step,) for step in steps]
            return [[block.tolist() for block in step] for step in values]

        dataset = agreed(function, rank, sum_over_ranks, (2, 1), mode)
        whole = read(dataset)
        assert len(whole) == len(dataset) == (170 if mode == "PER_WORKER" else 100)
        dataset.set_epoch(0)
        iterator = iter(dataset)
        first = read(iterator, stop)
        if stop < len(whole):
            iterator.peek()
        state = iterator.state()
        assert state == {"epoch": 0, "next": stop, "length": len(whole)}
        for resumed in (iterator, iter(agreed(function, rank, sum_over_ranks, (2, 1), mode))):
            resumed.restore(state)
            assert first + read(resumed) == whole
        done.append(rank)

    done: list[int] = []
    ranks.run(worker)
    assert sorted(done) == [0, 1]


def test_a_length_that_a_shard_hint_leaves_open() -> None:
    rows = from_arrays(np.arange(8)).shard(SHARD_HINT, SHARD_HINT).batch(2)
    for mode in ("PER_WORKER", "PER_REPLICA"):
        function: Any = lambda context: rows if context.input_pipeline_id == 0 else rows.take(1)  # noqa: E731
        assert agreed(function, 0, lambda lengths: lengths, (2,), mode).cardinality() == UNKNOWN


def test_files_are_opened_while_other_ranks_can_be_told(tmp_path: Path) -> None:
    """Not in `agree`, in which they wait; a map that says what it makes has not asked before."""
    (tmp_path / "damaged.h5").write_bytes(b"no HDF5")
    damaged = HDF5Dataset(tmp_path / "damaged.h5", "x").map(lambda x: x, element_spec=ArraySpec((), "f8")).batch(2)
    for datasets in ([damaged], [from_arrays(np.arange(4)).batch(2), damaged]):
        mode = InputReplicationMode.PER_REPLICA if len(datasets) > 1 else InputReplicationMode.PER_WORKER
        function: Any = lambda context, datasets=datasets: datasets[context.input_pipeline_id]  # noqa: E731
        with pytest.raises(ShardError, match="damaged"):
            call_dataset_fn(function, Workers([len(datasets)]), mode)


def test_reading_again_after_an_error_asks_nobody() -> None:
    """One rank's element cannot be read at first. What the others were told of its step holds."""
    ranks = Ranks(2)

    def worker(rank: int, sum_over_ranks: Any) -> Any:
        failed: list[int] = []

        def once(x: Any) -> Any:
            if rank == 1 and 70 in x and not failed:
                failed.append(1)
                raise OSError("a cable")
            return x

        iterator = iter(agreed(from_arrays(np.arange(130)).batch(1).map(once), rank, sum_over_ranks))
        seen = []
        while True:
            try:
                seen += next(iterator).tolist()
            except StopIteration:
                return len(failed), seen
            except OSError:
                pass

    assert ranks.run(worker) == [(0, list(range(130))), (1, list(range(130)))]
    assert ranks.calls == 1 + 3


def test_an_optional_is_full_while_any_replica_has_rows() -> None:
    def worker(rank: int, sum_over_ranks: Any) -> list[Any]:
        iterator = iter(made([np.full(1, i) for i in range(2 * rank + 1)], sum_over_ranks=sum_over_ranks))
        found = [iterator.get_next_as_optional() for _ in range(4)]
        with pytest.raises(ValueError, match="has_value"):
            found[3].get_value()
        return [each.get_value().tolist() if each.has_value() else None for each in found]

    assert Ranks(2).run(worker) == [[[0], [], [], None], [[0], [1], [2], None]]


def test_peeking_asks_once() -> None:
    ranks = Ranks(2)

    def worker(rank: int, sum_over_ranks: Any) -> Any:
        iterator = iter(made([np.full(1, i) for i in range(2)], sum_over_ranks=sum_over_ranks))
        assert iterator.peek().tolist() == [0]
        assert iterator.state() == {"epoch": 0, "next": 0}
        assert context.global_batch_size() is None
        return [iterator.peek().tolist(), next(iterator).tolist(), iterator.get_next().tolist()]

    assert ranks.run(worker) == [[[0], [0], [1]]] * 2
    assert ranks.calls == 2


def test_what_is_no_function_is_named() -> None:
    for given, message in (
        (from_arrays(np.arange(3)).batch(1), "got .*distribute_dataset takes a dataset itself"),
        ([np.arange(3)], "got list$"),
    ):
        with pytest.raises(TypeError, match=f"dataset_fn: expected a function of an InputContext, {message}"):
            call_dataset_fn(given, Workers(), InputReplicationMode.PER_WORKER)  # type: ignore[arg-type]
