"""The coordinator: one rank schedules functions, the workers run them (TF: tf.distribute.coordinator)."""

from .client.cluster import RemoteCluster, RemoteObject
from .parameter_server.coordinator.closures import (
    ClosureCancelledError,
    PerWorkerValues,
    RemoteError,
    RemoteTraceback,
    RemoteValue,
    RemoteValueStatus,
)
from .parameter_server.coordinator.coordinator import ClusterCoordinator
from .parameter_server.coordinator.executor import CoordinatorExecutor
from .parameter_server.coordinator.server import Server
from .parameter_server.coordinator.worker import get_current_worker_index

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

PerWorkerValue = PerWorkerValues  # tf.distribute's spellings
experimental_get_current_worker_index = get_current_worker_index
