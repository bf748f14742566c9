"""Publishing of weights outside the owner's memory: copies on each GPU, pieces between nodes."""

from __future__ import annotations

from typing import Any, final

from ..arena.pieces import PieceShare
from ..arena.values import move_like
from ..comm.arrays import on_device_of
from .interface import Publish

__all__ = ["ToDevices", "ToNodes"]


@final
class ToDevices(Publish):
    """A copy on each of the rank's other devices."""

    def commit(self, low: int, high: int, target: Any) -> None:
        for copy in self.arena.copies[1:]:
            with on_device_of(copy):
                copy[low:high] = move_like(target, copy)


class ToNodes(Publish):
    """An exchange between nodes: each updates a piece of a slice, and sends a block while it updates the next."""

    _share: Any = None  # None between steps: referenced memory cannot be freed

    def begin(self) -> None:
        pieces, inter = self.arena.pieces(self.ranges), self.arena.group.inter
        if pieces is not None and inter is not None:
            self._share = self._begin(inter, pieces)

    def _begin(self, inter: Any, pieces: list[list[tuple[int, int]]]) -> Any:
        return PieceShare(inter, self.arena.values, pieces)

    def commit(self, low: int, high: int, target: Any) -> None:
        if self._share is not None:
            self._share.ready(high)

    def finish(self) -> None:
        if self._share is not None:
            self._share.finish()
            self._share = None

    def leave(self) -> None:
        if self._share is not None:
            self._share.leave()
            self._share = None
