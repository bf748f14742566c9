"""The strategies, their contexts, and what they save and restore."""

from .central_storage import CentralStorageStrategy
from .default import DefaultStrategy
from .extended import StrategyExtended
from .from_environment import strategy_from_environment
from .loss import compute_average_loss, scale_regularization_loss
from .mirrored import MirroredStrategy
from .multi_worker_mirrored import MultiWorkerMirroredStrategy
from .one_device import OneDeviceStrategy
from .preemption import RESTART_EXIT_CODE, catch_stop_signals
from .replica_context import ReplicaContext, ValueContext
from .scope import set_strategy
from .show_config import show_config
from .strategy import Strategy

__all__ = [
    "RESTART_EXIT_CODE",
    "CentralStorageStrategy",
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ReplicaContext",
    "Strategy",
    "StrategyExtended",
    "ValueContext",
    "catch_stop_signals",
    "compute_average_loss",
    "scale_regularization_loss",
    "set_strategy",
    "show_config",
    "strategy_from_environment",
]
