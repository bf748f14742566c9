"""The process that prints which rank of its node was the first to die without a word: see `exit_report.py`.

It is started as a script, imports next to nothing, and ends with the last rank of the node. Its arguments are the number of
the socket on which it listens, and the process of the first rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FIRST_RANK = 60.0  # seconds in which the first rank must come, if the one that started this lives so long
PARENT = 0.2  # seconds between two looks whether it does
ALL_ENDS = 2.0  # seconds in which the other ranks of the node end once one has: launchers end them
TOGETHER = 0.15  # seconds between a death and a launcher's first signal to the others; its SIGKILL comes later
LEAVING = 2.0  # seconds in which a launcher may kill the others, because one has ended in order but with an error
ASKED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)  # by people, launchers, schedulers

REMEDIES: dict[int, str] = {
    signal.SIGKILL: "perhaps by the out-of-memory killer or a limit of the scheduler: see dmesg, seff or sacct",
    signal.SIGBUS: "perhaps /dev/shm or another file system is full: see df /dev/shm",
}
SENDING = 1.0  # seconds in which who asks must take what it gets
SHOWN = 8  # ranks whose last events are printed
CRASH = "a crash in compiled code: PYTHONFAULTHANDLER=1 shows where"


class Rank:
    """A rank of this node, while it lives."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.pid, self.uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.who, self.text, self.ended = f"a rank, process {self.pid}", b"", False
        self.events: int | None = None  # the descriptor of its recorder's memory


def status_of(pid: int) -> int | None:
    """Return how a process that has just ended has ended, as waitpid tells it; None where it is too late to see."""
    try:
        for _ in range(20):
            with open(f"/proc/{pid}/stat") as stat:
                words = stat.read().rsplit(")", 1)[1].split()
            if words[0] == "Z" or words[49] != "0":
                return int(words[49])
            time.sleep(1e-3)  # it has closed its files, and is about to end
    except (OSError, IndexError, ValueError):
        pass
    return None


def report(rank: Rank, status: int | None, nodes: int, at: float) -> str:
    """Return the line about a rank that died without a message."""
    when = time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
    number = 0 if status is None else status & 0x7F
    if status is None:
        how = f"ended without a word at {when}: killed, crashed, or ended by os._exit"
    elif number:
        name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
        how = f"was ended by {name} at {when}: {REMEDIES.get(number, CRASH)}"
    else:
        how = f"ended with status {status >> 8} at {when}, without a word: by os._exit, or a library"
    more = "; if other hosts say so of theirs, the earliest time counts" if nodes > 1 else ""
    return f"mpistrat: {rank.who}, process {rank.pid}, {how}{more}\n"


def last_events(descriptor: int, at: float, count: int = 4) -> str:
    """Return in words what a rank did last, by the memory of its recorder (see `comm.recorder` for what lies where).

    Args:
        descriptor: of the memory.
        at: when, by the clock of `time.time`.
    """
    head = os.pread(descriptor, 65536, 0)
    magic, capacity, used = struct.unpack_from("<8sqq", head, 0)
    if magic != b"mpistre2":
        return ""
    names, place = [], 64
    while place < 64 + used:
        (length,) = struct.unpack_from("<H", head, place)
        names.append(head[place + 4 : place + 4 + length].decode(errors="replace"))
        place += 4 + length
    rows = [row for row in struct.iter_unpack("<qqqq", os.pread(descriptor, 32 * capacity, 65536)) if row[0]]
    moment = time.perf_counter() - (time.time() - at)
    words = []
    for begin, end, what, _ in sorted(rows)[: -count - 1 : -1]:
        index, times = what & 0x3FFF, what >> 26
        name = names[index] if index < len(names) else "other"
        number = f" #{times}" if times else ""
        if end:
            words.append(f"{name}{number} ({(end - begin) / 1e6:.3g} ms)")
        else:
            words.insert(0, f"in {name}{number} for {max(moment - begin / 1e9, 0.0):.3g} s")
    return "; ".join(words)


def mark_end() -> None:
    """Tell the supervisor of `mpistrat run --restarts`, if it is on this node, that the ranks end by themselves."""
    job, generation = os.environ.get("MPISTRAT_JOB"), os.environ.get("MPISTRAT_GENERATION", "")
    if job:
        names = run_leftovers()
        names["set_word"](job, names["ENDED"], 1 + int(generation) if generation.isdigit() else 1)


def run_leftovers() -> dict[str, Any]:
    """Return what `leftovers.py` defines."""
    return run_file("leftovers.py")


def run_file(*path: str) -> dict[str, Any]:
    """Return what a file defines; late, for it is seldom needed, and this process has to start fast."""
    import runpy

    return runpy.run_path(os.path.join(os.path.dirname(__file__), *path))


class Death:
    """A rank's end without a message, and how it ended as far as the system shows it."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.at, self.status = rank, time.time(), status_of(rank.pid)
        number = None if self.status is None else self.status & 0x7F
        self.asked = number in ASKED
        self.killed = number is None or number == signal.SIGKILL


def shared_memory_of(pid: int) -> set[str]:
    """Return the files of /dev/shm that a process has mapped: those that its MPI made when it began."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as maps:
            return {line[line.index("/dev/shm/") :].rstrip("\n") for line in maps if " /dev/shm/" in line}
    except OSError:
        return set()


class ExitMonitor:
    """What is known of the ranks of this node."""

    def __init__(self) -> None:
        self.nodes, self.quiet, self.left = 1, False, time.monotonic() - LEAVING
        self.survives = False  # whether the others go on
        self.kill_at = 0.0  # when ranks are killed that do not end with the job: no launcher does it
        self.deaths: list[Death] = []  # in their order
        self.living: dict[int, Rank] = {}
        self.until = 0.0  # when the first death is reported, though not all have ended

    def receive(self, rank: Rank, words: str) -> None:
        kind, _, rest = words.partition(" ")
        if kind == "who":
            rank.who = rest
        elif kind == "nodes":
            self.nodes = int(rest)
        elif kind == "told":  # the ranks report why the job ends
            mark_end()
            self.quiet = self.quiet or not self.deaths  # after a death, that is why
            if self.survives and not self.kill_at:
                self.kill_at = time.monotonic() + ALL_ENDS
        elif kind == "survives":
            self.survives = True
        elif kind == "bye":
            rank.ended, self.left = True, time.monotonic()

    def closed(self, rank: Rank) -> None:
        """Note a line that has closed."""
        if rank.ended or self.quiet:
            return
        death = Death(rank)
        if self.survives:
            if not death.asked:
                self.report(death, [rank])
            if (
                death.status is not None and death.status > 0xFF
            ):  # an exit, which no MPI that goes on without it notices
                self.quiet = True
                text = (
                    f"{rank.who}, process {rank.pid}, ended with status {death.status >> 8}: the others can not go on"
                )
                for other in self.living.values():
                    with contextlib.suppress(OSError):
                        other.line.sendall(f"ended {text}\n".encode())
            return
        if not self.deaths:
            if death.killed and time.monotonic() - self.left < LEAVING:
                self.quiet = True
                return
            self.until = time.monotonic() + ALL_ENDS
        self.deaths.append(death)

    def forget(self, rank: Rank) -> None:
        """Close a rank's events, unless its death may be reported."""
        if rank.events is not None and all(death.rank is not rank for death in self.deaths):
            os.close(rank.events)
            rank.events = None

    def finish(self) -> None:
        """Report the rank that died first, when all have ended or had the time to.

        Lines close in the order of deaths: the system closes what a process opened last before what it opened first, as the
        connection that its launcher watches. But launchers ask before they kill: a rank that was asked to end is not the first
        where another was killed, or crashed, at the same moment.
        """
        deaths, self.deaths = self.deaths, []
        if self.quiet or not deaths:
            return
        first, ranks = deaths[0], [*(death.rank for death in deaths), *self.living.values()]
        others = [other for other in deaths if not other.asked and other.at - first.at < TOGETHER]
        self.quiet = True
        if not first.asked:
            self.report(first, ranks)
        elif others:
            self.report(others[0], ranks)

    def report(self, death: Death, ranks: list[Rank]) -> None:
        """Print a death, and what ranks of this node did last: the one that died, and some others."""
        with contextlib.suppress(OSError):
            text = report(death.rank, death.status, self.nodes, death.at)
            for rank in [death.rank, *(other for other in ranks if other is not death.rank)][:SHOWN]:
                with contextlib.suppress(OSError, ValueError, struct.error, IndexError):
                    words = last_events(rank.events, death.at) if rank.events is not None else ""
                    text += f"  {rank.who}, last: {words}\n" if words else ""
            text = run_file("..", "..", "base", "text.py")["printable"](text, keep="\n")
            os.write(2, text.encode(errors="replace"))


class Connections:
    """The process's end of the ranks' connections."""

    def __init__(self, listener: socket.socket, parent: int) -> None:
        self.parent = parent
        self.listener, self.events, self.monitor = listener, select.epoll(), ExitMonitor()
        self.ranks: dict[int, Rank] = {}
        self.seen = False  # whether a rank has come
        self.watchers: dict[int, Rank] = {}  # processes of the same user that ask what the ranks do
        self.monitor.living = self.ranks
        self.files: set[str] = set()
        listener.setblocking(False)
        self.events.register(listener.fileno(), select.EPOLLIN)
        self.until = time.monotonic() + FIRST_RANK

    def serve(self) -> None:
        """Serve until the last rank has ended."""
        while self.ranks or (time.monotonic() < self.until and os.getppid() == self.parent):
            idle = -1.0 if self.ranks else PARENT
            if self.monitor.deaths or self.monitor.kill_at:
                until = self.monitor.until if self.monitor.deaths else self.monitor.kill_at
                idle = max(until - time.monotonic(), 0.0)
            ready = self.events.poll(idle)  # in the order in which it happened
            if 0 < self.monitor.kill_at <= time.monotonic():
                self.end_ranks()
            if self.monitor.deaths and time.monotonic() >= self.monitor.until:
                died = any(death.status != 0 for death in self.monitor.deaths)
                self.monitor.finish()
                if died and os.environ.get("MPISTRAT_JOB"):  # the launcher has not ended them: the job is started again
                    self.end_ranks()
            for descriptor, _ in ready:
                if descriptor == self.listener.fileno():
                    self.accept()
                else:
                    self.receive(descriptor)
        self.monitor.finish()
        self.clean()

    def end_ranks(self) -> None:
        """Kill the ranks that live: each would wait for the one that has died."""
        for rank in self.ranks.values():
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)

    def clean(self) -> None:
        """Remove what ranks that were killed, or that ended the job, left in shared memory."""
        if any(map(os.path.exists, self.files)):
            run_leftovers()["remove_these"](self.files)

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            line, _ = self.listener.accept()
            rank = Rank(line)
            if rank.uid != os.getuid():
                line.close()
                return
            self.ranks[line.fileno()] = rank
            self.files |= shared_memory_of(rank.pid)
            self.events.register(line.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
            line.settimeout(SENDING)
            line.send(b"!")
            self.until = 0.0

    def receive(self, descriptor: int) -> None:
        rank, data = self.ranks.get(descriptor) or self.watchers[descriptor], b""
        with contextlib.suppress(OSError):
            data, descriptors, _, _ = socket.recv_fds(rank.line, 4096, 1)
            if descriptors:
                rank.events = descriptors[0]
        *lines, rank.text = (rank.text + data).split(b"\n")
        for words in lines:
            if words == b"watch":
                self.watch(descriptor)
            elif words == b"stacks?":
                for other in self.ranks.values():
                    self.send(other, b"stacks\n")
            elif words.startswith(b"stacks "):
                for watcher in self.watchers.values():
                    self.send(watcher, b"stacks %d %s\n" % (rank.pid, words[7:]))
            else:
                self.seen = True
                self.monitor.receive(rank, words.decode(errors="replace"))
        if not data:
            self.events.unregister(descriptor)
            rank.line.close()
            if self.watchers.pop(descriptor, None) is None:
                self.monitor.closed(rank)
                del self.ranks[descriptor]
                self.monitor.forget(rank)

    def watch(self, descriptor: int) -> None:
        """Take a line for that of a watcher, and send it which ranks there are, with the memories of their recorders."""
        watcher = self.ranks.pop(descriptor)
        if not self.ranks and not self.seen:  # it came before the first rank
            self.until = time.monotonic() + FIRST_RANK
        self.watchers[descriptor] = watcher
        for rank in self.ranks.values():
            words = f"rank {rank.pid} {rank.who}\n".encode(errors="replace")
            with contextlib.suppress(OSError):
                if rank.events is None:
                    watcher.line.sendall(words)
                else:
                    socket.send_fds(watcher.line, [words], [rank.events])
        self.send(watcher, b"all\n")

    def send(self, rank: Rank, words: bytes) -> None:
        with contextlib.suppress(OSError):
            rank.line.sendall(words)


if __name__ == "__main__":
    for number in ASKED:
        signal.signal(number, signal.SIG_IGN)
    Connections(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve()
