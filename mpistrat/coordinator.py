"""The coordinator: one rank schedules functions, the workers run them (TF: tf.distribute.coordinator)."""

from .parameter_server.join import Server
from .remote.client import RemoteCluster
from .remote.coordinator import ClusterCoordinator, CoordinatorExecutor
from .remote.scheduler import (
    ClosureCancelledError,
    PerWorkerValues,
    RemoteError,
    RemoteTraceback,
    RemoteValue,
    RemoteValueStatus,
)
from .remote.worker import get_current_worker_index

__all__ = [
    "ClosureCancelledError",
    "ClusterCoordinator",
    "CoordinatorExecutor",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteCluster",
    "RemoteError",
    "RemoteObject",
    "RemoteTraceback",
    "RemoteValue",
    "RemoteValueStatus",
    "Server",
    "experimental_get_current_worker_index",
    "get_current_worker_index",
]

RemoteObject = RemoteValue  # the name of what a client holds
PerWorkerValue = PerWorkerValues  # tf.distribute's spellings
experimental_get_current_worker_index = get_current_worker_index
