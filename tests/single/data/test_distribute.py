"""Batches divided over replicas: every sample once, sizes that differ by at most one, the same order for any number."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat import context
from mpistrat.base.distributed_values import PerReplica
from mpistrat.data import (
    ArraySpec,
    Dataset,
    DistributedDataset,
    HDF5Dataset,
    InputReplicationMode,
    Options,
    from_arrays,
    write_shards,
)
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.from_function import call_dataset_fn
from mpistrat.data.feed.plan import Workers
from mpistrat.errors import ShardError


def parts(dataset: Dataset, replicas: int, **options: Any) -> list[DistributedDataset]:
    """One distributed dataset for each replica, each on a rank of its own."""
    return [distribute(dataset, Workers([1] * replicas, index), **options) for index in range(replicas)]


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mpistrat-prefetch"]


def no_threads_within(seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not prefetch_threads()


def test_the_rule_for_a_partial_last_batch() -> None:
    """10 examples, batch 4, 2 replicas: 2+2, 2+2, 1+1."""
    steps = list(zip(*parts(from_arrays(np.arange(10)).batch(4), 2), strict=True))
    assert [[block.tolist() for block in step] for step in steps] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]


def test_a_replica_without_a_row_gets_zero_rows_of_the_right_kind() -> None:
    dataset = from_arrays({"x": np.zeros((5, 3), np.float32), "y": np.arange(5)}).batch(4)
    last = [list(part)[-1] for part in parts(dataset, 3)]
    assert [batch["y"].tolist() for batch in last] == [[4], [], []]
    assert [(batch["x"].shape, batch["x"].dtype) for batch in last] == [((n, 3), np.float32) for n in (1, 0, 0)]


def test_a_mapped_function_never_sees_zero_rows() -> None:
    dataset = from_arrays(np.arange(5.0)).batch(4).map(lambda x: (x - x.max())[:, None])
    last = [list(part)[-1] for part in parts(dataset, 3)]
    assert [batch.shape for batch in last] == [(1, 1), (0, 1), (0, 1)]


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 200),
    size=st.integers(1, 70),
    replicas=st.integers(1, 64),
    drop=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_sample_once_and_in_the_same_order(n: int, size: int, replicas: int, drop: bool, epoch: int) -> None:
    dataset = from_arrays(np.arange(n)).shuffle(seed=2).batch(size, drop_remainder=drop)
    dataset.set_epoch(epoch)
    alone = [batch.tolist() for batch in dataset]
    distributed = parts(dataset, replicas, buffer_size=0)
    for part in distributed:
        part.set_epoch(epoch)
    steps = list(zip(*distributed, strict=True))  # strict: all make the same number of steps
    assert [[row for block in step for row in block.tolist()] for step in steps] == alone
    for step in steps:
        sizes = [len(block) for block in step]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
    assert len(distributed[0]) == len(alone)


@settings(deadline=None, max_examples=30)
@given(local=st.lists(st.integers(1, 4), min_size=1, max_size=4), n=st.integers(1, 40))
def test_uneven_local_replicas(local: list[int], n: int) -> None:
    dataset = from_arrays(np.arange(n)).batch(7)
    ranks = [list(distribute(dataset, Workers(local, index), buffer_size=0)) for index in range(len(local))]
    single = [list(part) for part in parts(dataset, sum(local), buffer_size=0)]
    for step in range(len(dataset)):
        blocks: list[Any] = []
        for rank, k in zip(ranks, local, strict=True):
            assert isinstance(rank[step], PerReplica) == (k > 1)
            blocks += rank[step].values if k > 1 else [rank[step]]
        assert [b.tolist() for b in blocks] == [part[step].tolist() for part in single]


@settings(deadline=None, max_examples=30)
@given(before=st.integers(1, 9), after=st.integers(1, 9), stop=st.integers(0, 8))
def test_the_number_of_ranks_may_change_in_the_middle(before: int, after: int, stop: int) -> None:
    dataset = from_arrays(np.arange(50)).shuffle(seed=3).batch(7)
    first = [iter(part) for part in parts(dataset, before, buffer_size=1)]
    seen = [row for _ in range(stop) for iterator in first for row in next(iterator).tolist()]
    states = [iterator.state() for iterator in first]
    assert all(state == states[0] for state in states)
    second = [iter(part) for part in parts(dataset, after, buffer_size=1)]
    for iterator in second:
        iterator.restore(states[0])
    for step in zip(*second, strict=True):
        seen += [row for block in step for row in block.tolist()]
    assert seen == [row for batch in dataset for row in batch.tolist()]
    for iterator in first:
        iterator.close()


def test_the_state_is_what_was_consumed_not_what_was_read_ahead() -> None:
    iterator = iter(parts(from_arrays(np.arange(100)).batch(10).prefetch(4), 1)[0])
    next(iterator)
    deadline = time.monotonic() + 5
    while iterator._read_ahead._items.qsize() < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert iterator.state() == {"epoch": 0, "next": 1, "length": 10}
    iterator.close()


def test_the_epoch_after_a_restored_one_comes_next() -> None:
    rows = from_arrays(np.arange(20)).shuffle(seed=3).batch(5)
    expected = [[batch.tolist() for batch in rows] for _ in range(5)]
    for dataset in (from_arrays(np.arange(20)).shuffle(seed=3).batch(5), parts(rows, 1)[0]):
        iterator = iter(dataset)
        iterator.restore({"epoch": 3, "next": 2})
        assert [batch.tolist() for batch in iterator] == expected[3][2:]
        assert [batch.tolist() for batch in dataset] == expected[4]


def test_the_true_global_number_of_rows_is_known_at_every_step() -> None:
    iterator = iter(parts(from_arrays(np.arange(10)).batch(4), 3)[2])
    seen = []
    assert iterator.global_batch_size is None
    for _ in iterator:
        assert context.global_batch_size() == iterator.global_batch_size
        seen.append(iterator.global_batch_size)
    assert seen == [4, 4, 2]
    assert context.global_batch_size() is None


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_prefetching_changes_nothing(prefetch: int) -> None:
    part = parts(from_arrays(np.arange(23)).shuffle(seed=1).batch(4), 2, buffer_size=prefetch)[1]
    plain = parts(from_arrays(np.arange(23)).shuffle(seed=1).batch(4), 2, buffer_size=0)[1]
    for _ in range(3):
        assert [batch.tolist() for batch in part] == [batch.tolist() for batch in plain]


def test_a_thread_reads_ahead_once_reading_takes_long() -> None:
    def slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.005)
        return x

    quick = from_arrays(np.arange(100)).batch(10)
    for dataset, expected in ((quick, [0] * 6), (quick.map(slow), [0, 0, 0, 1, 1, 1]), (quick.prefetch(1), [1] * 6)):
        iterator = iter(parts(dataset, 1)[0])
        counts = []
        for step in range(6):
            assert next(iterator).tolist() == list(range(10 * step, 10 * step + 10))
            counts.append(len(prefetch_threads()))
        iterator.close()
        assert counts == expected


def test_statistics() -> None:
    part = parts(from_arrays({"x": np.zeros((10, 2)), "y": np.zeros(10, np.int32)}).batch(4), 2)[0]
    list(part)
    stats = part.stats()
    # Replica 0 gets 2 + 2 + 1 rows of 2 float64 and one int32.
    assert (stats.steps, stats.samples, stats.bytes) == (3, 5, 5 * (16 + 4))
    assert stats.wait_seconds > 0
    list(part)
    assert part.stats().samples == 10
    assert stats.samples == 5


def test_a_thread_reads_no_further_ahead_than_told() -> None:
    read: list[int] = []

    def note(x: np.ndarray) -> np.ndarray:
        read.append(int(x[0]))
        return x

    dataset = from_arrays(np.arange(100)).batch(1).map(note)
    assert dataset.element_spec == ArraySpec((None,), np.int64)  # calls the function once
    read.clear()
    iterator = iter(parts(dataset.prefetch(3), 1)[0])
    next(iterator)
    deadline = time.monotonic() + 5
    while len(read) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert read == [0, 1, 2, 3]  # the one in hand and three ahead
    iterator.close()


def test_threads_end_at_the_end_of_the_epoch() -> None:
    list(parts(from_arrays(np.arange(10)).batch(2).prefetch(2), 1)[0])
    assert no_threads_within()


def test_threads_end_when_the_iterator_is_dropped() -> None:
    for batch in parts(from_arrays(np.arange(1000)).batch(2).prefetch(2), 1)[0]:
        assert len(batch) == 2
        break
    gc.collect()
    assert no_threads_within()


def test_threads_end_when_the_iterator_is_closed_and_it_may_go_on() -> None:
    iterator = iter(parts(from_arrays(np.arange(10)).batch(2).prefetch(2), 1)[0])
    assert next(iterator).tolist() == [0, 1]
    iterator.close()
    assert not prefetch_threads()
    assert next(iterator).tolist() == [2, 3]
    iterator.close()


def test_an_error_while_reading_ahead_comes_in_its_turn() -> None:
    def careful(x: np.ndarray) -> np.ndarray:
        if 5 in x:
            raise ZeroDivisionError("at five")
        return x

    iterator = iter(parts(from_arrays(np.arange(10)).batch(2).map(careful).prefetch(2), 1)[0])
    assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1], [2, 3]]
    with pytest.raises(ZeroDivisionError, match="at five"):
        next(iterator)
    assert no_threads_within()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_stop_iteration_in_a_mapped_function_is_not_the_end(prefetch: int) -> None:
    def stop(x: np.ndarray) -> np.ndarray:
        if 5 in x:
            raise StopIteration
        return x

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(parts(from_arrays(np.arange(10)).batch(2).map(stop), 1, buffer_size=prefetch)[0])


def test_damage_found_while_reading_ahead_names_the_file(tmp_path: Any) -> None:
    path = write_shards(tmp_path, {"x": np.arange(200_000)}, num_shards=1, compression="gzip")[0]
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    part = parts(HDF5Dataset(path, verify=False).batch(1000).prefetch(2), 1)[0]
    with pytest.raises(ShardError, match=path.name):
        list(part)


def test_each_rank_gathers_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = from_arrays(np.arange(12))
    gathered: list[list[int]] = []
    source = type(dataset.node)
    original = source.gather

    def spy(self: Any, epochs: np.ndarray, positions: np.ndarray) -> Any:
        gathered.append(positions.tolist())
        return original(self, epochs, positions)

    monkeypatch.setattr(source, "gather", spy)
    list(parts(dataset.batch(6), 3)[1])
    assert gathered == [[2, 3], [8, 9]]


def test_element_spec_has_a_free_first_axis() -> None:
    part = parts(from_arrays(np.zeros((9, 2), np.float32)).batch(3, drop_remainder=True), 2)[0]
    assert part.element_spec == ArraySpec((None, 2), np.float32)


def test_wrong_use_is_explained() -> None:
    rows = from_arrays(np.arange(4))
    with pytest.raises(ValueError, match=r"Add \.batch"):
        distribute(rows, Workers())
    with pytest.raises(TypeError, match="from_arrays"):
        distribute([1, 2], Workers())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 <= index < 1"):
        Workers([1], 1)
    with pytest.raises(ValueError, match="at least one replica"):
        Workers([1, 0], 0)
    with pytest.raises(ValueError, match="epoch"):
        distribute(rows.batch(2), Workers()).set_epoch(-1)
    for epoch in ("a", 1.5):
        with pytest.raises(TypeError, match="DistributedDataset.set_epoch: epoch: expected an integer, got"):
            distribute(rows.batch(2), Workers()).set_epoch(epoch)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"DistributedDataset: len: .*got no end. Use take\(n\) after repeat"):
        len(distribute(rows.batch(2).repeat(), Workers()))
    with pytest.raises(
        TypeError, match=r"DistributedDataset: len: .*got an end that only reading shows. Loop to the end"
    ):
        len(distribute(rows.filter(lambda x: True).batch(2), Workers()))


def test_print_says_who_reads_what() -> None:
    assert str(parts(from_arrays(np.arange(4)).batch(2), 2)[1]).splitlines()[-1] == (
        "distributed over 2 replicas of 2 workers, replica 1 here: each batch cut into blocks (DATA); 2 steps ahead"
    )


def test_no_thread_reads_when_the_interpreter_ends() -> None:
    """A thread inside HDF5 would crash it. What is registered first, as here, is called last."""
    program = """
import atexit, threading, time
atexit.register(lambda: print([t.name for t in threading.enumerate()], late))
late = []
import numpy as np
import mpistrat as ms

def slow(rows):
    time.sleep(0.3)
    late.append(len(rows))
    return rows

strategy = ms.get_strategy()
dataset = strategy.distribute_dataset(ms.data.from_arrays(np.arange(20)).batch(2).map(slow))
kept = iter(dataset)  # alive at the end
next(kept)
late.clear()
for _ in dataset:  # dropped while its thread reads
    break
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    names, _, finished = done.stdout.partition("] ")
    assert names == "['MainThread'", done.stdout
    assert finished.strip() != "[]", done.stdout  # what was being read was waited for


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("policy", ["data", "off"])
def test_the_steady_state_reuses_the_batches_memory(replicas: int, policy: str) -> None:
    """Batches of 1 MB: two ahead, one being read, one in hand and the one before, however many steps there are."""
    dataset = from_arrays(np.zeros((64, 1 << 16), np.float32)).repeat(20).batch(4).with_options(Options(policy))
    addresses = {
        (batch.values[0] if replicas > 1 else batch).__array_interface__["data"][0]
        for batch in distribute(dataset, Workers([replicas]))
    }
    assert len(addresses) <= 6


def test_batches_that_are_kept_stay_as_they_are() -> None:
    dataset = from_arrays(np.repeat(np.arange(200), 1 << 14).reshape(200, -1)).batch(4)
    kept = list(distribute(dataset, Workers([2])))
    assert [values[0, 0] for step in kept for values in step.values] == list(range(0, 200, 2))


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("how", ["undistributed", "auto", "off", "function", "arrays"])
def test_a_batch_that_the_loop_dropped_is_held_by_nobody(how: str, replicas: int, in_order: bool) -> None:
    """So its memory, which the caches know, is used for the next one."""
    rows, workers = from_arrays(np.arange(400)), Workers([replicas])
    dataset: Any = (rows.filter(lambda row: True) if in_order else rows).batch(40)
    if how == "undistributed":
        replicas, iterator = 1, iter(dataset)
    elif how in ("auto", "off"):
        iterator = iter(distribute(dataset.with_options(Options(how)), workers, buffer_size=0))
    else:
        made = dataset if how == "function" else (np.full(3, i) for i in range(20))
        steps = call_dataset_fn(lambda context: made, workers, InputReplicationMode.PER_WORKER)
        iterator = iter(DistributedDataset(steps, buffer_size=0))
    for _ in range(3):
        batch: Any = next(iterator)
        parts = batch.values if isinstance(batch, PerReplica) else [batch]
        held = [weakref.ref(part) for part in parts]
        del batch, parts
        assert [part() for part in held] == [None] * replicas
