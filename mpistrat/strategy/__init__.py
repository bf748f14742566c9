"""The strategies, their contexts, and their files."""

from ..base.environment import RESTART_EXIT_CODE
from .contexts import ReplicaContext, ValueContext
from .extended import StrategyExtended
from .preemption import catch_stop_signals
from .strategy import Strategy
from .synchronous import (
    CentralStorageStrategy,
    DefaultStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    set_strategy,
)

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
    "set_strategy",
]
