"""The variables of a strategy, and the arenas that hold them and their gradients."""

from ..arena.arena import Arena, ArenaAllocator
from ..arena.layout import DATA, Grid, Part, Receiver
from .create import create_variable
from .kinds import MirroredVariable, SyncOnReadVariable, make_trainable
from .placement import Placement
from .sharded import ShardedVariable
from .variable import Variable, explain_foreign, variable_creator_scope

__all__ = [
    "DATA",
    "Arena",
    "ArenaAllocator",
    "Grid",
    "MirroredVariable",
    "Part",
    "Placement",
    "Receiver",
    "ShardedVariable",
    "SyncOnReadVariable",
    "Variable",
    "create_variable",
    "explain_foreign",
    "make_trainable",
    "variable_creator_scope",
]
