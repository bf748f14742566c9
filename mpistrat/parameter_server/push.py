"""Push: the message that a server's handler receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Handler", "Push"]


class Push(NamedTuple):
    """What a worker sent to a server: a whole variable, rows of one, or a commit, which carries a number only.

    Attributes:
        worker: who sent it, counted from 0.
        variable: its number; -1 for a commit.
        number: of the push; a commit that came with a push has the push's.
        what: an integer from the worker, which nothing on the way reads.
        version: of the variable, from the worker: the one that it had read before; -1 for none.
        rows: int64 numbers of rows, each once and ascending unless the worker sent them as they were; None for a whole
            variable and for a commit.
        values: of the variable's dtype, whole or one entry for each row; None for a commit. Read-only, as are `rows`,
            and both valid during the call only.
    """

    worker: int
    variable: int
    number: int
    what: int = 0
    version: int = 0
    rows: np.ndarray | None = None
    values: np.ndarray | None = None


# What a server does with pushes. A handler that returns False has kept the push for later: it counts as applied when
# `Server.acknowledge` says so.
Handler = Callable[[Push], Any]
