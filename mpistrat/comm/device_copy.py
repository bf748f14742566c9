"""Asynchronous host-to-GPU copies on a separate CUDA stream, while the GPU computes. Not yet run on a GPU."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .arrays import import_cupy, pinned_empty

__all__ = ["DeviceCopy", "Started"]

_KEPT = 16  # pieces of memory of either kind that are kept without a use


@dataclass(frozen=True, eq=False)
class Started:
    """A copy under way: the array on the GPU, and the event of its arrival; None where nothing had to move."""

    array: Any
    arrived: Any = None


class _Loan:
    """One use of a piece of GPU memory: it lives as long as an array or a view over that memory does."""


@dataclass(eq=False)
class _Piece:
    """Memory, host or GPU, and the event after which it may be written again; None for at once."""

    memory: Any
    nbytes: int
    free_after: Any = None
    loan: weakref.ref[_Loan] | None = None


def _fitting(pieces: list[_Piece], nbytes: int) -> _Piece | None:
    """Take the smallest piece that is large enough out of a list."""
    found = min((piece for piece in pieces if piece.nbytes >= nbytes), key=lambda piece: piece.nbytes, default=None)
    if found is not None:
        pieces.remove(found)
    return found


@final
class DeviceCopy:
    """Copies host arrays to one GPU through pinned memory, on a non-blocking stream. Threads may share it.

    Each array gets memory of the GPU that is written again only when no array or view in it is left *and* all that
    the computing thread had begun by then has run: `reclaim` records that moment.

    Args:
        index: which GPU of this rank.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._stream: Any = None
        self._staging: list[_Piece] = []  # pinned host memory
        self._free: list[_Piece] = []
        self._lent: list[_Piece] = []

    def start(self, array: NDArray[Any]) -> Started:
        """Begin to copy an array; it may be changed once this returns.

        What NumPy holds as objects (strings, rows of varying shape) stays where it is.
        """
        if array.dtype.hasobject:
            return Started(array)
        cupy = import_cupy("DeviceCopy")
        with self._lock, cupy.cuda.Device(self._index):
            if array.nbytes == 0:
                return Started(cupy.empty(array.shape, array.dtype))
            if self._stream is None:
                self._stream = cupy.cuda.Stream(non_blocking=True)
            host = self._host_memory(array.nbytes)
            pinned = host.memory[: array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(pinned, array)
            target = self._device_array(cupy, array)
            target.set(pinned, stream=self._stream)
            arrived = cupy.cuda.Event(disable_timing=True)
            arrived.record(self._stream)
            host.free_after = arrived
            self._staging.append(host)
            return Started(target, arrived)

    def _host_memory(self, nbytes: int) -> _Piece:
        arrived = [piece for piece in self._staging if piece.free_after.done]
        found = _fitting(arrived, nbytes)
        if found is not None:
            self._staging.remove(found)
            return found
        for piece in arrived[: max(0, len(self._staging) - _KEPT)]:
            self._staging.remove(piece)
        return _Piece(pinned_empty(nbytes, np.dtype(np.uint8)), nbytes)

    def _device_array(self, cupy: Any, array: NDArray[Any]) -> Any:
        """An array on the GPU in a free piece of memory, which the stream waits for, or in a new one."""
        piece = _fitting(self._free, array.nbytes)
        if piece is None:
            with self._stream:  # the memory pool keeps what a stream has used for that stream
                piece = _Piece(cupy.cuda.alloc(array.nbytes), array.nbytes)
        elif piece.free_after is not None:
            self._stream.wait_event(piece.free_after)
        loan = _Loan()
        piece.loan = weakref.ref(loan)
        self._lent.append(piece)
        memory = cupy.cuda.UnownedMemory(int(piece.memory.ptr), piece.nbytes, loan, self._index)
        return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))

    def finish(self, started: Started) -> Any:
        """Make the current stream wait for a copy, and return the array on the GPU."""
        if started.arrived is not None:
            cupy = import_cupy("DeviceCopy")
            with cupy.cuda.Device(self._index):
                cupy.cuda.get_current_stream().wait_event(started.arrived)
        return started.array

    def reclaim(self) -> None:
        """Take back the memory of arrays that are gone; call it where the work that used them was begun."""
        with self._lock:
            gone = [piece for piece in self._lent if piece.loan is None or piece.loan() is None]
            if not gone:
                return
            cupy = import_cupy("DeviceCopy")
            with cupy.cuda.Device(self._index):
                used = cupy.cuda.Event(disable_timing=True)
                used.record(cupy.cuda.get_current_stream())
                for piece in gone:
                    self._lent.remove(piece)
                    piece.free_after = used
                    self._free.append(piece)
                for piece in self._free[:-_KEPT]:
                    self._stream.wait_event(piece.free_after)  # the pool may give it to this stream's next array
                del self._free[:-_KEPT]
