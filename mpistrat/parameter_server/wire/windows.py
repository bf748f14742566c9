"""Windows: load and store on a node, one-sided calls between nodes, by one protocol: the worker's end, and the server's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from ...base import loops
from ...comm.window import Window
from ..layout import HALVES, LINE, Address, SharedMemory
from ..server.atomic_reads import HeldSnapshot, SeqLockReader
from .fragments import Assembly, Fragment, MessageKind, cut
from .transport import Pair, Port, Transport

if TYPE_CHECKING:
    from ..server.server import VariableServer

__all__ = ["OneSidedTransport", "SharedWindowTransport", "WindowPort"]

_WAITS = 20  # for posts of workers of this node, at most 50 µs each, before a server sleeps


class _WindowTransport(Transport):
    """A transport that reads through the seqlock, and posts fragments into the server's slots; large pushes are staged."""

    def __init__(self, pair: Pair, memory: SharedMemory) -> None:
        super().__init__(pair)
        self._slabs, self._stagings = memory.slabs, memory.stagings
        self._staged, self._staged_until = 0, [0] * HALVES
        self._mailbox, self._rank = memory.mailbox.window(self.name, pair.server_rank)
        layout, worker = pair.layout, pair.worker
        announced = layout.announced(worker)
        self._seqlock = SeqLockReader(self._mailbox, self._rank, announced, lambda: self.pair.wait_for_server("read"))
        self._header = np.zeros(LINE, np.uint8)
        self._chunk_bytes, self._slots = layout.chunk_bytes, [layout.slot(worker, i) for i in range(layout.slots)]
        self._posted_at, self._taken_at = layout.posted(worker), layout.taken(worker)
        self._applied_at = layout.applied(worker)
        self._slab_of: dict[int, Window] = {}
        self._posted = self._taken = 0
        self._acknowledged = 0
        self._gradients: dict[int, np.ndarray] = {}
        self._settled = 0  # the last post from that memory

    @final
    def acknowledged(self) -> int:
        if self._acknowledged < self.pushed:
            self._acknowledged = self._mailbox.get_word(self._rank, self._applied_at)
        return self._acknowledged

    @final
    def _waited_shortly(self) -> bool:
        return self._mailbox.await_word(self._rank, self._applied_at, self.pushed)

    @final
    def publish_clock(self, steps: int) -> None:
        self._mailbox.put_word(self._rank, self.pair.layout.clock(self.pair.worker), steps)

    @final
    def clocks(self) -> np.ndarray:
        layout = self.pair.layout
        lines = np.zeros((layout.workers, LINE // 8), np.int64)
        self._mailbox.sync()
        self._mailbox.get(self._rank, 0, lines.reshape(-1).view(np.uint8))
        return lines[:, layout.clock(0) // 8].copy()

    @final
    def _read(self, address: Address, out: np.ndarray) -> int:
        slab = self._slab_of.get(address.slab) or self._slab(address)
        if not address.near:
            return self._seqlock.read_bytes(address, slab, out)
        return self._copy(address, slab, slab.get, out)

    @final
    def _read_rows(self, address: Address, rows: np.ndarray, out: np.ndarray) -> int:
        slab = self._slab(address)
        return self._copy(address, slab, slab.get_rows, rows, out)

    def _copy(self, address: Address, slab: Window, get: Callable[..., None], *args: Any) -> int:
        if not address.near:
            return self._seqlock.read(address.index, slab, address.version, get, self._rank, address.offset, *args)

        def get_newest() -> None:
            get(self._rank, address.buffer(slab.get_word(self._rank, address.current)), *args)

        return self._seqlock.read(address.index, slab, address.version, get_newest)

    @final
    def _post(self, message: Fragment, payload: Sequence[np.ndarray]) -> None:
        if message.total <= self._chunk_bytes:
            self._post_fragment(message, payload)
        elif message.variable in self._gradients and self._lies_there(message, payload):
            self._post_fragment(message._replace(kind=message.kind | MessageKind.IN_PLACE, nbytes=0), ())
            self._settled = self._posted
        elif message.total <= self._largest_staged():
            self._stage(message, payload)
        else:
            for fragment, part in cut(message, payload, self._chunk_bytes):
                self._post_fragment(fragment, part)

    @final
    def settle(self) -> None:
        if self._taken < self._settled:
            self._wait_for(self._settled)

    def _lies_there(self, message: Fragment, payload: Sequence[np.ndarray]) -> bool:
        """Return whether a payload is the worker's gradient of the variable, in its shared memory."""
        own = self._gradients[message.variable].ctypes.data
        return message.kind & ~MessageKind.ENDS_STEP == MessageKind.PUSH and payload[0].ctypes.data == own

    def _post_fragment(self, fragment: Fragment, payload: Sequence[np.ndarray]) -> None:
        mailbox, header, slots = self._mailbox, self._header, self._slots
        if self._posted - self._taken >= len(slots):
            self._wait_for(self._posted - len(slots) + 1)
        slot = slots[self._posted % len(slots)]
        fragment.write(header)
        puts, at = [(slot, header)], slot + LINE
        for buffer in payload:
            puts.append((at, buffer))
            at += buffer.nbytes
        mailbox.publish(self._rank, puts, self._posted_at, self._posted + 1)
        self._posted += 1

    def _largest_staged(self) -> int:
        return self._stagings[-1].areas[self.pair.server] if self._stagings else 0

    def _stage(self, message: Fragment, payload: Sequence[np.ndarray]) -> None:
        """Write a whole payload into the staging, and post a header."""
        number, half = len(self._stagings) - 1, self._staged % HALVES
        self._wait_for(self._staged_until[half])
        staging, pair = self._stagings[number], self.pair
        at, puts = staging.offset(pair.server, pair.worker, half), []
        for buffer in payload:
            puts.append((at, buffer))
            at += buffer.nbytes
        staging.memory.window(self.name, pair.server_rank)[0].put(self._rank, puts)
        self._post_fragment(
            message._replace(kind=message.kind | MessageKind.STAGED, offset=number * HALVES + half, nbytes=0), ()
        )
        self._staged += 1
        self._staged_until[half] = self._posted

    def _wait_for(self, count: int) -> None:
        wait = None
        if self._taken < count:
            self._mailbox.await_word(self._rank, self._taken_at, count)
        while self._taken < count:
            if wait is not None:
                wait.pause()
            self._taken = self._mailbox.get_word(self._rank, self._taken_at)
            wait = wait or self.pair.wait_for_server("push")

    @final
    def _leave(self, passes: int, clock: int) -> None:
        self.publish_clock(clock)
        self._mailbox.put_word(self._rank, self.pair.layout.signed(self.pair.worker), self.pushed)
        self._mailbox.put_word(self._rank, self.pair.layout.left(self.pair.worker), passes)

    def _slab(self, address: Address) -> Window:
        window = self._slab_of.get(address.slab)
        if window is None:
            window = self._slab_of[address.slab] = self._slabs[address.slab].window(self.name, self.pair.server_rank)[0]
        return window


@final
class SharedWindowTransport(_WindowTransport):
    """A transport by load and store in memory that worker and server share."""

    name: ClassVar[str] = "shared_window"

    def __init__(self, pair: Pair, memory: SharedMemory) -> None:
        super().__init__(pair, memory)
        self._held: dict[int, HeldSnapshot] = {}

    def gradient(self, variable: int) -> np.ndarray | None:
        address = self._address(variable, "gradient")
        found = self._gradients.get(variable)
        if found is None and address.near:
            slab: Any = self._slab(address)
            spec, start = address.spec, address.gradient(self.pair.worker)
            if not slab.populate(start, start + spec.nbytes, self._rank):
                return None
            memory = slab.segments[self._rank][start : start + spec.nbytes]
            found = self._gradients[variable] = memory.view(spec.dtype).reshape(spec.shape)
        return found

    def _view(self, address: Address) -> tuple[int, np.ndarray] | None:
        snapshot = self._held.get(address.index)
        if snapshot is None:
            slab: Any = self._slab(address)
            snapshot = self._held[address.index] = HeldSnapshot(address, self.pair.worker, slab, self._rank)
        return snapshot.read()


@final
class OneSidedTransport(_WindowTransport):
    """A transport by Get, Put and Accumulate. It needs no help of the server if the network has them in hardware."""

    name: ClassVar[str] = "one_sided"


@final
class WindowPort(Port):
    """A port that polls the slots of its workers.

    Args:
        server: of the port.
        workers: their numbers.
        memory: with this rank's segments.
    """

    def __init__(self, server: VariableServer, workers: Sequence[int], memory: SharedMemory) -> None:
        layout = memory.layout
        self._accepts, self._server, self._deliver = server.accepts, server.index, server.deliver
        self._mailbox, self._stagings = memory.mailbox, memory.stagings
        self._addresses, self._slabs = memory.addresses, memory.slabs
        self._workers = [
            (
                worker,
                layout.posted(worker) // 8,
                layout.taken(worker) // 8,
                [layout.slot(worker, i) for i in range(layout.slots)],
                Assembly(),
            )
            for worker in workers
        ]
        self._applied = {worker: layout.applied(worker) // 8 for worker in workers}
        words = [(layout.posted(worker), layout.taken(worker)) for worker in workers]
        self._words = tuple(itertools.chain.from_iterable(words))
        if memory.mailbox.remote is None and loops.used()[0]:  # stores are visible without MPI's help
            self.patience = _WAITS

    def give_way(self) -> None:
        if not (self.patience == _WAITS and loops.await_difference(self._mailbox.own, self._words)):
            super().give_way()

    def poll(self) -> int:
        words, memory, sync, found = self._mailbox.words, self._mailbox.own, self._mailbox.sync, 0
        sync()
        for worker, posted, taken, slots, assembly in self._workers:
            number = words[taken]
            if words[posted] == number or not self._accepts(worker):
                continue
            found += words[posted] - number
            sync()
            slot = slots[number % len(slots)]
            fragment = Fragment.read(memory, slot)
            if fragment.kind & MessageKind.ELSEWHERE:
                self._deliver(
                    worker, fragment._replace(kind=fragment.kind & ~MessageKind.ELSEWHERE), self._find(worker, fragment)
                )
            else:
                payload = assembly.add(fragment, memory[slot + LINE : slot + LINE + fragment.nbytes])
                if payload is not None:
                    self._deliver(worker, fragment, payload)
            words[taken] = number + 1
            sync()
        return found

    def _find(self, worker: int, fragment: Fragment) -> np.ndarray:
        """Return a payload in other memory than the slots."""
        if fragment.kind & MessageKind.IN_PLACE:
            address = self._addresses[fragment.variable]
            memory, start = self._slabs[address.slab], address.gradient(worker)
        else:
            number, half = divmod(fragment.offset, HALVES)
            memory, start = self._stagings[number].memory, self._stagings[number].offset(self._server, worker, half)
        memory.sync()
        return memory.own[start : start + fragment.total]

    def acknowledge(self, worker: int, number: int) -> None:
        self._mailbox.words[self._applied[worker]] = number
        self._mailbox.sync()

    def busy(self) -> bool:
        return False
