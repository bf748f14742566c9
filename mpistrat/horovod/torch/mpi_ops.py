"""The names of Horovod's module of this name: the collectives, and their start and end."""

from __future__ import annotations

from ..errors import HorovodInternalError
from ..process_sets import RankSet as ProcessSet
from ..process_sets import global_process_set
from .basics import *  # noqa: F403
from .calls import *  # noqa: F403

__all__ = ["HorovodInternalError", "ProcessSet", "global_process_set"]
