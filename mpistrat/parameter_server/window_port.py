"""Window port: the server's end of the connection to workers that access its memory through a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from .layout import LINE, MailboxLayout, Place
from .memory import ServerMemory
from .parts import Assembly, Kind, Part
from .staging import HALVES, Staging
from .transport import Port

__all__ = ["WindowPort"]


@final
class WindowPort(Port):
    """Looks into the slots of its workers.

    Args:
        workers: their numbers.
        layout: of the mailbox.
        mailbox: with this rank's segment.
        stagings: of large pushes; it grows.
        places: where the variables lie, by number; it grows.
        slabs: the memory there; it grows.
        server: this server's number.
        deliver: takes a worker, the last part of a message, and the whole payload.
        accepts: takes a worker, and returns whether a push of it may be taken now.
    """

    def __init__(
        self,
        workers: Sequence[int],
        layout: MailboxLayout,
        mailbox: ServerMemory,
        stagings: list[Staging],
        places: list[Place],
        slabs: list[ServerMemory],
        server: int,
        deliver: Callable[[int, Part, np.ndarray], None],
        accepts: Callable[[int], bool],
    ) -> None:
        self._accepts = accepts
        self._mailbox, self._stagings, self._server, self._deliver = mailbox, stagings, server, deliver
        self._places, self._slabs = places, slabs
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
            part = Part.read(memory, slot)
            if part.kind & Kind.ELSEWHERE:
                self._deliver(worker, part._replace(kind=part.kind & ~Kind.ELSEWHERE), self._find(worker, part))
            else:
                payload = assembly.add(part, memory[slot + LINE : slot + LINE + part.nbytes])
                if payload is not None:
                    self._deliver(worker, part, payload)
            words[taken] = number + 1
            sync()
        return found

    def _find(self, worker: int, part: Part) -> np.ndarray:
        """Return a payload that lies whole in other memory."""
        if part.kind & Kind.IN_PLACE:
            place = self._places[part.variable]
            memory, start = self._slabs[place.slab], place.gradient(worker)
        else:
            number, half = divmod(part.offset, HALVES)
            memory, start = self._stagings[number].memory, self._stagings[number].offset(self._server, worker, half)
        memory.sync()
        return memory.own[start : start + part.total]

    def acknowledge(self, worker: int, number: int) -> None:
        self._mailbox.words[self._applied[worker]] = number
        self._mailbox.sync()

    def busy(self) -> bool:
        return False
