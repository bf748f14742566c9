"""What every strategy promises, on every layout that it accepts. A new strategy adds one line to STRATEGIES."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import VariableAggregation, VariableSynchronization
from mpistrat.errors import ClosedError, CollectiveMismatchError, ContextError, LayoutError
from tests.harness.strategies import devices_of

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def replica_id():
    return ms.get_replica_context().replica_id_in_sync_group


def offset(strategy):
    """The number of this rank's first replica, and of its replicas."""
    return strategy.extended.topology.replica_offset, len(strategy.extended.worker_devices)


def per_replica(strategy, value_of):
    return strategy.distribute_values_from_function(lambda c: value_of(c.replica_id_in_sync_group))


def test_replicas_are_numbered_by_rank_and_device(strategy):
    from mpi4py import MPI

    counts = MPI.COMM_WORLD.allgather(len(strategy.extended.worker_devices))
    first, local = sum(counts[: strategy.rank]), counts[strategy.rank]
    assert strategy.num_replicas_in_sync == sum(counts)
    found = strategy.local_results(strategy.run(replica_id))
    assert found == tuple(range(first, first + local))
    assert strategy.local_results(per_replica(strategy, lambda r: r)) == found
    assert (strategy.rank, strategy.size, strategy.local_rank) == (
        MPI.COMM_WORLD.rank,
        MPI.COMM_WORLD.size,
        strategy.rank,
    )
    assert MPI.Comm.Compare(strategy.comm, MPI.COMM_WORLD) == MPI.CONGRUENT


def test_contexts(strategy):
    def where():
        return ms.has_strategy(), ms.in_cross_replica_context(), ms.get_replica_context() is None

    assert where() == (False, False, False)
    with strategy.scope():
        assert where() == (True, True, True)
        found = strategy.run(lambda: [where(), ms.get_replica_context().merge_call(lambda s: where())])
        for inside, merged in strategy.local_results(found):
            assert inside == (True, False, False)
            assert merged == (True, True, True)


def test_reduce(strategy):
    n = strategy.num_replicas_in_sync
    value = per_replica(strategy, lambda r: np.arange(4) + 4 * r)
    every = np.arange(4 * n).reshape(n, 4)
    assert strategy.reduce("SUM", value, axis=None).tolist() == every.sum(axis=0).tolist()
    assert strategy.reduce("MEAN", value, axis=None).tolist() == every.mean(axis=0).tolist()
    assert strategy.reduce("SUM", value, axis=0) == every.sum()
    assert strategy.reduce("MEAN", value, axis=-1) == every.mean()
    nested = strategy.reduce("MEAN", {"x": value, "y": [per_replica(strategy, float)]}, axis=None)
    assert nested["x"].dtype == np.float64
    assert nested["y"] == [(n - 1) / 2]


def test_mean_of_ragged_values(strategy):
    n = strategy.num_replicas_in_sync
    every = [np.arange(r, dtype=np.float32) for r in range(n)]  # replica 0 has no element
    value = per_replica(strategy, lambda r: every[r])
    if n == 1:
        with pytest.raises(ValueError, match="an element on some replica"):
            strategy.reduce("MEAN", value, axis=0)
    else:
        found = strategy.reduce("MEAN", value, axis=0)
        assert found == np.float32(np.concatenate(every).mean(dtype=np.float64))
        assert type(found) is np.float32


def test_gather(strategy):
    every = [np.full((r % 3, 2), r) for r in range(strategy.num_replicas_in_sync)]
    assert np.array_equal(strategy.gather(per_replica(strategy, lambda r: every[r]), axis=0), np.concatenate(every))


def test_in_a_step(strategy):
    n = strategy.num_replicas_in_sync

    def step():
        ctx, r = ms.get_replica_context(), replica_id()
        return (
            ctx.all_reduce("SUM", {"r": r, "a": np.array([1.0, r])}),
            ctx.all_reduce("MEAN", r),
            ctx.all_gather(np.array([r, -r]), axis=0),
            ctx.broadcast(10 * r, root=n - 1),
        )

    for total, mean, rows, last in strategy.local_results(strategy.run(step)):
        assert total["r"] == n * (n - 1) // 2
        assert total["a"].tolist() == [n, n * (n - 1) / 2]
        assert mean == (n - 1) / 2
        assert rows.tolist() == [sign * r for r in range(n) for sign in (1, -1)]
        assert last == 10 * (n - 1)


def test_merge_call_is_called_once_on_each_rank(strategy):
    _, local = offset(strategy)
    calls = []

    def merge(current, ids):
        calls.append(current)
        return current.reduce("SUM", ids, axis=None)

    n = strategy.num_replicas_in_sync
    found = strategy.local_results(
        strategy.run(lambda: ms.get_replica_context().merge_call(merge, args=(replica_id(),)))
    )
    assert found == (n * (n - 1) // 2,) * local
    assert calls == [strategy]


def test_variables(strategy):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        v = ms.Variable(lambda: np.full((2, 3), 7.0 + strategy.rank), name="v", aggregation=VariableAggregation.SUM)
        r = ms.Variable(
            0, name="r", synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.SUM
        )
    assert v.numpy().tolist() == [[7.0] * 3] * 2  # rank 0's

    def step():
        v.assign_add(np.full((2, 3), float(replica_id())))
        r.assign_add(1)
        return np.int64(r.numpy())

    assert strategy.local_results(strategy.run(step)) == (1,) * len(strategy.extended.worker_devices)
    assert v.numpy().tolist() == [[7 + n * (n - 1) / 2] * 3] * 2
    assert int(r.numpy()) == n
    assert strategy.extended.variables == (v, r)


def test_update(strategy):
    with strategy.scope():
        v = ms.Variable(np.zeros(5), name="v")
    calls = []

    def add(var, amount):
        calls.append(var is v)
        var.assign_add(amount)

    total = strategy.extended.reduce_to("SUM", per_replica(strategy, lambda r: np.full(5, r + 1.0)), v)
    strategy.extended.update(v, add, args=(total,))
    n = strategy.num_replicas_in_sync
    assert calls == [True]
    assert v.numpy().tolist() == [n * (n + 1) / 2] * 5
    if len(strategy.extended.worker_devices) > 1:
        with pytest.raises(ValueError, match="plain or Mirrored"):
            strategy.extended.update(v, add, args=(per_replica(strategy, float),))


def reference(x, y, steps):
    """Linear regression by momentum, in NumPy alone."""
    w, velocity = np.zeros((3, 1)), np.zeros((3, 1))
    for step in range(steps):
        rows = slice(7 * step % 21, 7 * step % 21 + 7)
        gradient = x[rows].T @ (2 * (x[rows] @ w - y[rows])) / 7
        velocity = 0.9 * velocity - 0.1 * gradient
        w = w + velocity
    return w


def train(strategy, steps, x, y, momentum=0.9):
    with strategy.scope():
        w = ms.Variable(np.zeros((3, 1)), name="w")
        optimizer = ms.optimizers.SGD(0.1, momentum=momentum)
    data = strategy.distribute_dataset(ms.data.from_arrays((x, y)).batch(7).repeat())

    def step(inputs, targets):
        error = inputs @ w - targets
        np.matmul(inputs.T, 2 * error / ms.context.global_batch_size(), out=w.grad)
        optimizer.apply_gradients([(w.grad, w)])
        return ms.nn.compute_average_loss((error**2)[:, 0])

    losses = []
    for _, batch in zip(range(steps), data, strict=False):
        losses.append(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None))
    return w, optimizer, losses


def problem():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(21, 3))
    return x, x @ np.array([[1.0], [-2.0], [0.5]]) + 0.01 * rng.normal(size=(21, 1))


def test_training_gives_the_numbers_of_one_process(strategy):
    x, y = problem()
    w, optimizer, losses = train(strategy, 9, x, y)
    assert np.allclose(w.numpy(), reference(x, y, 9), rtol=1e-12, atol=0)
    assert optimizer.iterations == 9
    first = ((y[:7]) ** 2).mean()
    assert losses[0] == pytest.approx(first, rel=1e-12)
    assert all(loss.shape == () for loss in losses)


def test_the_same_layout_gives_the_same_bits(strategy):
    x, y = problem()
    one, _, losses = train(strategy, 4, x.astype(np.float32), y.astype(np.float32))
    two, _, again = train(strategy, 4, x.astype(np.float32), y.astype(np.float32))
    assert one.numpy().tobytes() == two.numpy().tobytes()
    assert losses == again


def test_a_dataset_is_divided(strategy):
    _, local = offset(strategy)
    n = strategy.num_replicas_in_sync
    data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(10)).batch(4))
    seen, sizes = [], []
    for batch in data:
        parts = strategy.local_results(batch)
        assert len(parts) == local
        sizes.append(ms.context.global_batch_size())
        lengths = strategy.gather(ms.PerReplica([np.array([len(part)]) for part in parts]), axis=0)
        assert len(lengths) == n
        assert max(lengths) - min(lengths) <= 1
        seen += strategy.gather(ms.PerReplica(parts), axis=0).tolist()
    assert sizes == [4, 4, 2]
    assert seen == list(range(10))


def test_nests_that_differ_are_told_by_their_keys(strategy):
    if strategy.size == 1:
        return
    odd = strategy.rank == strategy.size - 1
    n = strategy.num_replicas_in_sync

    def named(*names):
        return {name: per_replica(strategy, lambda r: np.ones(1)) for name in names}

    def inside(values):
        return strategy.run(lambda v: ms.get_replica_context().all_reduce("SUM", v), args=(values,))

    calls = {
        "reduce": lambda v: strategy.reduce("SUM", v, axis=None),
        "reduce over an axis": lambda v: strategy.reduce("MEAN", v, axis=0),
        "all_reduce": inside,
        "gather": lambda v: strategy.gather(v, axis=0),
    }
    for call in calls.values():
        for mine, other in [(("loss", "perplexity"), ("accuracy", "loss")), (("b",), ("a",)), (("a", "b"), ("a",))]:
            told = rf"(?s)'{mine[-1]}'.*rank|rank.*'{mine[-1]}'"
            with pytest.raises(CollectiveMismatchError, match=told):
                call(named(*mine) if odd else named(*other))
    total = strategy.reduce("SUM", named("b", "a") if odd else named("a", "b"), axis=None)
    assert {name: float(value[0]) for name, value in total.items()} == {"a": n, "b": n}
    with pytest.raises(CollectiveMismatchError, match=r"\[\*, \*\]"):
        strategy.reduce("SUM", list(named("a", "b" if odd else "a").values()), axis=None)


def test_a_step_knows_the_rows_of_the_batch_that_it_gets(strategy):
    def fours(rows, batch):
        return strategy.distribute_dataset(ms.data.from_arrays(np.full(rows, 4.0)).batch(batch))

    def losses_of(element):
        return float(strategy.reduce("SUM", strategy.run(ms.nn.compute_average_loss, args=(element,)), axis=None))

    def gradient(element):
        part = strategy.run(lambda x: x.sum() / ms.context.global_batch_size(), args=(element,))
        return float(strategy.reduce("SUM", part, axis=None))

    iterator = iter(fours(6, 4))
    ahead = [next(iterator), next(iterator)]
    assert [losses_of(batch) for batch in ahead] == pytest.approx([4.0, 4.0])
    assert [losses_of(a) for a, b in zip(fours(8, 8), fours(2, 2), strict=True)] == pytest.approx([4.0])
    tens = strategy.distribute_dataset(ms.data.from_arrays(np.array([4.0, 4, 10, 4, 4])).batch(3))
    assert [losses_of(batch) for batch in list(tens)] == pytest.approx([6.0, 4.0])
    for batch, expected in zip(tens, [6.0, 4.0], strict=True):
        assert len(list(fours(2, 2))) == 1
        assert (losses_of(batch), gradient(batch)) == pytest.approx((expected, expected))
    made = strategy.distribute_datasets_from_function(
        lambda context: ms.data.from_arrays(np.full(3 - context.input_pipeline_id % 2, 4.0)).batch(2)
    )
    assert [losses_of(batch) for batch in list(made)] == pytest.approx([4.0] * len(made))


def test_datasets_from_a_function(strategy):
    contexts: list[ms.InputContext] = []

    def dataset_fn(context):
        contexts.append(context)
        return [np.full(context.input_pipeline_id + 1, step) for step in range(4)]

    data = strategy.distribute_datasets_from_function(dataset_fn)
    assert contexts == [ms.InputContext(strategy.size, strategy.rank, strategy.num_replicas_in_sync)]
    steps = list(data)
    fewest = min(strategy.comm.allgather(len(strategy.extended.worker_devices)))
    assert len(steps) == -(-4 // fewest)
    rows = sum(len(part) for step in steps for part in strategy.local_results(step))
    assert rows == 4 * (strategy.rank + 1)


def test_a_dataset_function_for_each_replica(strategy):
    first, local = offset(strategy)
    n = strategy.num_replicas_in_sync
    contexts: list[ms.InputContext] = []

    def dataset_fn(context):
        contexts.append(context)
        return ms.data.from_arrays(np.full(context.input_pipeline_id + 1, context.input_pipeline_id)).batch(1)

    options = ms.InputOptions(replication_mode=ms.InputReplicationMode.PER_REPLICA)
    data = strategy.distribute_datasets_from_function(dataset_fn, options)
    assert len(data) == n
    assert contexts == [ms.InputContext(n, first + i, n) for i in range(local)]
    for step, batch in enumerate(data):
        assert ms.context.global_batch_size() == n - step
        assert [part.tolist() for part in strategy.local_results(batch)] == [
            [first + i] if step <= first + i else [] for i in range(local)
        ]
    assert step == n - 1
    with pytest.raises(ValueError, match=r"expected PER_WORKER.*distribute_datasets_from_function"):
        strategy.distribute_dataset(ms.data.from_arrays(np.arange(4)).batch(2), options)


def test_every_worker_reads_everything(strategy):
    local = len(strategy.extended.worker_devices)
    data = ms.data.from_arrays(np.arange(60)).batch(2 * strategy.num_replicas_in_sync)
    steps = list(strategy.distribute_dataset(data.with_options(ms.data.Options("off"))))
    rows = [part.tolist() for step in steps for part in strategy.local_results(step)]
    assert [row for part in rows for row in part] == list(range(60))
    assert [len(part) for part in rows[:local]] == [2] * local


@pytest.mark.parametrize("buffer_size", [0, 3])
def test_iterators(strategy, buffer_size):
    """TF: get_next, get_next_as_optional, element_spec; in a step an error."""
    options = ms.InputOptions(per_replica_buffer_size=buffer_size, fetch_to_device=False)
    dataset = ms.data.from_arrays(np.arange(2 * strategy.num_replicas_in_sync)).batch(strategy.num_replicas_in_sync)
    data = strategy.distribute_dataset(dataset, options)
    iterator = iter(data)
    assert data.element_spec == iterator.element_spec == ms.data.ArraySpec((None,), np.int64)
    with strategy.scope(), pytest.raises(ContextError, match=r"DistributedIterator\.get_next.*replica context"):
        strategy.run(lambda: next(iterator))
    first = offset(strategy)[0]
    parts = [part.tolist() for part in strategy.local_results(iterator.peek())]
    assert parts == [part.tolist() for part in strategy.local_results(iterator.get_next())]
    assert parts == [[first + i] for i in range(len(parts))]
    state = iterator.state()
    assert iterator.get_next_as_optional().has_value()
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(StopIteration):
        iterator.get_next()
    iterator.restore(state)
    assert sum(1 for _ in iterator) == 1
    stats = data.stats()
    assert (stats.steps, stats.samples) == (3, 3 * len(parts))
    assert 0 < stats.input_bound <= 1


def test_save_and_restore_into_another_strategy(strategy, tmp_path):
    x, y = problem()
    folder = str(tmp_path) if strategy.rank == 0 else ""
    path = strategy.extended.process_group.topology.comm.bcast(folder) + "/x.h5"
    w, optimizer, _ = train(strategy, 3, x, y)
    strategy.save(path)
    value = w.numpy()
    with ms.MultiWorkerMirroredStrategy(devices=devices_of("uneven", strategy.rank)) as other:
        v, second, _ = train(other, 1, x, y)
        other.restore(path)
        assert np.array_equal(v.numpy(), value)
        assert second.iterations == 3
        mine, theirs = optimizer.slots(w), second.slots(v)
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_an_exception_in_a_step(strategy):
    def step():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        strategy.run(step)
    assert not ms.has_strategy()
    assert strategy.reduce("SUM", strategy.run(lambda: 1), axis=None) == strategy.num_replicas_in_sync


def test_use_after_close(strategy):
    with strategy.scope():
        v = ms.Variable(1.0)
    strategy.close()
    for act in (v.numpy, lambda: strategy.run(int), lambda: strategy.reduce("SUM", 1.0, axis=None)):
        with pytest.raises(ClosedError):
            act()


def test_a_strategy_that_does_not_fit(strategy):
    if strategy.size == 1:
        pytest.skip("every strategy fits one rank")
    with pytest.raises(LayoutError, match="What fits: MirroredStrategy"):
        ms.OneDeviceStrategy("cpu:0")


def test_variables_in_reductions(strategy):
    """An ON_READ variable stands for the replicas' copies; an ON_WRITE one is the same on all, and has no SUM."""
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        count = ms.Variable(
            np.zeros(2), synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.SUM
        )
        own = ms.Variable([0.0], synchronization=VariableSynchronization.ON_READ)
        weights = ms.Variable(np.array([1.0, 3.0]))

    def step():
        count.assign(np.array([1.0, replica_id()]))
        own.assign([replica_id()])
        ctx = ms.get_replica_context()
        return ctx.all_reduce("SUM", {"count": count, "weights": weights}), ctx.all_gather(own, 0)

    total = [replicas, sum(range(replicas))]
    for sums, ids in strategy.local_results(strategy.run(step)):
        assert sums["count"].tolist() == total
        assert sums["weights"].tolist() == [replicas, 3 * replicas]
        assert ids.tolist() == list(range(replicas))
    assert strategy.reduce("SUM", count, axis=None).tolist() == total
    assert strategy.reduce("MEAN", [count], axis=0)[0] == sum(total) / (2 * replicas)
    assert strategy.extended.reduce_to("SUM", count, "cpu:0").tolist() == total
    assert strategy.extended.batch_reduce_to("SUM", [(count, "cpu:0")])[0].tolist() == total
    assert strategy.gather(own, 0).tolist() == list(range(replicas))
    assert np.asarray(strategy.local_results(strategy.reduce("MEAN", weights, axis=None))[0]).tolist() == [1.0, 3.0]
    if replicas > 1:
        for axis in (None, 0):
            with pytest.raises(ValueError, match="same on every replica"):
                strategy.reduce("SUM", weights, axis=axis)
