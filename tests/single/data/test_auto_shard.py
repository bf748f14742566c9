"""AutoShardPolicy: what each of some simulated workers reads, and how their ends meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.base import partition
from mpistrat.data import (
    INFINITE,
    SHARD_HINT,
    UNKNOWN,
    ArraySpec,
    AutoShardPolicy,
    Dataset,
    HDF5Dataset,
    Options,
    from_arrays,
    from_generator,
    write_shards,
)
from mpistrat.data.feed.auto_shard import auto_shard
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from mpistrat.data.nodes.batch import Batches


def steps_of(dataset: Dataset, replicas: list[int], policy: str, **settings: Any) -> list[list[list[list[int]]]]:
    """Per step, per worker, per local replica: the rows. All workers make the same number of steps."""
    dataset = dataset.with_options(Options(policy))
    workers = [distribute(dataset, Workers(replicas, index), **settings) for index in range(len(replicas))]
    steps = [
        [[values.tolist() for values in getattr(batch, "values", (batch,))] for batch in step]
        for step in zip(*workers, strict=True)
    ]
    assert [worker.cardinality() for worker in workers] == [len(steps)] * len(workers)
    return steps


def sizes(steps: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    return [[[len(rows) for rows in worker] for worker in step] for step in steps]


def shards(folder: Path, lengths: list[int]) -> HDF5Dataset:
    """Files with so many rows: 100, 101, … in the first, 200, … in the second."""
    paths = [
        write_shards(folder / str(index), {"x": 100 * (index + 1) + np.arange(n)}, num_shards=1)[0]
        for index, n in enumerate(lengths)
    ]
    return HDF5Dataset(paths, "x")


def test_the_policy_that_nobody_named_is_data() -> None:
    dataset = from_arrays(np.arange(10)).batch(4)
    for policy in ("auto", "data"):
        assert steps_of(dataset, [1, 1], policy) == [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]], [[[8]], [[9]]]]
    assert "(DATA)" in str(distribute(dataset, Workers()))


def test_tensorflow_s_auto_is_file_where_there_are_files_enough(tmp_path: Path) -> None:
    files = shards(tmp_path, [2, 2])
    by_file, by_data = steps_of(files.batch(2), [1, 1], "file"), steps_of(files.batch(2), [1, 1, 1], "data")
    assert by_file == [[[[100]], [[200]]], [[[101]], [[201]]]]
    assert steps_of(files.batch(2), [1, 1], "file_or_data") == by_file
    assert (
        steps_of(files.batch(2), [1, 1, 1], "file_or_data")
        == by_data
        == [[[[100]], [[101]], [[]]], [[[200]], [[201]], [[]]]]
    )
    assert "(FILE)" in str(distribute(files.batch(2).with_options(Options("file_or_data")), Workers()))
    arrays = from_arrays(np.arange(4))
    for dataset in (arrays.batch(2), files.zip(files, files).batch(2), files.batch(4).rebatch([2, 1])):
        assert "(DATA)" in str(distribute(dataset.with_options(Options("file_or_data")), Workers([1, 1])))


def test_ragged_batches_may_be_divided_by_file(tmp_path: Path) -> None:
    spec = {"x": ArraySpec((None,), np.int64)}
    paths = []
    for name, lengths in (("a", (1, 2)), ("b", (3, 1))):
        rows = from_generator(lambda lengths=lengths: ({"x": np.arange(n)} for n in lengths), spec)
        paths += write_shards(tmp_path / name, rows, layout="chunked")
    batches = HDF5Dataset(paths, "x").ragged_batch(2).with_options(Options("file"))
    workers = [distribute(batches, Workers([1, 1], index)) for index in range(2)]
    assert [[[row.tolist() for row in batch] for batch in worker] for worker in workers] == [
        [[[0]], [[0, 1]]],
        [[[0, 1, 2]], [[0]]],
    ]


def test_seven_rows_over_four_replicas() -> None:
    """semantics.md §0: contiguous blocks that differ by at most one: 2, 2, 2, 1."""
    dataset = from_arrays(np.arange(14)).batch(7)
    for policy in ("data", "off"):
        assert sizes(steps_of(dataset, [2, 2], policy))[0] == [[2, 2], [2, 1]]


@pytest.mark.parametrize("make", [lambda rows: rows, lambda rows: rows.filter(lambda x: True)], ids=["any", "in order"])
def test_data_in_order_and_at_random_give_the_same(make: Any) -> None:
    dataset = make(from_arrays(np.arange(23))).batch(5)
    whole = [batch.tolist() for batch in dataset]
    for replicas in ([1], [1, 1], [2, 1, 3]):
        workers = [distribute(dataset, Workers(replicas, index)) for index in range(len(replicas))]
        for expected, *step in zip(whole, *workers, strict=True):
            blocks = [rows for batch in step for rows in getattr(batch, "values", (batch,))]
            assert [len(rows) for rows in blocks] == [
                high - low for low, high in partition.bounds(len(expected), sum(replicas))
            ]
            assert np.concatenate(blocks).tolist() == expected


def test_data_in_order_resumes_on_another_number_of_workers() -> None:
    dataset = from_arrays(np.arange(23)).filter(lambda x: x % 2 == 0).batch(4)
    iterators = [iter(distribute(dataset, Workers([1, 1], index))) for index in range(2)]
    assert [row for iterator in iterators for row in next(iterator)] == [0, 2, 4, 6]
    assert iterators[0].state() == {"epoch": 0, "next": 1}
    three = [iter(distribute(dataset, Workers([1, 1, 1], index))) for index in range(3)]
    for iterator in three:
        iterator.restore(iterators[0].state())
    assert [row for step in zip(*three, strict=True) for part in step for row in part] == [
        8,
        10,
        12,
        14,
        16,
        18,
        20,
        22,
    ]
    for iterator in iterators:
        iterator.close()


def test_elements_in_no_fixed_order_cannot_be_cut() -> None:
    dataset = (
        from_arrays(np.arange(8)).filter(lambda x: True).map(lambda x: x, num_parallel_calls=2, deterministic=False)
    )
    with pytest.raises(ValueError, match="same order on every worker"):
        distribute(dataset.batch(2), Workers([1, 1], 0))
    assert sum(map(len, distribute(dataset.batch(2), Workers()))) == 8


def test_file_gives_every_worker_files_of_its_own(tmp_path: Path) -> None:
    """5 files, 3 workers: files 0 and 3, 1 and 4, 2; in batches of 6 rows each takes 2."""
    dataset = shards(tmp_path, [2, 3, 1, 4, 2]).batch(6)
    steps = steps_of(dataset, [1, 1, 1], "file")
    rows = [[row for step in steps for row in step[worker][0]] for worker in range(3)]
    assert rows == [[100, 101, 400, 401, 402, 403], [200, 201, 202, 500, 501], [300]]
    assert sizes(steps) == [[[2], [2], [1]], [[2], [2], [0]], [[2], [1], [0]]]


def test_file_knows_every_step_s_true_size(tmp_path: Path) -> None:
    dataset = shards(tmp_path, [2, 3, 1, 4, 2]).batch(6).with_options(Options("file"))
    for index in range(3):
        iterator = iter(distribute(dataset, Workers([1, 1, 1], index)))
        assert [iterator.global_batch_size for _ in iterator] == [5, 4, 3]


def test_file_needs_a_file_for_each_worker(tmp_path: Path) -> None:
    dataset = shards(tmp_path, [2, 2]).batch(6)
    with pytest.raises(ValueError, match=r"one file for each of the 3 workers under FILE, got 2 files.*Write more"):
        steps_of(dataset, [1, 1, 1], "file")


def test_file_needs_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one HDF5Dataset as the source under FILE, got from_arrays"):
        steps_of(from_arrays(np.arange(4)).batch(2), [1, 1], "file")
    two = shards(tmp_path / "a", [2, 2]).concatenate(shards(tmp_path / "b", [2, 2]))
    with pytest.raises(ValueError, match=r"one HDF5Dataset.*got HDF5Dataset.*, HDF5Dataset"):
        steps_of(two.batch(2), [1, 1], "file")


def test_file_and_the_other_stages(tmp_path: Path) -> None:
    """What stands between the source and the batch acts on each worker's own rows."""
    dataset = shards(tmp_path, [4, 4]).shuffle(seed=3).map(lambda x: x + 1).enumerate().batch(4).repeat(2)
    workers = [distribute(dataset.with_options(Options("file")), Workers([1, 1], index)) for index in (0, 1)]
    for index, worker in enumerate(workers):
        steps = list(worker)
        assert [step[0].tolist() for step in steps] == [[0, 1], [2, 3]] * 2
        for epoch in (steps[:2], steps[2:]):
            rows = [row for step in epoch for row in step[1].tolist()]
            assert sorted(rows) == [100 * (index + 1) + i + 1 for i in range(4)]


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    replicas=st.lists(st.integers(1, 2), min_size=1, max_size=4),
    extra=st.integers(0, 9),
    drop=st.booleans(),
)
def test_file_reads_every_row_once(
    tmp_path_factory: Any, lengths: list[int], replicas: list[int], extra: int, drop: bool
) -> None:
    size = 2 * sum(replicas) + extra
    lengths += [1] * (len(replicas) - len(lengths))
    source = shards(tmp_path_factory.mktemp("set"), lengths)
    steps = steps_of(source.batch(size, drop_remainder=drop), replicas, "file", buffer_size=0)
    shares = Workers(replicas).shares(size)
    own = [sum(lengths[worker :: len(replicas)]) for worker in range(len(replicas))]
    if drop:
        assert len(steps) == min(n // share for n, share in zip(own, shares, strict=True))
        assert all(sum(len(rows) for worker in step for rows in worker) == size for step in steps)
    else:
        assert len(steps) == max(-(-n // share) for n, share in zip(own, shares, strict=True))
        seen = sorted(row for step in steps for worker in step for rows in worker for row in rows)
        assert seen == [100 * (file + 1) + i for file, n in enumerate(lengths) for i in range(n)]


def test_off_gives_every_worker_everything() -> None:
    """Each takes its share of the batch size from its own copy: 10 rows in batches of 4 over 2 workers, 2 a step."""
    steps = steps_of(from_arrays(np.arange(10)).batch(4), [1, 1], "off")
    assert steps == [[[[row, row + 1]], [[row, row + 1]]] for row in range(0, 10, 2)]


def test_off_with_uneven_workers() -> None:
    """Workers of 2 and 1 replicas share a batch of 6 as 4 and 2, so the first is through 10 rows after 3 steps."""
    steps = steps_of(from_arrays(np.arange(10)).batch(6), [2, 1], "off")
    assert sizes(steps) == [[[2, 2], [2]], [[2, 2], [2]], [[1, 1], [2]], [[0, 0], [2]], [[0, 0], [2]]]
    iterator = iter(distribute(from_arrays(np.arange(10)).batch(6).with_options(Options("off")), Workers([2, 1], 1)))
    assert [iterator.global_batch_size for _ in iterator] == [6, 6, 4, 2, 2]
    two = iter(distribute(from_arrays(np.arange(3)).batch(4).with_options(Options("off")), Workers([1, 1], 1)))
    assert [two.global_batch_size for _ in two] == [4, 2]
    dropped = steps_of(from_arrays(np.arange(10)).batch(6, drop_remainder=True), [2, 1], "off")
    assert sizes(dropped) == [[[2, 2], [2]]] * 2


def test_hint_says_where_the_parts_begin() -> None:
    dataset = from_arrays(np.arange(10)).shard(SHARD_HINT, SHARD_HINT).batch(4)
    steps = steps_of(dataset, [1, 1, 1], "hint")
    rows = [[row for step in steps for row in step[worker][0]] for worker in range(3)]
    assert rows == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert sizes(steps) == [[[2], [1], [1]], [[2], [1], [1]], [[0], [1], [1]]]


def test_hint_and_the_placeholder_belong_together() -> None:
    with pytest.raises(ValueError, match=r"shard\(SHARD_HINT, SHARD_HINT\).*got none under HINT"):
        steps_of(from_arrays(np.arange(4)).batch(2), [1, 1], "hint")
    with pytest.raises(ValueError, match=r"shard\(SHARD_HINT, SHARD_HINT\).*got it under AUTO"):
        steps_of(from_arrays(np.arange(4)).shard(SHARD_HINT, SHARD_HINT).batch(2), [1, 1], "auto")


@pytest.mark.parametrize("policy", ["file", "off", "hint"])
def test_a_worker_without_a_part_in_a_batch_is_refused(policy: str, tmp_path: Path) -> None:
    dataset: Dataset = shards(tmp_path, [2, 2, 2])
    dataset = dataset.shard(SHARD_HINT, SHARD_HINT) if policy == "hint" else dataset
    with pytest.raises(ValueError, match=rf"row for each of the 3 workers in a batch under {policy.upper()}"):
        steps_of(dataset.batch(2), [1, 1, 1], policy)


def test_an_endless_dataset_has_no_last_step() -> None:
    dataset = from_arrays(np.arange(3)).batch(2).repeat().with_options(Options("off"))
    workers = [distribute(dataset, Workers([1, 1], index)) for index in (0, 1)]
    assert [worker.cardinality() for worker in workers] == [INFINITE] * 2
    for worker in workers:
        iterator = iter(worker)
        assert [next(iterator).tolist() for _ in range(4)] == [[0], [1], [2], [0]]
        iterator.close()


def test_in_order_the_workers_ask_each_other() -> None:
    """Lengths that nobody knows: a simulated sum over 2 workers with 3 and 5 rows, one row a step each."""
    dataset = from_generator(lambda: iter(range(8)), ArraySpec((), np.int64))
    dataset = dataset.shard(SHARD_HINT, SHARD_HINT).filter(lambda x: x % 2 == 1 or x < 6).batch(2)
    worker = distribute(
        dataset.with_options(Options("hint")),
        Workers([1, 1], 0),
        sum_over_ranks=lambda counts: np.add(counts, [more.pop(0), 1]),
    )
    assert worker.cardinality() == UNKNOWN
    more = [1, 1, 1, 1, 0]  # the other one has four
    iterator = iter(worker)
    assert [(rows.tolist(), iterator.global_batch_size) for rows in iterator] == [([0], 2), ([2], 2), ([4], 2), ([], 1)]
    assert more == []


def test_in_order_whole_batches_end_with_the_first_worker() -> None:
    """The other worker has one batch of 2, this one has three; with drop_remainder a step needs both."""
    dataset = from_arrays(np.arange(12)).shard(SHARD_HINT, SHARD_HINT).filter(lambda x: True)
    dataset = dataset.batch(4, drop_remainder=True).with_options(Options("hint"))
    more = [[1, 2], [0, 0]]
    worker = distribute(dataset, Workers([1, 1], 0), sum_over_ranks=lambda counts: np.add(counts, more.pop(0)))
    assert [rows.tolist() for rows in worker] == [[0, 2]]


def test_stages_after_the_batch_stay() -> None:
    dataset = from_arrays(np.arange(12)).batch(4).map(lambda x: -x).skip(1).take(2)
    assert steps_of(dataset, [1, 1], "off")[0] == [[[-2, -3]], [[-2, -3]]]
    assert len(steps_of(dataset, [1, 1], "off")) == 2


def test_every_policy_is_drawn() -> None:
    dataset = from_arrays(np.arange(12)).batch(4).with_options(Options(AutoShardPolicy.OFF))
    lines = str(distribute(dataset, Workers([1, 2], 1), buffer_size=0)).splitlines()
    assert lines[1:] == [
        "└─ batch(2, drop_remainder=False)",
        "   └─ with_options(auto_shard_policy=OFF)",
        "distributed over 3 replicas of 2 workers, replicas 1 to 2 here: each worker its own batches (OFF); 0 steps ahead",
    ]


BEHIND_BATCH = {
    "nothing": lambda data: data,
    "map": lambda data: data.map(lambda rows: rows + 1).prefetch(1),
    "an order": lambda data: data.shuffle(seed=1).take(3),
    "repeat": lambda data: data.repeat(2),
}


@pytest.mark.parametrize("behind", BEHIND_BATCH)
@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("policy", ["off", "hint", "file"])
def test_every_worker_knows_the_rows_of_all(tmp_path: Path, policy: str, drop_remainder: bool, behind: str) -> None:
    rows: Dataset = shards(tmp_path, [5, 3, 9, 1, 4])
    if policy == "hint":
        rows = rows.shard(SHARD_HINT, SHARD_HINT)
    dataset = BEHIND_BATCH[behind](rows.batch(11, drop_remainder)).with_options(Options(policy))
    workers = [iter(distribute(dataset, Workers([1, 2, 1], index))) for index in range(3)]
    for step in zip(*workers, strict=True):
        own = [sum(len(part) for part in getattr(batch, "values", (batch,))) for batch in step]
        assert [worker.global_batch_size for worker in workers] == [sum(own)] * 3


@pytest.mark.parametrize(("policy", "made"), [("off", 3), ("hint", 4), ("file", 1)])
def test_few_datasets_tell_the_rows_of_all_workers(
    tmp_path: Path, policy: str, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resized: list[int] = []
    resize = Batches.resized

    def spy(self: Batches, size: int) -> Any:
        resized.append(size)
        return resize(self, size)

    monkeypatch.setattr(Batches, "resized", spy)
    files = [3 + number % 7 for number in range(64)]
    rows: Dataset = shards(tmp_path, files)
    for workers in (4, 64):
        # one row more than all have: the first worker has it; of the elements the first three have one more
        source = from_arrays(np.arange(5 * workers + 3)).shard(SHARD_HINT, SHARD_HINT) if policy == "hint" else rows
        dataset = source.shuffle(9, seed=1).take(30).batch(2 * workers + 1).with_options(Options(policy))
        data = iter(distribute(dataset, Workers([1] * workers, 1)))
        assert len(resized) == made
        resized.clear()
        shares = np.array([3] + [2] * (workers - 1))
        lengths = {
            "off": np.full(workers, sum(files)),
            "hint": np.array([6] * 3 + [5] * (workers - 3)),
            "file": np.array([sum(files[worker::workers]) for worker in range(workers)]),
        }[policy]
        left = np.minimum(lengths, 30)
        for _ in data:
            taken = np.minimum(left, shares)
            assert data.global_batch_size == taken.sum()
            left = left - taken
        assert not left.any()


@pytest.mark.parametrize("policy", ["off", "hint"])
def test_a_step_locates_batches_of_its_own_worker_only(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    located: list[int] = []
    locate_range = Batches.locate_range

    def spy(self: Batches, epoch: int, start: int, stop: int, own: Any = None) -> Any:
        located.extend(range(start, stop))
        return locate_range(self, epoch, start, stop, own)

    monkeypatch.setattr(Batches, "locate_range", spy)
    for workers in (5, 50):
        rows = from_arrays(np.arange(20 if policy == "off" else 20 * workers))
        if policy == "hint":
            rows = rows.shard(SHARD_HINT, SHARD_HINT)
        dataset = rows.batch(4 * workers).with_options(Options(policy))
        assert len(list(distribute(dataset, Workers([1] * workers, 2)))) == 5
        assert located == [0, 1, 2, 3, 4]
        located.clear()


@pytest.mark.parametrize("workers", [4, 64])
def test_data_locates_rows_of_its_own_worker_only(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    located: list[int] = []
    locate_range = Batches.locate_range

    def spy(self: Batches, *arguments: Any) -> Any:
        found = locate_range(self, *arguments)
        located.extend(found[0][1].tolist())  # no row of whole batches, which grow with the number of workers
        return found

    monkeypatch.setattr(Batches, "locate_range", spy)
    rows = 7 * 3 * workers + 2 * workers  # seven batches of three rows each, and one of two
    data = distribute(from_arrays(np.arange(rows)).batch(3 * workers), Workers([1] * workers, 2))
    expected = [3 * workers * batch + 6 + row for batch in range(7) for row in range(3)] + [
        21 * workers + 4,
        21 * workers + 5,
    ]
    assert [row for batch in data for row in batch.tolist()] == located == expected


@pytest.mark.parametrize("rows", [10, 12, 13, 14])
def test_batches_that_are_divided_by_hints_have_their_own_rows(rows: int) -> None:
    """A worker's batches have two rows, and every second one is its own: a step has the rows of two."""
    dataset = from_arrays(np.arange(rows)).batch(4).shard(SHARD_HINT, SHARD_HINT).with_options(Options("hint"))
    for worker in range(2):
        plan = auto_shard(dataset.node, Workers([1, 1], worker))
        assert [step[0] for step in plan.elements(0, 0)] == [min(4, rows - first) for first in range(0, rows, 4)]
