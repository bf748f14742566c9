"""A server: its variables, who may write them when, and the loop that applies what workers push."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import final

import numpy as np

from ..comm.process_group import ProcessGroup
from ..errors import PeerExitError, explain
from .gate import WriterGate
from .layout import LINE, MailboxLayout, Place
from .memory import ServerMemory
from .parts import Kind, Part
from .push import Handler, Push
from .transport import Port
from .waiting import Backoff

__all__ = ["Server"]

_CHECK = 0.1  # seconds between two looks after workers that have gone


@final
class Server:
    """The variables of one server and its loop. `ParameterServers` makes it. Not collective, all of it; one thread.

    Attributes:
        index: among the servers.
        back_off: seconds of the longest sleep while nothing comes.
        passes: how many passes have begun.
        applied: for each worker the number of its last push that is applied, as are all before it.
    """

    def __init__(
        self,
        group: ProcessGroup,
        index: int,
        worker_ranks: Sequence[int],
        layout: MailboxLayout,
        places: list[Place],
        mailbox: ServerMemory,
        slabs: list[ServerMemory],
        readers: Sequence[int],
        progress: Callable[[], object],
        back_off: float,
    ) -> None:
        """Args as the attributes; `readers` are the workers that read this rank's memory themselves."""
        self.index, self.back_off, self.passes = index, back_off, 0
        self.applied = [0] * layout.workers
        self._group, self._worker_ranks, self._layout = group, tuple(worker_ranks), layout
        self._places, self._mailbox, self._slabs, self._progress = places, mailbox, slabs, progress
        self._gate = WriterGate(mailbox.words, [layout.gate(w) for w in readers], mailbox.sync, progress)
        self._ports: list[Port] = []
        self._port_of: dict[int, Port] = {}
        self._received = [0] * layout.workers
        self._handler: Handler | None = None

    def add_port(self, port: Port, workers: Sequence[int]) -> None:
        """Serve workers by a port. `ParameterServers` calls it."""
        self._ports.append(port)
        self._port_of.update(dict.fromkeys(workers, port))

    # variables

    def array(self, variable: int) -> np.ndarray:
        """Return a read-only view of a variable. Not collective."""
        array = self._view(self._own(variable, "Server.array"))
        array.flags.writeable = False
        return array

    def version(self, variable: int) -> int:
        """Return how often a variable was written. Not collective."""
        place = self._own(variable, "Server.version")
        return self._slabs[place.slab].words[place.version // 8] >> 1

    @contextmanager
    def writing(self, variable: int) -> Iterator[np.ndarray]:
        """Give a writable view of a variable for the time of the context; nobody reads a half of what it writes.

        An error inside leaves the variable closed to readers, because it may be half written. Not collective.
        """
        place = self._own(variable, "Server.writing")
        slab, word = self._slabs[place.slab], place.version // 8
        self._gate.wait(place.index, place.spec.nbytes)
        slab.words[word] += 1
        slab.sync()
        yield self._view(place)
        slab.sync()
        slab.words[word] += 1
        slab.sync()

    def fetch_and_add(self, counter: int, value: int) -> int:
        """Add to a counter, atomically, and return what it was. Not collective."""
        place = self._own(counter, "Server.fetch_and_add", counter=True)
        slab = self._slabs[place.slab]
        found = slab.atomic(self._group.topology.rank)
        if found is not None:  # never by a plain store: workers may be adding, too
            return found[0].fetch_and_add(found[1], place.offset, value)
        before = slab.words[place.offset // 8]
        slab.words[place.offset // 8] = before + value
        return before

    def clocks(self) -> np.ndarray:
        """Return the finished steps of every worker that has published them; int64. Not collective."""
        self._mailbox.sync()
        words, layout = self._mailbox.words, self._layout
        return np.array([words[layout.clock(w) // 8] for w in range(layout.workers)], np.int64)

    # the loop

    def serve(self, handler: Handler) -> None:
        """Apply what workers push until every worker has signed off from this pass. Not collective.

        Args:
            handler: what to do with pushes.

        Raises:
            PeerExitError: a worker has left the program without signing off.
        """
        self.passes += 1
        self._handler = handler
        backoff, check, readers = Backoff(self.back_off), monotonic() + _CHECK, 0
        while True:
            self._progress()
            left = self._all_left()
            moved = [port.poll() for port in self._ports]
            if any(moved):
                backoff.reset()
            elif left and not any(port.busy() for port in self._ports):
                return
            else:
                reading = self._gate.readers()
                if reading != readers:  # who reads by one-sided calls may need this rank
                    readers = reading
                    backoff.reset()
                if backoff.pause() and monotonic() > check:
                    check = monotonic() + _CHECK
                    self._check_workers()

    def acknowledge(self, worker: int, number: int) -> None:
        """Say that a worker's pushes up to a number are applied, after a handler kept some. Not collective."""
        if not self.applied[worker] <= number <= self._received[worker]:
            expected = f"{self.applied[worker]} <= number <= {self._received[worker]}"
            raise ValueError(explain("Server.acknowledge", "number", expected=expected, got=number))
        self.applied[worker] = number
        self._port_of[worker].acknowledge(worker, number)

    def deliver(self, worker: int, part: Part, payload: np.ndarray) -> None:
        """Apply a push if it has not come before. The ports call it. Not collective."""
        expected = self._received[worker] + 1
        if part.number < expected:
            return
        if part.number > expected:
            raise RuntimeError(f"push {part.number} of worker {worker} came where {expected} was to come")
        self._received[worker] = part.number
        applied = self._apply(worker, part, payload)
        if applied and self.applied[worker] == part.number - 1:  # nothing before it is kept
            self.acknowledge(worker, part.number)

    def _apply(self, worker: int, part: Part, payload: np.ndarray) -> bool:
        """Call the handler; return whether it has applied the push."""
        if self._handler is None:
            raise RuntimeError("Server: a push came, and there is no handler")
        applied = True
        if part.kind != Kind.COMMIT:
            applied = self._handler(self._push(worker, part, payload)) is not False
        if part.kind == Kind.COMMIT or part.kind & Kind.ENDS_STEP:
            commit = Push(worker, -1, part.number, part.what, part.version)
            applied = self._handler(commit) is not False and applied
        return applied

    def _push(self, worker: int, part: Part, payload: np.ndarray) -> Push:
        spec = self._own(part.variable, "Server").spec
        payload.flags.writeable = False
        rows, shape = None, spec.shape
        if part.kind & ~Kind.ENDS_STEP == Kind.PUSH_ROWS:
            rows, payload = payload[: 8 * part.rows].view(np.int64), payload[8 * part.rows :]
            shape = (part.rows, *shape[1:])
        values = payload.view(spec.dtype).reshape(shape)
        return Push(worker, part.variable, part.number, part.what, part.version, rows, values)

    def left(self, worker: int) -> int:
        """Return how many passes a worker has signed off from. Not collective."""
        return self._mailbox.words[self._layout.left(worker) // 8]

    def _all_left(self) -> bool:
        words, passes = self._mailbox.words, self.passes
        step, first = LINE // 8, self._layout.left(0) // 8
        return all(words[first + worker * step] >= passes for worker in range(self._layout.workers))

    def _check_workers(self) -> None:
        for worker, rank in enumerate(self._worker_ranks):
            if self._group.has_left(rank) and self.left(worker) < self.passes:
                raise PeerExitError(
                    f"worker {worker} (rank {rank}) left the program without signing off from pass {self.passes} of "
                    f"server {self.index} (rank {self._group.topology.rank})"
                )

    def _view(self, place: Place) -> np.ndarray:
        memory = self._slabs[place.slab].own[place.offset : place.offset + place.spec.nbytes]
        return memory.view(place.spec.dtype).reshape(place.spec.shape)

    def _own(self, variable: int, function: str, counter: bool = False) -> Place:
        place = self._places[variable]
        if place.spec.server != self.index or place.spec.counter != counter:
            what = "counter" if counter else "variable"
            got = f"{'counter' if place.spec.counter else 'variable'} {place.spec.name!r} of server {place.spec.server}"
            raise ValueError(explain(function, what, expected=f"a {what} of server {self.index}", got=got))
        return place
