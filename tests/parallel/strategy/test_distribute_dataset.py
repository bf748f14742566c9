"""Real ranks read their own parts of one dataset: each sample once, in one order, without a word between them."""

import numpy as np
import pytest


def gathered(comm, rows):
    """All ranks' rows in rank order, on every rank."""
    counts = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([len(rows)], np.int64), counts)
    everything = np.empty(counts.sum(), np.int64)
    comm.Allgatherv(np.ascontiguousarray(rows, np.int64), [everything, counts])
    return everything.tolist(), counts.tolist()


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_rank_reads_its_part_of_the_shards():
    import tempfile
    from pathlib import Path

    from mpi4py import MPI

    from mpistrat.data import HDF5Dataset, write_shards
    from mpistrat.data.feed.distributed import distribute
    from mpistrat.data.feed.plan import Workers

    comm = MPI.COMM_WORLD
    name = np.zeros(512, np.uint8)
    scratch = None
    if comm.rank == 0:
        scratch = tempfile.TemporaryDirectory()
        write_shards(scratch.name, {"x": np.arange(303.0).reshape(101, 3), "y": np.arange(101)}, num_shards=3)
        encoded = np.frombuffer(scratch.name.encode(), np.uint8)
        name[: len(encoded)] = encoded
    comm.Bcast(name)
    directory = Path(name.tobytes().rstrip(b"\0").decode())

    whole = HDF5Dataset(directory, verify=True).shuffle(seed=5).batch(16)
    mine = distribute(whole, Workers([1] * comm.size, comm.rank))
    for _ in range(2):
        for step, (expected, batch) in enumerate(zip(whole, mine, strict=True)):
            assert np.array_equal(batch["x"][:, 0], 3.0 * batch["y"])
            rows, counts = gathered(comm, batch["y"])
            assert rows == expected["y"].tolist(), step
            assert max(counts) - min(counts) <= 1
    comm.Barrier()
    if scratch is not None:
        scratch.cleanup()


def shared_shards(strategy, folder, lengths):
    """Files with so many rows, written by rank 0."""
    from mpistrat.data import HDF5Dataset, write_shards

    paths = [folder / str(index) / "rows.h5" for index in range(len(lengths))]
    if strategy.rank == 0:
        for index, (path, n) in enumerate(zip(paths, lengths, strict=True)):
            write_shards(path.parent / "rows-*.h5", {"x": 100 * (index + 1) + np.arange(n)}, num_shards=1)
    strategy.comm.Barrier()
    return HDF5Dataset([next(path.parent.glob("rows-*.h5")) for path in paths], "x")


@pytest.fixture
def strategy():
    import mpistrat as ms

    with ms.MultiWorkerMirroredStrategy() as strategy:
        yield strategy


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("policy", ["data", "file", "off", "hint"])
def test_policies_over_real_ranks(strategy, mpi_tmp_path, policy):
    from mpistrat.data import SHARD_HINT, Options

    rows = shared_shards(strategy, mpi_tmp_path, [3, 5, 1, 4])
    if policy == "hint":
        rows = rows.shard(SHARD_HINT, SHARD_HINT)
    data = strategy.distribute_dataset(rows.shuffle(seed=1).batch(4).with_options(Options(policy)))
    collectives = strategy.extended.process_group.monitor.number
    seen = [(len(batch), data_size(), batch.tolist()) for batch in data]
    assert strategy.extended.process_group.monitor.number == collectives  # lengths are known: nobody asks
    everything = strategy.comm.allgather(seen)
    assert len({len(steps) for steps in everything}) == 1
    for step in zip(*everything, strict=True):
        assert {size for _, size, _ in step} == {sum(count for count, _, _ in step)}
    mine = [sorted(row for _, _, rows in steps for row in rows) for steps in everything]
    whole = [100 * (file + 1) + i for file, n in enumerate([3, 5, 1, 4]) for i in range(n)]
    if policy == "off":
        assert mine == [whole] * strategy.size
    else:
        assert sorted(row for rows in mine for row in rows) == whole
    if policy == "file":
        assert mine[strategy.rank] == [row for row in whole if (row // 100 - 1) % strategy.size == strategy.rank]


def data_size():
    import mpistrat as ms

    return ms.context.global_batch_size()


@pytest.mark.ranks(1, 2, 3)
def test_unknown_lengths_meet(strategy):
    """Each rank filters its own part: 1, 2, 3 … rows are left, one a step; all end with the longest."""
    from mpistrat.data import SHARD_HINT, Options, from_arrays

    rows = from_arrays(np.arange(10 * strategy.size)).shard(SHARD_HINT, SHARD_HINT)
    rows = rows.filter(lambda x: x // strategy.size <= x % strategy.size)
    data = strategy.distribute_dataset(rows.batch(strategy.size).with_options(Options("hint")))
    for _ in range(2):
        lengths = [(len(batch), data_size()) for batch in data]
        assert lengths == [(int(step <= strategy.rank), strategy.size - step) for step in range(strategy.size)]


def extra_next(data, iterator):
    next(iterator)


def another_epoch(data, iterator):
    data.set_epoch(5)
    return iter(data)


def one_epoch_more(data, iterator):
    return iter(data)


def another_state(data, iterator):
    iterator.restore({"epoch": 0, "next": 7})


def peek(data, iterator):
    assert iterator.peek() is not None


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("change", "there", "here"),
    [
        (extra_next, "none", "step 3 of epoch 0"),
        (another_epoch, "step 2 of epoch 0", "step 0 of epoch 5"),
        (one_epoch_more, "step 2 of epoch 0", "step 0 of epoch 1"),
        (another_state, "step 2 of epoch 0", "step 7 of epoch 0"),
        (peek, "", ""),
    ],
)
def test_ranks_at_different_places_in_their_data_are_told(strategy, change, there, here):
    """On the last rank something else is done before the third step: all ranks hear which batch each of them drew."""
    from mpistrat.data import from_arrays
    from mpistrat.errors import CollectiveMismatchError

    last = strategy.size - 1
    data = strategy.distribute_dataset(from_arrays(np.arange(40.0)).shuffle(seed=1).batch(4))
    iterator = iter(data)
    for _ in range(2):
        strategy.reduce("SUM", next(iterator).sum())
    if strategy.rank == last:
        iterator = change(data, iterator) or iterator
    if not there:
        assert strategy.reduce("SUM", next(iterator).sum()) >= 0
        return
    told = rf"different places.*: (batch [34]).* rank.? 0.*: {there}.*; rank {last}: {here} of dataset 1 \(made at .*\.py:\d+\)"
    with pytest.raises(CollectiveMismatchError, match=told):
        strategy.reduce("SUM", next(iterator).sum())
    assert strategy.reduce("SUM", 1.0) == strategy.size  # a program may go on from here


def _numbers(first):
    return lambda: ({"x": np.full(2, first + k), "name": f"row {first + k}"} for k in range(12))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("shared_memory", ["0", "1"])
@pytest.mark.parametrize("given", [False, True])
def test_generators_of_other_rows_are_told(monkeypatch, shared_memory, given):
    """With the first batch, whatever is made of the rows; where each rank has rows of its own, nothing is compared."""
    import mpistrat as ms
    from mpistrat.data import ArraySpec, Options, from_arrays, from_generator
    from mpistrat.errors import CollectiveMismatchError

    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", shared_memory)
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "1")
    with ms.MultiWorkerMirroredStrategy() as strategy:
        last = strategy.size - 1
        spec = {"x": ArraySpec((2,), np.float64), "name": ArraySpec((), object)} if given else None
        chains = [
            lambda rows: rows.batch(4),
            lambda rows: rows.map(lambda row: row["x"] * strategy.rank).batch(4),  # each makes other rows of the same
            lambda rows: ms.data.zip(from_arrays(np.arange(12.0)), rows).batch(4).repeat(2),
        ]
        for chain in chains:
            for of_last in (0.0, 100.0):
                first = of_last if strategy.rank == last else 0.0
                data = iter(strategy.distribute_dataset(chain(from_generator(_numbers(first), spec))))
                assert next(data) is not None
                if not of_last:
                    assert strategy.reduce("SUM", 1.0) == strategy.size
                    continue
                words = rf"different rows: the first element of dataset \d+ \(made at .*\.py:\d+\) .*rank {last}: #"
                with pytest.raises(CollectiveMismatchError, match=words):
                    strategy.reduce("SUM", 1.0)
        own = from_generator(_numbers(100.0 * strategy.rank), spec)
        options = Options()
        options.experimental_distribute.auto_shard_policy = "OFF"
        for data in (
            strategy.distribute_datasets_from_function(lambda context: own.batch(4)),
            strategy.distribute_dataset(own.batch(4).with_options(options)),
        ):
            assert sum(strategy.reduce("SUM", len(batch["x"])) for batch in data) == 12 * strategy.size


@pytest.mark.ranks(2, 3)
def test_datasets_and_iterators_in_another_order_are_told(strategy):
    import threading

    from mpistrat.data import from_arrays
    from mpistrat.errors import CollectiveMismatchError

    first, second = (strategy.distribute_dataset(from_arrays(np.arange(4.0)).batch(4)) for _ in range(2))
    order = [first, second] if strategy.rank else [second, first]
    with pytest.raises(
        CollectiveMismatchError, match=r"batch 1 .*rank 0: step 0 of epoch 0 of dataset 2.*of dataset 1"
    ):
        strategy.reduce("SUM", next(iter(order[0])).sum())
    first.set_epoch(3)
    one, other = iter(first), iter(first)
    batches = [next(one), next(other)] if strategy.rank else [next(other), next(one)]
    with pytest.raises(CollectiveMismatchError, match=r"batch 1 .*rank 0: step 0 of epoch 4 of dataset 1.*of epoch 3 "):
        strategy.reduce("SUM", batches[0].sum())
    if strategy.rank == 0:  # what another thread draws is its own affair
        thread = threading.Thread(target=lambda: list(first))
        thread.start()
        thread.join()
    assert strategy.reduce("SUM", 1.0) == strategy.size


@pytest.mark.ranks(2, 3)
def test_other_rows_under_one_name_are_told(strategy, mpi_tmp_path):
    """Arrays of an unseeded generator, objects too, and another copy of the files on one rank; equal ones are fine."""
    import h5py

    from mpistrat.data import HDF5Dataset, from_arrays, write_shards
    from mpistrat.errors import CollectiveMismatchError

    odd = strategy.rank == strategy.size - 1
    numbers, words = np.arange(1000.0), np.array(["a", "b", None] * 5, object)
    structured = np.zeros(3, np.dtype([("i", "i1"), ("x", "f8")], align=True))
    for rows in (
        numbers + odd,
        np.where(np.arange(15) == 4, "c", words) if odd else words,
        numbers.astype(complex) * (1 + odd),
    ):
        with pytest.raises(CollectiveMismatchError, match=r"(?s)different datasets.*fingerprint"):
            strategy.distribute_dataset(from_arrays(rows).batch(4))
    for rows in (
        numbers,
        words,
        structured,
        numbers[:0],
        (numbers.reshape(10, 100)[:, ::2], numbers[:10].astype(">f4")),
    ):
        strategy.distribute_dataset(from_arrays(rows).batch(4))
    if strategy.rank == 0:
        for copy in range(2):
            write_shards(mpi_tmp_path / f"{copy}", {"x": np.arange(8) + copy}, num_shards=2)
    strategy.comm.Barrier()
    with pytest.raises(CollectiveMismatchError, match=r"(?s)different datasets.*fingerprint"):
        strategy.distribute_dataset(HDF5Dataset(mpi_tmp_path / f"{int(odd)}", "x").batch(4))
    assert len(strategy.distribute_dataset(HDF5Dataset(mpi_tmp_path / "1", "x").batch(4))) == 2
    for kind in ("packed", "words"):  # files without a manifest
        if strategy.rank == 0:
            for copy in range(2):
                (mpi_tmp_path / f"{kind}{copy}").mkdir()
                with h5py.File(mpi_tmp_path / f"{kind}{copy}" / "a.h5", "w") as file:
                    packed = (
                        {"compression": "gzip", "chunks": (16,)} if kind == "packed" else {"dtype": h5py.string_dtype()}
                    )
                    file.create_dataset(
                        "x", data=np.arange(100) + copy if kind == "packed" else ["ab"[copy]] * 100, **packed
                    )
        strategy.comm.Barrier()
        text = rf"(?s)different datasets.*{kind}0.*fingerprint.*rank {strategy.size - 1}.*{kind}1.*fingerprint"
        with pytest.raises(CollectiveMismatchError, match=text):
            strategy.distribute_dataset(HDF5Dataset(mpi_tmp_path / f"{kind}{int(odd)}").batch(4))
        assert len(strategy.distribute_dataset(HDF5Dataset(mpi_tmp_path / f"{kind}1").batch(4))) == 25


@pytest.mark.ranks(2, 3)
def test_ranks_with_different_datasets_are_told(strategy):
    from mpistrat.data import from_arrays
    from mpistrat.errors import CollectiveMismatchError

    rows = from_arrays(np.arange(12))
    for dataset in (
        rows.batch(4 + (strategy.rank == 1)),
        rows.take(12 - (strategy.rank == 1)).batch(4),
        from_arrays(np.arange(12, dtype=np.float32 if strategy.rank == 1 else np.int64)).batch(4),
        rows.shuffle(seed=int(strategy.rank == 1)).batch(4),
    ):
        with pytest.raises(
            CollectiveMismatchError, match=r"(?s)different datasets: ranks? 0.*from_arrays.*rank 1:.*batch"
        ):
            strategy.distribute_dataset(dataset)
    data = strategy.distribute_dataset(rows.map(lambda x: x + 1).batch(4))  # functions have addresses, datasets do not
    assert sum(strategy.comm.allgather(sum(len(batch) for batch in data))) == 12


@pytest.mark.ranks(2, 3)
def test_every_rank_is_told_what_one_rank_cannot_read(strategy, tmp_path):
    """`tmp_path` is each rank's own: rank 1 has a file that is damaged before it is opened."""
    import mpistrat as ms
    from mpistrat.data import HDF5Dataset, write_shards

    path = write_shards(tmp_path, {"x": np.arange(10)}, num_shards=1)[0]
    dataset = HDF5Dataset(path)
    by_function = HDF5Dataset(path).map(lambda row: row["x"], element_spec=ms.data.ArraySpec((), np.int64)).batch(4)
    if strategy.rank == 1:
        path.write_bytes(path.read_bytes()[:100])
    for distribute in (
        lambda: strategy.distribute_dataset(dataset.batch(4)),
        lambda: strategy.distribute_datasets_from_function(lambda context: by_function),
    ):
        with pytest.raises(ms.errors.ShardError, match=("" if strategy.rank == 1 else "rank 1: ") + r".*\.h5"):
            distribute()
    with pytest.raises(ValueError, match=r"Add \.batch"):
        strategy.distribute_dataset(ms.data.from_arrays(np.arange(4)))
    with pytest.raises(TypeError, match=("" if strategy.rank == 1 else "rank 1: ") + ".*iterable"):
        strategy.distribute_datasets_from_function(lambda c: 3 if c.input_pipeline_id == 1 else [np.zeros(1)])
    assert strategy.reduce("SUM", 1.0, axis=None) == strategy.size  # all goes on


@pytest.mark.ranks(2, 3)
def test_digests_are_compared_by_the_ranks_of_a_node_together(strategy, mpi_tmp_path, monkeypatch):
    """Each file by one rank; of one that is damaged all are told."""
    import mpistrat as ms
    from mpistrat.data import HDF5Dataset, write_shards
    from mpistrat.data.shards import files

    compared, digest = [], files.digest_of_file
    monkeypatch.setattr(files, "digest_of_file", lambda path, *args: compared.append(path.name) or digest(path, *args))
    paths = sorted(mpi_tmp_path / f"{number:05d}-of-00004.h5" for number in range(4))
    if strategy.rank == 0:
        write_shards(mpi_tmp_path, {"x": np.arange(20)}, num_shards=4)
    strategy.comm.Barrier()
    for _ in range(2):
        list(strategy.distribute_dataset(HDF5Dataset(mpi_tmp_path, "x").batch(4)))
    dataset = HDF5Dataset(mpi_tmp_path, "x")
    if strategy.rank == 0:
        dataset.rows([0])  # so this one has been looked at, here alone
    list(strategy.distribute_dataset(dataset.batch(4)))
    assert compared == [path.name for path in paths[strategy.rank :: strategy.size]]
    strategy.comm.Barrier()
    if strategy.rank == 0:
        damaged = bytearray(paths[1].read_bytes())
        damaged[-1] ^= 1
        paths[1].write_bytes(damaged)
    strategy.comm.Barrier()
    dataset = HDF5Dataset(mpi_tmp_path, "x").batch(4)
    for distribute in (
        lambda: strategy.distribute_dataset(dataset),
        lambda: strategy.distribute_datasets_from_function(lambda context: HDF5Dataset(mpi_tmp_path, "x").batch(4)),
    ):
        with pytest.raises(ms.errors.ShardError, match="00001-of-00004.h5: expected digest"):
            distribute()
    assert strategy.reduce("SUM", 1.0, axis=None) == strategy.size  # all goes on


FAILING = """
import sys, numpy as np, mpistrat as ms

def careful(x):
    if strategy.rank == 1 and 5 in x:
        raise ZeroDivisionError("at five")
    return x

strategy = ms.MultiWorkerMirroredStrategy()
dataset = ms.data.from_arrays(np.arange(12)).shard(ms.data.SHARD_HINT, ms.data.SHARD_HINT)
if sys.argv[1] == "unknown":
    dataset = dataset.filter(lambda x: True)
dataset = dataset.batch(2).map(careful).with_options(ms.data.Options("hint"))
for batch in strategy.distribute_dataset(dataset):
    strategy.reduce("SUM", float(batch.sum()), axis=None)
print("not reached")
"""


@pytest.mark.parametrize("length", ["known", "unknown"])
def test_a_dataset_that_fails_on_one_rank_ends_the_job(mpi_run, tmp_path, length):
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    result = mpi_run([str(program), length], 2, timeout=30)
    assert result.returncode != 0
    assert "ZeroDivisionError: at five" in result.stderr
    assert "not reached" not in "".join(result.out)
    assert result.seconds < 20
