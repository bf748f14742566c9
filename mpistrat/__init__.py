"""mpistrat: tf.distribute for MPI programs. Write one training step, choose a Strategy.

The import starts no MPI and needs no optional library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as _numpy

from . import errors  # now: cloudpickle finds the error classes by this module's name
from .base.context import set_default as _set_default
from .base.errors import check_framework as _check_framework
from .base.lazy import lazy
from .base.version import __version__
from .comm.job_files import expect_end_under_launcher as _expect_end_under_launcher
from .comm.monitor.abort import install_under_launcher as _install_under_launcher
from .strategies import default_frame as _default_frame

if TYPE_CHECKING:
    from . import (
        cluster_resolver,
        context,
        coordinator,
        data,
        estimator,
        lookup,
        nn,
        optimizers,
        partitioners,
        random,
        shadow,
        tf,
        timeline,
        train,
    )
    from . import jax as jax  # optional frameworks, not in __all__
    from . import keras as keras
    from . import torch as torch
    from .base.context import (
        cache_variable_reads,
        get_replica_context,
        has_strategy,
        in_cross_replica_context,
        variable_sync_on_read_context,
    )
    from .base.distributed_values import DistributedValues, Mirrored, PerReplica
    from .base.global_batch import global_batch_size
    from .base.options import CommunicationOptions, LocalSteps, RunOptions
    from .base.random import rng
    from .base.types import (
        CommunicationImplementation,
        IndexedSlices,
        ReduceOp,
        VariableAggregation,
        VariableSynchronization,
    )
    from .cluster import ClusterSpec
    from .context import get_strategy
    from .coordinator import Server
    from .cross_device.auto import AutoAllReduce
    from .cross_device.hierarchical import HierarchicalAllReduce, HierarchicalCopyAllReduce
    from .cross_device.mpi import MpiAllReduce
    from .cross_device.nccl import NcclAllReduce
    from .cross_device.nonblocking import CollectiveRequest
    from .cross_device.ops import CrossDeviceOps
    from .cross_device.ordered import OrderedAllReduce
    from .cross_device.to_one import ReductionToOneDevice
    from .data import InputContext, InputOptions, InputReplicationMode
    from .launcher.multi_process_runner import (
        MultiProcessRunner,
        launch,  # for programs that are not ranks
    )
    from .launcher.survive import survive
    from .parameter_server.strategy import ParameterServerStrategy
    from .remote.client import connect
    from .strategies import strategy_from_environment
    from .strategy import (
        RESTART_EXIT_CODE,
        CentralStorageStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        ReplicaContext,
        Strategy,
        StrategyExtended,
        ValueContext,
        catch_stop_signals,
        set_strategy,
    )
    from .strategy.mesh import Mesh
    from .strategy.mesh_strategy import MeshStrategy
    from .strategy.process_set import ProcessSet
    from .strategy.show_config import show_config
    from .train.monitor import Monitor as monitor
    from .variables import ShardedVariable, Variable, variable_creator_scope
else:
    __getattr__, __dir__ = lazy(
        __name__,
        moved={
            "CollectiveAllReduceStrategy": "tf",
            "CollectiveCommunication": "tf",
            "CollectiveHints": "tf",
            "experimental_set_strategy": "tf",
        },
    )

__all__ = [
    # strategies
    "CentralStorageStrategy",
    "CollectiveRequest",
    "Mesh",
    "MeshStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ProcessSet",
    "Strategy",
    "StrategyExtended",
    "strategy_from_environment",
    "variable_creator_scope",
    # contexts
    "ReplicaContext",
    "ValueContext",
    "cache_variable_reads",
    "context",
    "coordinator",
    "get_replica_context",
    "get_strategy",
    "global_batch_size",
    "has_strategy",
    "in_cross_replica_context",
    "set_strategy",
    "variable_sync_on_read_context",
    "Server",
    # values and variables
    "DistributedValues",
    "IndexedSlices",
    "Mirrored",
    "PerReplica",
    "ShardedVariable",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    # reductions
    "AutoAllReduce",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "HierarchicalAllReduce",
    "HierarchicalCopyAllReduce",
    "MpiAllReduce",
    "NcclAllReduce",
    "OrderedAllReduce",
    "ReduceOp",
    "ReductionToOneDevice",
    # the rest
    "RESTART_EXIT_CODE",
    "catch_stop_signals",
    "connect",
    "ClusterSpec",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "LocalSteps",
    "MultiProcessRunner",
    "RunOptions",
    "__version__",
    "cluster_resolver",
    "data",
    "errors",
    "estimator",
    "launch",
    "lookup",
    "monitor",
    "nn",
    "optimizers",
    "partitioners",
    "random",
    "rng",
    "shadow",
    "show_config",
    "survive",
    "tf",
    "timeline",
    "train",
]

_check_framework("mpistrat", "numpy", _numpy.__version__, "2.0", "older ones wrap integers and round float16 otherwise")
_install_under_launcher()
_expect_end_under_launcher()
_set_default(_default_frame)
