"""Operators on ranks: files that all of them save together, names of files that differ, and what they read in order."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import Dataset
from mpistrat.errors import CollectiveMismatchError


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", ["random", "in order", "few"])
def test_ranks_save_one_set_in_order(kind, strategy, mpi_tmp_path):
    rows = Dataset.range(2 if kind == "few" else 150).map(lambda x: (x, {"double": 2 * x}))
    if kind == "in order":
        rows = rows.filter(lambda x, more: x % 2 == 0)
    expected = [int(x) for x, _ in rows.node.elements(0)]
    rows.save(mpi_tmp_path / "set", comm=strategy.comm)
    loaded = Dataset.load(mpi_tmp_path / "set")
    assert [int(x) for x, _ in loaded] == expected
    assert [int(more["double"]) for _, more in loaded] == [2 * x for x in expected]


@pytest.mark.ranks(2, 3)
def test_an_error_of_one_rank_while_saving_is_one_on_all(strategy, mpi_tmp_path):
    rows = Dataset.range(6)
    if strategy.rank == 1:
        rows = rows.batch(2)
    with pytest.raises((ValueError, ms.errors.ShardError), match="batched already"):
        rows.save(mpi_tmp_path / "set", comm=strategy.comm)
    rows = Dataset.range(6).map(lambda x: x / 2 if strategy.rank else x)
    with pytest.raises((CollectiveMismatchError, ms.errors.ShardError)):
        rows.save(mpi_tmp_path / "set", comm=strategy.comm)
    assert not list(mpi_tmp_path.glob("set/*.h5"))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", ["random", "in order", "windows"])
def test_ranks_divide_batches_of_batches(kind, strategy):
    """The inner batches are rows, which stay whole."""
    rows = Dataset.range(40) if kind == "random" else Dataset.range(40).filter(lambda x: True)
    inner = (
        rows.window(4).flat_map(lambda window: window.batch(4))
        if kind == "windows"
        else rows.shuffle(40, seed=3).batch(4)
    )
    expected = [batch.tolist() for batch in inner.batch(4)]
    found = [strategy.comm.allgather(batch.tolist()) for batch in strategy.distribute_dataset(inner.batch(4))]
    assert [[row for part in parts for row in part] for parts in found] == expected
    sizes = [[len(part) for part in parts] for parts in found]
    assert all(max(each) - min(each) <= 1 for each in sizes)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", ["random", "in order"])
def test_ranks_make_a_snapshot_together(kind, strategy, mpi_tmp_path):
    calls = []

    def double(x):
        calls.append(int(x))
        return 2 * x

    rows = Dataset.range(30) if kind == "random" else Dataset.range(30).filter(lambda x: True)
    for run in range(2):
        dataset = rows.map(double).snapshot(mpi_tmp_path / "set").batch(6)
        for _ in range(2):
            data = strategy.distribute_dataset(dataset)
            parts = [strategy.comm.allgather(batch.tolist()) for batch in data]
            assert [[x for part in step for x in part] for step in parts] == [
                list(range(start, start + 12, 2)) for start in range(0, 60, 12)
            ]
        if run == 0:  # beside what tells how elements look, each row is made once by all ranks
            made = sum(strategy.comm.allgather(len(calls)))
            assert made <= 30 + 2 * strategy.size
        else:
            assert sum(strategy.comm.allgather(len(calls))) <= made + 2 * strategy.size
    strategy.comm.Barrier()
    assert Dataset.load(mpi_tmp_path / "set").cardinality() == 30


@pytest.mark.ranks(2)
def test_ranks_that_list_other_files_are_told(strategy, mpi_tmp_path):
    own = mpi_tmp_path / f"node{strategy.rank}"
    own.mkdir()
    for name in ("a", "b"):
        (own / name).write_text("")
    pattern = f"{mpi_tmp_path}/node{strategy.rank}/*"
    with pytest.raises(CollectiveMismatchError, match="list_files: 2 names"):
        strategy.distribute_dataset(Dataset.list_files(pattern).batch(1))
    strategy.comm.Barrier()
    same = strategy.distribute_dataset(Dataset.list_files(f"{mpi_tmp_path}/*/*", shuffle=False).batch(2))
    assert [str(name)[-7:] for batch in same for name in batch] == [f"node{n}/{'ab'[strategy.rank]}" for n in range(2)]


CHAINS = {
    "take_while": lambda: Dataset.range(50).take_while(lambda x: x < 23).batch(4),
    "unique": lambda: Dataset.range(50).map(lambda x: x % 11).unique().batch(4),
    "scan": lambda: Dataset.range(10).scan(np.int64(0), lambda state, x: (state + x, state + x)).batch(4),
    "window": lambda: Dataset.range(20).window(5, 2).flat_map(lambda window: window).batch(6),
    "sliding_window": lambda: Dataset.range(20).sliding_window(3, shift=2).batch(4),
    "sliding_window in order": lambda: Dataset.range(30).filter(lambda x: x % 3 != 1).sliding_window(3).batch(4),
    "group": lambda: Dataset.range(20).group_by_window(lambda x: x % 3, lambda key, group: group.batch(4), 4),
    "buckets": lambda: Dataset.range(20).bucket_by_sequence_length(lambda x: x % 4, [2], [3, 5], no_padding=True),
    "resample": lambda: Dataset.range(60).rejection_resample(lambda x: x % 2, [0.2, 0.8]).map(lambda c, x: x).batch(4),
    "ignore_errors": lambda: Dataset.range(20).map(lambda x: 60 // (int(x) % 5)).ignore_errors().batch(4),
    "rebatch": lambda: Dataset.range(20).batch(3).rebatch([4, 2, 1]),
    "choose": lambda: Dataset.choose_from_datasets([Dataset.range(9)] * 2, Dataset.random(1).map(lambda x: x % 2)).batch(3),
    "random": lambda: Dataset.random(3).take(11).batch(4),
    "cast": lambda: Dataset.range(11).batch(4).cast("f4"),
    "counter": lambda: Dataset.counter(3, 2).take(11).batch(4),
}  # fmt: skip


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", CHAINS)
def test_ranks_together_have_what_one_has(name, strategy):
    make = CHAINS[name]
    expected = [np.asarray(batch).tolist() for batch in make()]
    assert len(expected) > 1
    data = strategy.distribute_dataset(make())
    iterator, steps = iter(data), []
    for batch in iterator:
        parts = strategy.comm.allgather(np.asarray(batch).tolist())
        steps.append([row for part in parts for row in part])
        if len(steps) == 1:
            state = iterator.state()
    assert steps == expected
    following = iter(data)
    following.restore(state)
    assert strategy.comm.allgather(np.asarray(next(following)).tolist()) == [
        expected[1][low:high] for low, high in bounds(len(expected[1]), strategy.size)
    ]
    following.close()


def bounds(rows, parts):
    """Blocks that differ by at most one row, the larger ones first."""
    sizes = [rows // parts + (part < rows % parts) for part in range(parts)]
    return [(sum(sizes[:part]), sum(sizes[: part + 1])) for part in range(parts)]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("looked", ["one rank", "another rank of files that are there"])
def test_a_rank_that_has_looked_into_a_snapshot_meets_the_others(looked, strategy, mpi_tmp_path):
    dataset = Dataset.range(12).map(lambda x: 2 * x).snapshot(mpi_tmp_path / "set")
    if looked != "one rank":
        strategy.distribute_dataset(Dataset.range(12).map(lambda x: 2 * x).snapshot(mpi_tmp_path / "set").batch(6))
    if strategy.rank == (looked != "one rank"):
        assert int(next(iter(dataset))) == 0
    strategy.comm.Barrier()
    parts = [strategy.comm.allgather(batch.tolist()) for batch in strategy.distribute_dataset(dataset.batch(6))]
    assert [sorted(np.concatenate(part).tolist()) for part in parts] == [[0, 2, 4, 6, 8, 10], [12, 14, 16, 18, 20, 22]]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("order", ["random", "in order"])
def test_a_row_that_one_rank_cannot_make_while_saving_is_an_error_on_all(order, strategy, mpi_tmp_path):
    def half(x):
        if x == 3:
            raise ZeroDivisionError("row 3")
        return x / 2

    rows = Dataset.range(200).map(half)
    if order == "in order":
        rows = rows.filter(lambda x: True)
    with pytest.raises((ZeroDivisionError, ms.errors.ShardError)):
        rows.save(mpi_tmp_path / "set", comm=strategy.comm)
    assert not list(mpi_tmp_path.glob("set/*.h5"))
