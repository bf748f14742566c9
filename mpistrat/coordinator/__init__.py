"""The coordinator: one rank schedules functions, the workers run them (TF: tf.distribute.coordinator)."""

from .closure import RemoteValue, RemoteValueStatus
from .cluster_coordinator import ClusterCoordinator
from .errors import ClosureCancelledError, RemoteError, RemoteTraceback
from .executor import CoordinatorExecutor
from .follower import get_current_worker_index
from .per_worker import PerWorkerValues
from .server import Server

PerWorkerValue = PerWorkerValues  # tf.distribute's spellings
experimental_get_current_worker_index = get_current_worker_index

__all__ = [
    "ClosureCancelledError",
    "ClusterCoordinator",
    "CoordinatorExecutor",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteError",
    "RemoteTraceback",
    "RemoteValue",
    "RemoteValueStatus",
    "Server",
    "experimental_get_current_worker_index",
    "get_current_worker_index",
]
