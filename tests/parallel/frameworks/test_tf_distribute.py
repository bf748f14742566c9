"""The same calls of tf.distribute and of mpistrat give the same: strategies of one and two devices, values, clusters."""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest

import mpistrat as ms

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: make test-frameworks")

CPUS = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(CPUS[0], [tf.config.LogicalDeviceConfiguration()] * 2)
tf.config.set_visible_devices([], "GPU")

THEIRS = SimpleNamespace(
    distribute=tf.distribute,
    array=tf.constant,
    Variable=tf.Variable,
    Synchronization=tf.VariableSynchronization,
    Aggregation=tf.VariableAggregation,
    Dataset=tf.data.Dataset,
    ClusterSpec=tf.train.ClusterSpec,
    ValueContext=tf.distribute.experimental.ValueContext,
    nn=tf.nn,
    partitioners=tf.distribute.experimental.partitioners,
)
OURS = SimpleNamespace(
    distribute=ms,
    array=np.asarray,
    Variable=ms.Variable,
    Synchronization=ms.VariableSynchronization,
    Aggregation=ms.VariableAggregation,
    Dataset=ms.data.Dataset,
    ClusterSpec=ms.ClusterSpec,
    ValueContext=ms.ValueContext,
    nn=ms.nn,
    partitioners=ms.partitioners,
)
KINDS = {
    "one device": lambda lib: lib.distribute.OneDeviceStrategy("cpu:0"),
    "mirrored on one": lambda lib: lib.distribute.MirroredStrategy(["cpu:0"]),
    "mirrored on two": lambda lib: lib.distribute.MirroredStrategy(["cpu:0", "cpu:1"]),
}
ROWS = np.arange(6, dtype="float32").reshape(2, 3)
OPS = ["SUM", "MEAN", "sum", "Mean"]


def plain(value):
    """Lists and numbers of whatever a call has returned; values of replicas are a dict."""
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if hasattr(value, "values"):
        return {"replicas": [plain(each) for each in value.values]}
    value = value.numpy() if hasattr(value, "numpy") else value
    return value.tolist() if hasattr(value, "tolist") else value


def values(lib, f):
    """What a function makes of each replica's number."""
    return lib.strategy.experimental_distribute_values_from_function(lambda c: lib.array(f(c.replica_id_in_sync_group)))


def rows(lib):
    return values(lib, lambda replica: ROWS + replica)


def uneven(lib):
    return values(lib, lambda replica: np.arange(2 + replica, dtype="float32"))


def integers(lib):
    return values(lib, lambda replica: np.arange(3, dtype="int32") + replica)


def in_replicas(f):
    """A call that each replica makes, with its context and its rows."""
    return lambda lib: lib.strategy.run(lambda x: f(lib.distribute.get_replica_context(), x), args=(rows(lib),))


def in_scope(f):
    def call(lib):
        with lib.strategy.scope():
            return f(lib)

    return call


def variable(lib, synchronization="AUTO", aggregation="NONE"):
    with lib.strategy.scope():
        return lib.Variable(
            lib.array(np.zeros(2, "float32")),
            synchronization=lib.Synchronization[synchronization],
            aggregation=lib.Aggregation[aggregation],
        )


def written_in_replicas(synchronization, aggregation, method):
    def call(lib):
        v = variable(lib, synchronization, aggregation)

        def write():
            number = int(lib.distribute.get_replica_context().replica_id_in_sync_group)
            getattr(v, method)(lib.array(np.full(2, 1 + number, "float32")))

        lib.strategy.run(write)
        return v.read_value()

    return call


def written(synchronization, aggregation, method):
    def call(lib):
        v = variable(lib, synchronization, aggregation)
        getattr(v, method)(lib.array(np.array([4, 8], "float32")))
        return v.read_value()

    return call


def updated(lib):
    v = variable(lib)
    lib.strategy.extended.update(v, lambda w, a: w.assign_add(a), args=(lib.array(np.ones(2, "float32")),))
    return v.read_value()


def from_function(lib):
    told = []

    def make(context):
        size = context.get_per_replica_batch_size(8)
        told.append(
            (context.num_input_pipelines, context.input_pipeline_id, int(context.num_replicas_in_sync), int(size))
        )
        return lib.Dataset.range(8).batch(size)

    return [*lib.strategy.distribute_datasets_from_function(make)], told


def optionals(lib):
    iterator = iter(lib.strategy.experimental_distribute_dataset(lib.Dataset.range(3).batch(2)))
    found = [iterator.get_next_as_optional() for _ in range(3)]
    return [bool(each.has_value()) for each in found], found[0].get_value()


CALLS = {
    "num_replicas_in_sync": lambda lib: lib.strategy.num_replicas_in_sync,
    "get_strategy": in_scope(lambda lib: lib.distribute.get_strategy() is lib.strategy),
    "has_strategy": in_scope(lambda lib: lib.distribute.has_strategy()),
    "has_strategy outside": lambda lib: lib.distribute.has_strategy(),
    "in_cross_replica_context": in_scope(lambda lib: lib.distribute.in_cross_replica_context()),
    "in_cross_replica_context outside": lambda lib: lib.distribute.in_cross_replica_context(),
    "get_replica_context": in_scope(lambda lib: lib.distribute.get_replica_context() is None),
    "reduce an integer": lambda lib: lib.strategy.reduce("MEAN", 3, axis=None),
    "reduce a number": lambda lib: lib.strategy.reduce("MEAN", 2.5, axis=None),
    "gather": lambda lib: [lib.strategy.gather(rows(lib), axis=axis) for axis in (0, 1)],
    "gather uneven": lambda lib: lib.strategy.gather(uneven(lib), axis=0),
    "local results": lambda lib: [*lib.strategy.experimental_local_results(rows(lib))],
    "local results of a number": lambda lib: [*lib.strategy.experimental_local_results(3.0)],
    "run with a nest": lambda lib: lib.strategy.run(lambda d, k=0: d["a"][0] * 2 + k, ({"a": [rows(lib)]},), {"k": 1}),
    "run of nothing": lambda lib: lib.strategy.run(lambda: None),
    "replica_id_in_sync_group": in_replicas(lambda context, x: x * 0 + float(context.replica_id_in_sync_group)),
    "all_gather": in_replicas(lambda context, x: [context.all_gather(x, 0), context.all_gather({"a": x}, 1)]),
    "merge_call": in_replicas(
        lambda context, x: context.merge_call(lambda s, v, axis: s.reduce("MEAN", v, axis=axis), (x,), {"axis": 0})
    ),
    "update": updated,
    "reduce_to": lambda lib: lib.strategy.experimental_local_results(
        lib.strategy.extended.reduce_to(lib.distribute.ReduceOp.SUM, rows(lib), variable(lib))
    )[0],
    "devices": lambda lib: [len(lib.strategy.extended.worker_devices), len(lib.strategy.extended.parameter_devices)],
    "created in scope": lambda lib: lib.strategy.extended.variable_created_in_scope(variable(lib)),
    "dataset": lambda lib: [*lib.strategy.experimental_distribute_dataset(lib.Dataset.range(10).batch(4))],
    "optionals": optionals,
    "dataset from function": from_function,
}
for op in OPS:
    CALLS |= {
        f"reduce {op} {axis}": lambda lib, op=op, axis=axis: lib.strategy.reduce(op, rows(lib), axis=axis)
        for axis in (None, 0, 1, -1, (0, 1))
    }
    CALLS |= {
        f"reduce {op} uneven": lambda lib, op=op: lib.strategy.reduce(op, uneven(lib), axis=0),
        f"reduce {op} integers": lambda lib, op=op: lib.strategy.reduce(op, integers(lib), axis=0),
        f"all_reduce {op}": in_replicas(lambda context, x, op=op: context.all_reduce(op, {"a": x, "b": [x * 2]})),
    }
for kind in ("AUTO", "ON_WRITE", "ON_READ"):
    for how in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        for name in ("assign", "assign_add", "assign_sub"):
            CALLS[f"replicas {name} {kind} {how}"] = written_in_replicas(kind, how, name)
            if kind != "ON_READ":
                CALLS[f"{name} {kind} {how}"] = written(kind, how, name)
    CALLS[f"assign {kind} SUM"] = written(kind, "SUM", "assign")


@functools.cache
def theirs(kind):
    """TensorFlow's strategy: a second one of a process meets collectives of the first."""
    return KINDS[kind](THEIRS)


@pytest.fixture(params=KINDS)
def both(request):
    """TensorFlow's strategy and ours."""
    THEIRS.strategy = theirs(request.param)
    with KINDS[request.param](OURS) as OURS.strategy:
        yield
    del THEIRS.strategy, OURS.strategy


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", CALLS)
def test_a_strategy_s_call(both, name):
    expected, got = plain(CALLS[name](THEIRS)), plain(CALLS[name](OURS))
    assert got == expected


def members(enumeration):
    return {member.name for member in enumeration}


@pytest.mark.ranks(1)
def test_enumerations():
    assert members(OURS.Synchronization) == members(THEIRS.Synchronization)
    assert members(OURS.Aggregation) == members(THEIRS.Aggregation)
    assert members(ms.ReduceOp) >= members(tf.distribute.ReduceOp)
    assert members(ms.InputReplicationMode) == members(tf.distribute.InputReplicationMode)


CONTEXTS = {
    "of one": lambda lib: lib.distribute.InputContext(),
    "of four": lambda lib: lib.distribute.InputContext(2, 1, num_replicas_in_sync=4),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("make", CONTEXTS.values(), ids=CONTEXTS)
def test_input_context(make):
    def told(lib):
        c = make(lib)
        sizes = [c.get_per_replica_batch_size(size) for size in (0, 4, 12)]
        return c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync, sizes

    assert told(OURS) == told(THEIRS)


@pytest.mark.ranks(1)
def test_input_context_of_a_size_that_does_not_fit():
    for lib in (THEIRS, OURS):
        with pytest.raises(ValueError):
            lib.distribute.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(10)


SPECS = [
    {"worker": ["a:1", "b:2"], "ps": ["c:3"]},
    {"worker": {1: "a:1", 3: "b:2"}},
    {"chief": ["z:1"], "worker": ("a:1", "b:1")},
    {},
]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_cluster_spec(spec):
    def told(lib):
        c = lib.ClusterSpec(spec)
        jobs = {job: (c.num_tasks(job), c.task_indices(job), c.job_tasks(job)) for job in c.jobs}
        return c.as_dict(), sorted(c.jobs), bool(c), jobs, lib.ClusterSpec(c).as_dict(), c == lib.ClusterSpec(spec)

    assert told(OURS) == told(THEIRS)


@pytest.mark.ranks(1)
def test_cluster_spec_without_a_job_or_task():
    for lib in (THEIRS, OURS):
        spec = lib.ClusterSpec({"worker": ["a:1"]})
        for call in (lambda c: c.num_tasks("ps"), lambda c: c.task_address("worker", 1), lambda c: c.job_tasks("ps")):
            with pytest.raises(ValueError, match="No such job|No task"):
                call(spec)


CONFIGS = [
    {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}},
    {"cluster": {"worker": ["a:1"], "ps": ["p:1"]}, "task": {"type": "ps", "index": 0}, "rpc_layer": "grpc"},
    {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "0"}},
    {"cluster": {"worker": ["a:1"]}},
    {},
]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("config", CONFIGS, ids=json.dumps)
def test_tf_config(config, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    def told(lib):
        r = lib.distribute.cluster_resolver.TFConfigClusterResolver()
        places = [r.master(), r.master("worker", 0), r.master("worker", 0, rpc_layer="http")]
        return r.cluster_spec().as_dict(), r.task_type, r.task_id, r.rpc_layer or None, places

    assert told(OURS) == told(THEIRS)


@pytest.mark.ranks(1)
def test_resolvers_by_hand():
    def told(lib):
        simple, spec = lib.distribute.cluster_resolver.SimpleClusterResolver, lib.ClusterSpec
        first = simple(spec({"worker": ["a:1"]}), master="m:1", task_type="worker", task_id=0, rpc_layer="grpc")
        second = simple(spec({"worker": ["b:1"], "ps": ["c:1"]}))
        both = lib.distribute.cluster_resolver.UnionResolver(first, second)
        return [(r.cluster_spec().as_dict(), r.master(), r.task_type, r.task_id) for r in (first, second, both)]

    assert told(OURS) == told(THEIRS)


LOSSES = {
    "a vector": lambda lib: lib.nn.compute_average_loss(np.arange(4.0), global_batch_size=8),
    "weights": lambda lib: lib.nn.compute_average_loss(np.ones((4, 3)), np.arange(4.0), global_batch_size=8),
    "a matrix": lambda lib: lib.nn.compute_average_loss(np.ones((4, 3)), global_batch_size=8),
    "one weight": lambda lib: lib.nn.compute_average_loss(np.arange(4.0), 2.0, global_batch_size=8),
    "regularization": lambda lib: lib.nn.scale_regularization_loss(np.float32(3)),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    assert plain(LOSSES[name](OURS)) == plain(LOSSES[name](THEIRS))


PARTITIONERS = {
    "FixedShardsPartitioner": [(3,)],
    "MinSizePartitioner": [(), (4 << 10, 5)],
    "MaxSizePartitioner": [(1000,), (64, 4)],
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", PARTITIONERS)
@pytest.mark.parametrize("shape", [(10,), (10, 4), (1, 5), (100_000, 64), (7, 3, 2)], ids=str)
def test_partitioners(name, shape):
    for arguments in PARTITIONERS[name]:
        expected = getattr(THEIRS.partitioners, name)(*arguments)(tf.TensorShape(shape), tf.float32)
        assert [*getattr(OURS.partitioners, name)(*arguments)(shape, np.dtype("float32"))] == [*expected]


GRADIENTS = np.array([[3.0, 4.0], [-3.0, 0.5]], np.float32)  # of two replicas


def by_norm(gradient):
    return gradient * min(1, 1 / np.linalg.norm(gradient))


CLIPS = {"clipnorm": by_norm, "global_clipnorm": by_norm, "clipvalue": lambda gradient: np.clip(gradient, -1, 1)}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("setting", CLIPS)
def test_clipping_is_of_each_replica_there_and_of_the_sum_here(setting):
    """As the page about tf.distribute says; a step that clips has Keras's numbers."""
    keras, clip = pytest.importorskip("keras"), CLIPS[setting]
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras's optimizers sum over tf.distribute's replicas with TensorFlow only")
    one = (
        tf.distribute.ReductionToOneDevice()
    )  # collectives of TensorFlow are numbered over all strategies of a process
    theirs = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=one)
    with theirs.scope():
        v, optimizer = tf.Variable([0.0, 0.0]), keras.optimizers.SGD(1.0, **{setting: 1.0})
        optimizer.build([v])

    @tf.function
    def run():
        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            optimizer.apply_gradients([(tf.gather(tf.constant(GRADIENTS), replica), v)])

        theirs.run(step)

    run()
    of_each = -sum(map(clip, GRADIENTS))
    np.testing.assert_allclose(v.numpy(), of_each, rtol=1e-6)

    def ours(clips, **settings):
        with ms.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            with strategy.scope():
                w, optimizer = ms.Variable([0.0, 0.0]), ms.optimizers.SGD(1.0, **settings)

            def step():
                gradient = GRADIENTS[ms.get_replica_context().replica_id_in_sync_group]
                optimizer.apply_gradients([(clip(gradient) if clips else gradient, w)])

            strategy.run(step)
            return w.numpy()

    np.testing.assert_allclose(ours(False, **{setting: 1.0}), -clip(GRADIENTS.sum(0)), rtol=1e-6)
    np.testing.assert_allclose(ours(True), of_each, rtol=1e-6)
    assert not np.allclose(of_each, -clip(GRADIENTS.sum(0)))
