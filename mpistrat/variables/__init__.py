"""The variables of a strategy, and the arenas in which they and their gradients lie."""

from .allocator import ArenaAllocator
from .arena import Arena
from .create import create_variable
from .mirrored_variable import MirroredVariable
from .placement import Placement
from .sharded_variable import ShardedVariable
from .sync_on_read_variable import SyncOnReadVariable
from .variable import Variable, explain_foreign

__all__ = [
    "Arena",
    "ArenaAllocator",
    "MirroredVariable",
    "Placement",
    "ShardedVariable",
    "SyncOnReadVariable",
    "Variable",
    "create_variable",
    "explain_foreign",
]
