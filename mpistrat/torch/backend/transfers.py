"""Messages between two ranks of a group: send, recv, and recv from any rank.

Receives are not posted to MPI: the group stores them in the order of calls and probes for their messages. So lengths and
dtypes are compared: a message ends with the number of its dtype. One of more than 64 KB follows a header with both, and is
received in place. Messages from any source need the probes: between hosts MPICH 5.0.2 loses them if the receive was posted.

A large message only moves while both ranks look for it. So a rank that waits for one transfer moves all, and a thread moves
the others, as when a program calls a collective between `irecv` and `wait`.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import numpy as np
import torch
from torch.futures import Future

from ...base.errors import CollectiveMismatchError, PeerExitError, explain
from ...base.waiting import PeerWait, wait_until
from ...comm.process_group import ProcessGroup
from .exit import end_at_exit
from .unreceived import Unreceived
from .work import OperationWork, seconds_of, torch_error

__all__ = ["Transfers", "array_of", "bytes_of", "copy_back", "dense", "form_of"]

_SHORT = 1 << 16  # bytes of the longest message without a header
_HEAD_BYTES = 9  # of a header: the number of bytes that follow, and the number of their dtype
_FOLLOWS = 1 << 7  # added to the number of a dtype in a header
_LAST_MESSAGES = 0.2  # seconds for messages of a rank that has left
_UNDISTURBED, _LONGEST_PAUSE = (
    0.005,
    0.05,
)  # seconds until the thread looks for a transfer, and at most between two looks


@functools.cache
def _codes() -> dict[torch.dtype, int]:
    """Return the number of each dtype in messages."""
    dtypes = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
    return {dtype: code for code, dtype in enumerate(dict.fromkeys(dtypes))}


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without history and contiguous, on the CPU: its own memory if it is that already."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.is_cpu:
        return plain
    host = torch.empty(
        plain.shape, dtype=plain.dtype, device="cpu", pin_memory=True
    )  # cached by PyTorch for the next one
    return host.copy_(plain)


@final
class _Memory:
    """The memory of a tensor, for NumPy. `Tensor.numpy` would fix the tensor's size, which FSDP changes."""

    def __init__(self, tensor: torch.Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._tensor = tensor  # which must live as long as arrays of this memory
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False), "shape": shape, "typestr": dtype.str, "version": 3
        }  # fmt: skip


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as an array of its shape. Its dtype is one that NumPy has."""
    return _memory_of(tensor, tuple(tensor.shape), _numpy_dtype(tensor.dtype))


def _memory_of(tensor: torch.Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    # By its address: a tensor with one element in an axis is contiguous with any stride there, which no view could keep.
    return np.asarray(_Memory(tensor, shape, dtype)) if tensor.numel() else np.empty(shape, dtype)


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        text = (
            f"tensors of {dtype_name(dtype)} can be moved, not reduced. Reduce a copy, such as tensor.to(torch.float32)"
        )
        raise TypeError(text) from None


def bytes_of(flat: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as a flat uint8 array."""
    return _memory_of(flat, (flat.numel() * flat.element_size(),), np.dtype(np.uint8))


def copy_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a result into a tensor, unless it is the tensor's memory; wait for a copy to a GPU."""
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        with torch.no_grad():
            tensor.detach().copy_(flat)


def form_of(tensor: torch.Tensor) -> str:
    """Describe dtype and shape of a tensor.

    Example:
        >>> form_of(torch.zeros(2, 3))
        'float32 (2, 3)'
    """
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.".

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype)[6:]


@final
class Transfers:
    """The messages of one group. Any thread may call it.

    Args:
        ranks: the group, whose communicator transports the messages.
        threads: True if several threads may call MPI.
        unreceived: receives messages that no rank has received.
    """

    def __init__(self, ranks: ProcessGroup, threads: bool, unreceived: Unreceived) -> None:
        self.ranks, self.comm = ranks, ranks.topology.comm
        self._lock = threading.Lock()
        self._receives: list[ReceiveWork] = []  # without a message, in the order of their calls
        self._threads, self._unreceived = threads, unreceived
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._unfinished: list[_Transfer] = []

    def send(self, tensor: torch.Tensor, target: int, tag: int, seconds: float, line: str) -> SendWork:
        """Start to send a tensor."""
        self._check("dist.send", target, tag)
        flat = dense(tensor)
        data, code = bytes_of(flat), _codes()[flat.dtype]
        messages = [np.append(data, np.uint8(code))] if data.size <= _SHORT else [_head(data.size, code), data]
        self._unreceived.sent = True
        with self._lock:  # prevents another message in between
            requests = [self.comm.Isend([message, _byte()], target, tag) for message in messages]
        what = f"dist.send of {form_of(tensor)} to rank {target}"
        work = SendWork(self, what, [tensor], requests, messages, target, seconds, line)
        self._unreceived.keep(work)
        self._watch(work)
        return work

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int, seconds: float, line: str) -> ReceiveWork:
        """Start to receive a tensor, from any rank if `source` is None."""
        self._check("dist.recv", source, tag)
        sender = "any rank" if source is None else f"rank {source}"
        work = ReceiveWork(self, f"dist.recv of {form_of(tensor)} from {sender}", tensor, source, tag, seconds, line)
        self._unreceived.keep(work)
        with self._lock:
            self._receives.append(work)
        self._watch(work)
        return work

    def _watch(self, work: _Transfer) -> None:
        """Make the thread move a transfer if no rank waits for it soon."""
        if not self._threads:
            return
        with self._changed:
            self._unfinished.append(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_serve, args=(weakref.ref(self), self._changed), name="mpistrat transfers", daemon=True
                )
                self._thread.start()
                end_at_exit(self)
            self._changed.notify()

    def stop(self) -> threading.Thread | None:
        """Tell the thread to end, and return it, if it was started."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify()
        return thread

    def served_by(self, thread: threading.Thread) -> bool:
        """Return True unless a thread was asked to end."""
        return self._thread is thread

    def move(self) -> bool:
        """Move pending transfers; return True while there are more."""
        with self._changed:
            unfinished = list(self._unfinished)
        over = self.ranks.closed
        done = [work for work in unfinished if over or work.is_completed()]
        with self._changed:
            self._unfinished = [work for work in self._unfinished if work not in done]
            return bool(self._unfinished)

    def has_work(self) -> bool:
        """Return True if transfers are pending."""
        return bool(self._unfinished)

    def _check(self, function: str, peer: int | None, tag: int) -> None:
        from mpi4py import MPI

        topology = self.ranks.topology
        if self.ranks.closed or self.comm is None:
            raise RuntimeError(explain(function, "", expected="a group of several ranks", got=f"{topology.size}"))
        if peer is not None and (not 0 <= peer < topology.size or peer == topology.rank):
            expected = f"another rank of the group, 0 <= rank < {topology.size}"
            raise ValueError(explain(function, "", expected=expected, got=repr(peer), rank=topology.rank))
        most = self.comm.Get_attr(MPI.TAG_UB)
        if not 0 <= tag <= most:
            raise ValueError(
                explain(function, "tag", expected=f"0 <= tag <= {most}, the largest of MPI", got=repr(tag))
            )
        if peer is None:
            self.ranks.contacts.update(range(topology.size))
        else:
            self.ranks.contacts.add(peer)
        self.ranks.contacts.discard(topology.rank)

    def forget(self, work: ReceiveWork) -> None:
        """Remove a failed receive from the order."""
        with self._lock:
            if work in self._receives:
                self._receives.remove(work)

    def progress(self) -> None:
        """Look for the messages of the receives in the order of their calls."""
        from mpi4py import MPI

        with self._lock:
            for work in list(self._receives):
                if work.matched:  # by a message found for a later one
                    continue
                status = MPI.Status()
                source = MPI.ANY_SOURCE if work.sender is None else work.sender
                message = self.comm.Improbe(source, work.tag, status)
                if message is not None:
                    found = status.Get_source()
                    first = next(each for each in self._receives if each.accepts(found, work.tag))
                    first.start(message, found, status.Get_count(MPI.BYTE))
            self._receives = [work for work in self._receives if not work.matched]


def _head(nbytes: int, code: int) -> np.ndarray:
    """Return the header of a long message."""
    return np.append(np.array([nbytes], np.int64).view(np.uint8), np.uint8(_FOLLOWS + code))


def _byte() -> Any:
    from mpi4py import MPI

    return MPI.BYTE


def _serve(reference: weakref.ref[Transfers], changed: threading.Condition) -> None:
    """Move the transfers of a group until the group is gone, or the thread is asked to end."""
    own = threading.current_thread()
    while True:
        with changed:
            transfers = reference()
            if transfers is None or not transfers.served_by(own):
                return
            idle = not transfers.has_work()
            del transfers
            if idle and not changed.wait(1.0):
                continue
        pause = _UNDISTURBED
        while not sys.is_finalizing():
            time.sleep(pause)
            transfers = reference()
            if transfers is None or not transfers.served_by(own) or not transfers.move():
                break
            del transfers
            pause = min(2 * pause, _LONGEST_PAUSE)


class _Transfer(OperationWork):
    """A message that is being transferred. MPI moves it while a thread tests it.

    Attributes:
        over: True once MPI no longer uses its memory. A wait that timed out does not end it.
    """

    def __init__(
        self, transfers: Transfers, what: str, tensors: list[torch.Tensor], peers: list[int], seconds: float, line: str
    ) -> None:
        super().__init__(what, tensors)
        self._transfers, self._peers, self._seconds, self._line = transfers, peers, seconds, line
        self._testing, self.over = threading.Lock(), False
        self._thread: threading.Thread | None = None  # waits for the sake of the future

    def _arrived(self) -> bool:
        raise NotImplementedError

    def ended(self) -> bool:
        """Move the message; return True if MPI does not use its memory, or no longer does."""
        with self._testing:
            if not self.over:
                try:
                    self.over = self._arrived()
                except Exception:  # of the message, which has arrived
                    self.over = True
            return self.over

    def _test(self) -> bool:
        """Return True if the transfer has ended; an error of it is its outcome."""
        with self._testing:
            if self._done:
                return True
            try:
                if not self._arrived():
                    return False
                error = None
            except Exception as failure:
                error = torch_error(failure, self._line)
            self.over = True
        self.finish(error)
        return True

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        self._wait(seconds_of(timeout) or self._seconds, lambda: True)
        return super().wait()

    def _wait(self, seconds: float, wanted: Callable[[], bool]) -> None:
        """Wait until the transfer has ended, or is no longer wanted."""
        if not self._test():
            patience = PeerWait(self._transfers.ranks, self.what, self._peers, seconds=seconds)
            try:
                while not self._test() and wanted():
                    patience.pause()
            except PeerExitError as error:  # its last messages may be on the way
                if not wait_until(self._test, _LAST_MESSAGES):
                    raise self._lost(error) from None
            except Exception as error:
                raise self._lost(error) from None

    def _lost(self, error: Exception) -> Exception:
        return torch_error(error, self._line)

    def is_completed(self) -> bool:
        return self._test()

    def get_future(self) -> Future[Any]:
        future = super().get_future()
        if not self._test():
            self._thread = threading.Thread(target=self._wait_for_future, name="mpistrat transfer", daemon=True)
            self._thread.start()
            end_at_exit(self)
        return future

    def stop(self) -> threading.Thread | None:
        """Tell the thread that waits for the future to end, and return it, if it was started."""
        thread, self._thread = self._thread, None
        return thread

    def _wait_for_future(self) -> None:
        own = threading.current_thread()
        try:
            self._wait(self._seconds, lambda: self._thread is own)
        except Exception as error:
            if not self._done:
                self.finish(error)


@final
class SendWork(_Transfer):
    """A send."""

    def __init__(
        self,
        transfers: Transfers,
        what: str,
        tensors: list[torch.Tensor],
        requests: list[Any],
        messages: list[np.ndarray],
        target: int,
        seconds: float,
        line: str,
    ) -> None:
        super().__init__(transfers, what, tensors, [target], seconds, line)
        self._requests, self._messages = requests, messages

    def _arrived(self) -> bool:
        if all(request.Test() for request in self._requests):
            return True
        self._transfers.progress()  # else two ranks that send before they receive wait for each other
        return False


@final
class ReceiveWork(_Transfer):
    """A receive.

    Attributes:
        sender: the expected sender; None for any rank.
        tag: the tag of the message.
        matched: True if its message was found.
    """

    def __init__(
        self,
        transfers: Transfers,
        what: str,
        tensor: torch.Tensor,
        sender: int | None,
        tag: int,
        seconds: float,
        line: str,
    ) -> None:
        topology = transfers.ranks.topology
        peers = [rank for rank in range(topology.size) if rank != topology.rank] if sender is None else [sender]
        super().__init__(transfers, what, [tensor], peers, seconds, line)
        self.sender, self.tag, self.matched = sender, tag, False
        self._tensor, self._flat = tensor, dense(tensor)
        self._request: Any = None
        self._data = np.empty(0, np.uint8)
        self._code: int | None = None  # of the dtype, if a header has it

    def accepts(self, source: int, tag: int) -> bool:
        """Return True if a message of a rank with a tag is for this receive."""
        return not self.matched and self.tag == tag and self.sender in (None, source)

    def start(self, message: Any, source: int, length: int) -> None:
        """Start to receive a found message of `length` bytes, or the one after it."""
        self._data = np.empty(length, np.uint8)
        if length == _HEAD_BYTES:  # MPI sends so few bytes at once, so they have arrived
            message.Recv([self._data, _byte()])
            if self._data[-1] >= _FOLLOWS:
                self._start_long(source)
        else:
            self._request = message.Irecv([self._data, _byte()])
        self.source = source
        self.matched = True  # last: another thread may look

    def _start_long(self, source: int) -> None:
        """Start to receive the data after a header: into the tensor's memory if it fits."""
        self._code, length = int(self._data[-1]) - _FOLLOWS, int(self._data[:8].view(np.int64)[0])
        own = bytes_of(self._flat)
        fits = length == own.size and self._code == _codes()[self._flat.dtype]
        self._data = own if fits else np.empty(length, np.uint8)
        self._request = self._transfers.comm.Irecv([self._data, _byte()], source, self.tag)

    def _arrived(self) -> bool:
        if not self.matched:
            self._transfers.progress()
        if not self.matched or (self._request is not None and not self._request.Test()):
            return False
        own, data, code = bytes_of(self._flat), self._data, self._code
        if code is None:
            data, code = data[:-1], int(data[-1])
        if (data.size, code) != (own.size, _codes()[self._flat.dtype]):
            raise self._other_form(own.size, data.size, code)
        if data.ctypes.data != own.ctypes.data:
            own[:] = data
        copy_back(self._flat, self._tensor)
        return True

    def ended(self) -> bool:
        """Return True also for a receive without a message, whose memory MPI does not use."""
        return not self.matched or super().ended()

    def _other_form(self, expected: int, length: int, code: int) -> CollectiveMismatchError:
        """Return the error of a message that has another length or dtype than the tensor."""
        return CollectiveMismatchError(
            f"rank {self._transfers.ranks.topology.rank}: {self.what}: expected {expected} bytes of"
            f" {dtype_name(self._flat.dtype)}, got {length} bytes of {dtype_name(list(_codes())[code])} from rank"
            f" {self.source}. Send and receive tensors of one size and dtype"
        )

    def _lost(self, error: Exception) -> Exception:
        self._transfers.forget(self)
        return super()._lost(error)
