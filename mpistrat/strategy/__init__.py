"""The strategies, their contexts, and what they save and restore."""

from ..environment import RESTART_EXIT_CODE
from .contexts import ReplicaContext, ValueContext
from .extended import StrategyExtended
from .loss import compute_average_loss, scale_regularization_loss
from .mesh import Mesh
from .mesh_strategy import MeshStrategy
from .preemption import catch_stop_signals
from .show_config import show_config
from .strategy import Strategy
from .synchronous import (
    CentralStorageStrategy,
    DefaultStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    set_strategy,
    strategy_from_environment,
)

__all__ = [
    "RESTART_EXIT_CODE",
    "CentralStorageStrategy",
    "DefaultStrategy",
    "Mesh",
    "MeshStrategy",
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
