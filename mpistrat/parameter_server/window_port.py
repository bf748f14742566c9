"""The server's end for workers that read and write its memory themselves, by whichever window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from .layout import LINE, MailboxLayout
from .memory import ServerMemory
from .parts import Assembly, Part
from .transport import Port

__all__ = ["WindowPort"]


@final
class WindowPort(Port):
    """Looks into the slots of its workers.

    Args:
        workers: their numbers.
        layout: of the mailbox.
        mailbox: with this rank's segment.
        deliver: takes a worker, the last part of a message, and the whole payload.
    """

    def __init__(
        self,
        workers: Sequence[int],
        layout: MailboxLayout,
        mailbox: ServerMemory,
        deliver: Callable[[int, Part, np.ndarray], None],
    ) -> None:
        self._layout, self._mailbox, self._deliver = layout, mailbox, deliver
        self._workers = [(worker, layout.posted(worker) // 8, layout.taken(worker) // 8) for worker in workers]
        self._assemblies = {worker: Assembly() for worker in workers}

    def poll(self) -> bool:
        words, mailbox, moved = self._mailbox.words, self._mailbox, False
        mailbox.sync()
        for worker, posted, taken in self._workers:
            if words[posted] > words[taken]:
                mailbox.sync()
                self._take(worker, words[taken])
                words[taken] += 1
                mailbox.sync()
                moved = True
        return moved

    def _take(self, worker: int, number: int) -> None:
        slot, memory = self._layout.slot(worker, number), self._mailbox.own
        part = Part.read(memory, slot)
        payload = self._assemblies[worker].add(part, memory[slot + LINE : slot + LINE + part.nbytes])
        if payload is not None:
            self._deliver(worker, part, payload)

    def acknowledge(self, worker: int, number: int) -> None:
        self._mailbox.words[self._layout.applied(worker) // 8] = number
        self._mailbox.sync()

    def busy(self) -> bool:
        return False
