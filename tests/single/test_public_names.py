"""The names of tf.distribute that programs use are here, under the same name."""

import pytest

import mpistrat as ms

# tf.distribute.X, tf.X, tf.train.X and tf.distribute.experimental.X
PACKAGE = """
    CentralStorageStrategy ClusterSpec
    CommunicationImplementation CommunicationOptions CrossDeviceOps DistributedValues HierarchicalCopyAllReduce
    IndexedSlices InputContext InputOptions InputReplicationMode MirroredStrategy MultiWorkerMirroredStrategy
    NcclAllReduce OneDeviceStrategy ReduceOp
    ReductionToOneDevice ReplicaContext RunOptions Strategy StrategyExtended ValueContext Variable VariableAggregation
    VariableSynchronization cluster_resolver data get_replica_context get_strategy
    has_strategy in_cross_replica_context nn optimizers partitioners
"""
STRATEGY = """
    cluster_resolver distribute_datasets_from_function distribute_dataset extended gather num_replicas_in_sync reduce
    run scope
"""
EXTENDED = """
    batch_reduce_to colocate_vars_with parameter_devices reduce_to update value_container variable_created_in_scope
    worker_devices
"""
REPLICA = "all_gather all_reduce devices merge_call num_replicas_in_sync replica_id_in_sync_group strategy"
RESOLVERS = """
    ClusterResolver ClusterSpec GCEClusterResolver KubernetesClusterResolver KubernetesExecutableLocation
    SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver
    UnionClusterResolver UnionResolver
"""
COORDINATOR = """
    ClusterCoordinator PerWorkerValue PerWorkerValues RemoteValue experimental_get_current_worker_index
    get_current_worker_index
"""
PARTITIONERS = "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner"
TF = """
    CollectiveAllReduceStrategy CollectiveCommunication CollectiveHints experimental_distribute_dataset
    experimental_distribute_values_from_function experimental_local_results experimental_run_v2 experimental_set_strategy
    make_dataset_iterator make_input_fn_iterator unwrap
"""
OPTIMIZERS = "Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion LossScaleOptimizer Momentum Nadam RMSProp SGD"
PLACES = [
    (ms, PACKAGE),
    (ms.Strategy, STRATEGY),
    (ms.StrategyExtended, EXTENDED),
    (ms.ReplicaContext, REPLICA),
    (ms.cluster_resolver, RESOLVERS),
    (ms.coordinator, COORDINATOR),
    (ms.optimizers, OPTIMIZERS),
    (ms.partitioners, PARTITIONERS),
    (ms.tf, TF),
]


@pytest.mark.parametrize(("place", "names"), PLACES, ids=lambda part: getattr(part, "__name__", ""))
def test_names(place, names):
    assert [name for name in names.split() if not hasattr(place, name)] == []


def test_other_spellings_are_the_same_thing():
    coordinator = ms.coordinator
    assert coordinator.PerWorkerValue is coordinator.PerWorkerValues
    assert coordinator.experimental_get_current_worker_index is coordinator.get_current_worker_index


def test_what_is_listed_is_there():
    modules = (ms, ms.cluster_resolver, ms.context, ms.coordinator, ms.data, ms.errors, ms.nn, ms.optimizers, ms.tf)
    for module in (*modules, ms.partitioners):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(set(ms.__all__)) == len(ms.__all__)
