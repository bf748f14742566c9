"""The coordinator: one rank schedules functions, the workers run them (TF: tf.distribute.coordinator)."""

from .closure import RemoteValue, RemoteValueStatus
from .cluster_coordinator import ClusterCoordinator
from .errors import ClosureCancelledError, RemoteError, RemoteTraceback
from .executor import CoordinatorExecutor
from .follower import get_current_worker_index
from .per_worker import PerWorkerValues

__all__ = [
    "ClosureCancelledError",
    "ClusterCoordinator",
    "CoordinatorExecutor",
    "PerWorkerValues",
    "RemoteError",
    "RemoteTraceback",
    "RemoteValue",
    "RemoteValueStatus",
    "get_current_worker_index",
]
