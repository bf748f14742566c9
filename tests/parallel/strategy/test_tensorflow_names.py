"""TensorFlow 1's calls give what the newer ones do, and warn with these."""

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.strategies import STRATEGIES, devices_of, layout_for

STEPS_TOGETHER = [name for name in STRATEGIES if "server" not in name.lower()]


pytestmark = pytest.mark.filterwarnings("ignore:.*TensorFlow's other name:DeprecationWarning")


@pytest.fixture(params=STEPS_TOGETHER)
def strategy(request):
    from mpi4py import MPI

    devices = layout_for(request.param, MPI.COMM_WORLD.size)
    if devices is None:
        pytest.skip("the strategy takes one rank")
    with STRATEGIES[request.param](devices_of(devices, MPI.COMM_WORLD.rank)) as made:
        yield made


def total(strategy, batch):
    return strategy.reduce("SUM", strategy.run(np.sum, args=(batch,)), axis=None)


@pytest.mark.ranks(1, 2, 3)
def test_iterators(strategy):
    rows = strategy.experimental_make_numpy_dataset(np.arange(24.0))
    iterator = strategy.make_dataset_iterator(rows.batch(12))
    sums = [strategy.reduce("SUM", strategy.experimental_run(np.sum, iterator), axis=None) for _ in range(2)]
    assert sums == [66.0, 210.0]
    with pytest.raises(StopIteration):
        strategy.experimental_run(np.sum, iterator)
    found = strategy.experimental_run(lambda: 1)
    assert strategy.reduce("SUM", found, axis=None) == strategy.num_replicas_in_sync


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("mode", [None, ms.InputReplicationMode.PER_WORKER, ms.InputReplicationMode.PER_REPLICA])
def test_iterator_of_a_function(strategy, mode):
    iterator = strategy.make_input_fn_iterator(lambda context: ms.data.from_arrays(np.ones(60)).batch(2), mode)
    batch = iterator.get_next()
    assert total(strategy, batch) == 2 * strategy.num_replicas_in_sync


@pytest.mark.ranks(1, 2, 3)
def test_read_var(strategy):
    with strategy.scope():
        plain = ms.Variable([1.0, 2.0], name="plain")
        several = ms.Variable(
            0.0,
            name="several",
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
    strategy.run(lambda: several.assign(ms.get_replica_context().replica_id_in_sync_group + 1.0))
    n = strategy.num_replicas_in_sync
    assert strategy.extended.read_var(plain).tolist() == [1.0, 2.0]
    assert float(strategy.extended.read_var(several)) == n * (n + 1) / 2
    with pytest.raises(ValueError, match=r"extended\.read_var"):
        strategy.extended.read_var(np.zeros(2))


@pytest.mark.ranks(1, 2)
def test_update_non_slot(strategy):
    extended = strategy.extended
    with strategy.scope():
        v = ms.Variable(0.0, name="v")
    devices = extended.non_slot_devices([v])
    calls = []

    def note(amount, *, times):
        calls.append(ms.context.get_update_replica_id())
        assert ms.get_replica_context() is None
        return amount * times

    assert extended.update_non_slot(devices, note, (2.0,), {"times": 3}, group=False) == [6.0] * len(devices)
    assert calls == list(range(len(devices)))
    grouped = extended.update_non_slot(devices[0], note, (2.0,), {"times": 3})
    assert float(np.asarray(grouped)) == 6.0
    with pytest.raises(ValueError, match="colocate_with"):
        extended.update_non_slot([], note)
    with pytest.raises(ValueError, match="plain or Mirrored"):
        extended.update_non_slot(devices, note, (ms.PerReplica([1.0, 2.0]),))
    with pytest.raises(ms.errors.ContextError):
        strategy.run(lambda: extended.update_non_slot(devices, note))


@pytest.mark.ranks(1, 2, 3)
def test_steps_on_an_iterator(strategy):
    iterator = iter(strategy.distribute_dataset(ms.data.from_arrays(np.arange(36.0)).batch(12)))

    def in_replica(batch, steps):
        steps.set_last_step_output("inner", batch.sum(), "sum")
        return batch.sum()

    def fn(steps, batch):
        found = strategy.extended.call_for_each_replica(in_replica, args=(batch, steps))
        steps.set_last_step_output("outer", found, ms.ReduceOp.SUM)
        steps.set_last_step_output("as it is", steps.last_step_outputs["begin"])

    steps = strategy.extended.experimental_run_steps_on_iterator(fn, iterator, 2, {"begin": 5})
    assert steps.last_step_outputs == {"begin": 5, "inner": 210.0, "outer": 210.0, "as it is": 5}
    with pytest.raises(ValueError, match="reduce_op"):
        strategy.run(lambda: steps.set_last_step_output("x", 1.0))


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("default")
def test_they_warn_with_the_newer_call():
    with ms.OneDeviceStrategy("cpu:0") as strategy:
        with pytest.warns(
            DeprecationWarning, match=r"write ms\.data\.from_arrays\(arrays\), or ms\.tf\.experimental_make"
        ):
            rows = strategy.extended.experimental_make_numpy_dataset(np.zeros(4))
        with pytest.warns(DeprecationWarning, match=r"write iter\(strategy\.distribute_dataset\(dataset\)\)"):
            strategy.make_dataset_iterator(rows.batch(2))
        assert strategy.extended.experimental_require_static_shapes is False


@pytest.mark.ranks(1, 2)
def test_as_functions():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        rows = ms.tf.experimental_make_numpy_dataset(strategy, np.arange(24.0))
        iterator = ms.tf.make_dataset_iterator(strategy, rows.batch(24))
        assert strategy.reduce("SUM", ms.tf.experimental_run(strategy, np.sum, iterator), axis=None) == 276.0
        data = ms.tf.experimental_distribute_dataset(strategy, rows.batch(24))
        found = [ms.tf.experimental_run_v2(strategy, np.sum, args=(batch,)) for batch in data]
        assert strategy.reduce("SUM", found[0], axis=None) == 276.0


@pytest.mark.ranks(1, 2, 3)
def test_one_value_of_all_replicas():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        n, rank = strategy.size, strategy.rank
        values = {"a": np.full(2, rank + 1.0), "b": np.arange(rank + 1.0)}  # rows of unequal number
        same = values | {"b": 0.5}
        for reduction, expected in (
            ("sum", n * (n + 1) / 2),
            ("mean", (n + 1) / 2),
            ("auto", (n + 1) / 2),
            ("first", 1),
        ):
            found = ms.tf.reduce_per_replica(same, strategy, reduction)
            assert found["a"].tolist() == [expected] * 2
            assert found["b"] == (0.5 * n if reduction == "sum" else 0.5)
        found = ms.tf.reduce_per_replica(values, strategy, "concat")
        assert found["a"].tolist() == [one + 1.0 for one in range(n) for _ in range(2)]
        assert found["b"].tolist() == [row for one in range(n) for row in range(one + 1)]
        with pytest.raises(ValueError, match="expected auto, first, sum, mean or concat, got 'last'"):
            ms.tf.reduce_per_replica(values, strategy, "last")


@pytest.mark.ranks(1)
def test_calls_of_tensorflow_1_without_a_meaning_here():
    with ms.OneDeviceStrategy("cpu:0") as strategy:
        assert ms.tf.group(strategy, [1, 2]) is None
        with pytest.raises(NotImplementedError, match=r"Strategy\.configure: .*cluster_resolver=ms\.cluster_resolver"):
            strategy.configure(cluster_spec={"worker": ["a:1"]}, task_type="worker", task_id=0)
        with pytest.raises(
            NotImplementedError, match="update_config_proto: config_proto: expected no session, got a dict"
        ):
            strategy.update_config_proto({})
        rows = ms.data.from_arrays(np.arange(5.0)).apply(ms.tf.map_and_batch(lambda x: 2 * x, 2, drop_remainder=True))
        assert [batch.tolist() for batch in rows.prefetch(buffer_size=None)] == [[0.0, 2.0], [4.0, 6.0]]
