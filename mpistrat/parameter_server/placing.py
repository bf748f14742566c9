"""Assignment of new variables to servers: arithmetic that gives the same result on every rank."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..errors import explain

__all__ = ["PLACEMENTS", "Balanced", "Placing", "RoundRobin"]


class Placing(ABC):
    """Gives each new variable, or shard of one, its server. The same calls give the same servers on every rank.

    Args:
        num_servers: how many servers there are.

    Raises:
        ValueError: num_servers < 1.

    Attributes:
        nbytes: what each server has so far, in bytes.
    """

    def __init__(self, num_servers: int) -> None:
        if num_servers < 1:
            raise ValueError(explain(type(self).__name__, "num_servers", expected="≥ 1", got=num_servers))
        self.nbytes = [0] * num_servers

    def __call__(self, shape: Sequence[int], dtype: Any, server: int | None = None) -> int:
        """Return the server of the next variable. Every rank must do it.

        Args:
            shape, dtype: of the variable.
            server: where it must lie; that takes no other variable's turn.
        """
        server = self._next() if server is None else server
        self.nbytes[server] += math.prod(shape) * np.dtype(dtype).itemsize
        return server

    @abstractmethod
    def _next(self) -> int:
        """Return which server's turn it is."""


@final
class RoundRobin(Placing):
    """One server after the other, whatever the sizes (TF: what ParameterServerStrategy does).

    Example:
        >>> placing = RoundRobin(2)
        >>> [placing((size,), "int8") for size in (100, 1, 100, 1)], placing.nbytes
        ([0, 1, 0, 1], [200, 2])
    """

    def __init__(self, num_servers: int) -> None:
        super().__init__(num_servers)
        self._placed = 0

    def _next(self) -> int:
        server = self._placed % len(self.nbytes)
        self._placed += 1
        return server


@final
class Balanced(Placing):
    """The server with the fewest bytes so far; of equals the first.

    Example:
        >>> placing = Balanced(2)
        >>> [placing((size,), "int8") for size in (100, 1, 100, 1)], placing.nbytes
        ([0, 1, 1, 0], [101, 101])
    """

    def _next(self) -> int:
        return min(range(len(self.nbytes)), key=lambda server: self.nbytes[server])


PLACEMENTS: dict[str, type[Placing]] = {"round_robin": RoundRobin, "bytes": Balanced}
