"""Window transports: load and store on a node, one-sided calls between nodes; one protocol over both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import numpy as np

from ..comm.window import Window
from .gate import ReaderGate
from .layout import LINE, Place
from .memory import ServerMemory
from .parts import Kind, Part, cut
from .rooms import HeldRoom
from .staging import HALVES, Staging
from .transport import Pair, Transport

__all__ = ["OneSidedTransport", "SharedWindowTransport"]


class _WindowTransport(Transport):
    """Reads the server's memory through its gate, and posts parts into its slots; large pushes go into a staging."""

    def __init__(self, pair: Pair, mailbox: ServerMemory, slabs: list[ServerMemory], stagings: list[Staging]) -> None:
        super().__init__(pair)
        self._slabs, self._stagings = slabs, stagings
        self._staged, self._staged_until = 0, [0] * HALVES
        self._mailbox, self._rank = mailbox.window(self.name, pair.server_rank)
        layout, worker = pair.layout, pair.worker
        gate = layout.gate(worker)
        self._gate = ReaderGate(self._mailbox, self._rank, gate, lambda: pair.patience("read"))
        self._header = np.zeros(LINE, np.uint8)
        self._chunk_bytes, self._slots = layout.chunk_bytes, [layout.slot(worker, i) for i in range(layout.slots)]
        self._posted_at, self._taken_at = layout.posted(worker), layout.taken(worker)
        self._applied_at = layout.applied(worker)
        self._slab_of: dict[int, Window] = {}
        self._posted = self._taken = 0
        self._acknowledged = 0
        self._gradients: dict[int, np.ndarray] = {}
        self._settled = 0  # what was posted last that lies there

    @final
    def acknowledged(self) -> int:
        if self._acknowledged < self.pushed:
            self._acknowledged = self._mailbox.get_word(self._rank, self._applied_at)
        return self._acknowledged

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
    def _read(self, place: Place, out: np.ndarray) -> int:
        return self._copy(place, self._slab(place).get, out)

    @final
    def _read_rows(self, place: Place, rows: np.ndarray, out: np.ndarray) -> int:
        return self._copy(place, self._slab(place).get_rows, rows, out)

    def _copy(self, place: Place, get: Callable[..., None], *args: Any) -> int:
        slab = self._slab(place)
        if not place.near:
            return self._gate.read(place.index, slab, place.version, get, self._rank, place.offset, *args)

        def get_newest() -> None:
            get(self._rank, place.room(slab.get_word(self._rank, place.current)), *args)

        return self._gate.read(place.index, slab, place.version, get_newest)

    @final
    def _post(self, message: Part, pieces: Sequence[np.ndarray]) -> None:
        if message.variable in self._gradients and self._lies_there(message, pieces):
            self._post_part(message._replace(kind=message.kind | Kind.IN_PLACE, nbytes=0), ())
            self._settled = self._posted
        elif self._chunk_bytes < message.total <= self._largest_staged():
            self._stage(message, pieces)
        else:
            for part, payload in cut(message, pieces, self._chunk_bytes):
                self._post_part(part, payload)

    @final
    def settle(self) -> None:
        if self._taken < self._settled:
            self._wait_for(self._settled)

    def _lies_there(self, message: Part, pieces: Sequence[np.ndarray]) -> bool:
        """Whether a payload is the worker's gradient of the variable, in the memory for it."""
        own = self._gradients[message.variable].ctypes.data
        return message.kind & ~Kind.ENDS_STEP == Kind.PUSH and pieces[0].ctypes.data == own

    def _post_part(self, part: Part, payload: Sequence[np.ndarray]) -> None:
        mailbox, header, slots = self._mailbox, self._header, self._slots
        if self._posted - self._taken >= len(slots):
            self._wait_for(self._posted - len(slots) + 1)
        slot = slots[self._posted % len(slots)]
        part.write(header)
        puts, at = [(slot, header)], slot + LINE
        for piece in payload:
            puts.append((at, piece))
            at += piece.nbytes
        mailbox.put(self._rank, puts)
        self._posted += 1
        mailbox.put_word(self._rank, self._posted_at, self._posted)

    def _largest_staged(self) -> int:
        return self._stagings[-1].areas[self.pair.server] if self._stagings else 0

    def _stage(self, message: Part, pieces: Sequence[np.ndarray]) -> None:
        """Write a payload whole where the server will apply it, and post a header."""
        number, half = len(self._stagings) - 1, self._staged % HALVES
        self._wait_for(self._staged_until[half])
        staging, pair = self._stagings[number], self.pair
        at, puts = staging.offset(pair.server, pair.worker, half), []
        for piece in pieces:
            puts.append((at, piece))
            at += piece.nbytes
        window, rank = staging.memory.window(self.name, pair.server_rank)
        window.put(rank, puts)
        self._post_part(message._replace(kind=message.kind | Kind.STAGED, offset=number * HALVES + half, nbytes=0), ())
        self._staged += 1
        self._staged_until[half] = self._posted

    def _wait_for(self, count: int) -> None:
        """Wait until the server has taken so many parts."""
        patience = None
        while self._taken < count:
            if patience is not None:
                patience.pause()
            self._taken = self._mailbox.get_word(self._rank, self._taken_at)
            patience = patience or self.pair.patience("push")

    @final
    def _leave(self, passes: int, clock: int) -> None:
        self.publish_clock(clock)
        self._mailbox.put_word(self._rank, self.pair.layout.signed(self.pair.worker), self.pushed)
        self._mailbox.put_word(self._rank, self.pair.layout.left(self.pair.worker), passes)

    def _slab(self, place: Place) -> Window:
        window = self._slab_of.get(place.slab)
        if window is None:
            window = self._slab_of[place.slab] = self._slabs[place.slab].window(self.name, self.pair.server_rank)[0]
        return window


@final
class SharedWindowTransport(_WindowTransport):
    """By load and store in memory that worker and server share."""

    name: ClassVar[str] = "shared_window"

    def __init__(self, pair: Pair, mailbox: ServerMemory, slabs: list[ServerMemory], stagings: list[Staging]) -> None:
        super().__init__(pair, mailbox, slabs, stagings)
        self._rooms: dict[int, HeldRoom] = {}

    def gradient(self, variable: int) -> np.ndarray | None:
        place = self._place(variable, "gradient")
        found = self._gradients.get(variable)
        if found is None and place.near:
            slab: Any = self._slab(place)
            spec, start = place.spec, place.gradient(self.pair.worker)
            if not slab.populate(start, start + spec.nbytes, self._rank):
                return None
            memory = slab.segments[self._rank][start : start + spec.nbytes]
            found = self._gradients[variable] = memory.view(spec.dtype).reshape(spec.shape)
        return found

    def _view(self, place: Place) -> tuple[int, np.ndarray] | None:
        room = self._rooms.get(place.index)
        if room is None:
            slab: Any = self._slab(place)
            room = self._rooms[place.index] = HeldRoom(place, self.pair.worker, slab, self._rank)
        return room.read()


@final
class OneSidedTransport(_WindowTransport):
    """By Get, Put and Accumulate. Needs nothing of the server where the network has them in hardware."""

    name: ClassVar[str] = "one_sided"
