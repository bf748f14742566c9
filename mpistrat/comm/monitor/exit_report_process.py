"""The process that prints which rank of its node was the first to die without a message: see `exit_report.py`.

It is started as a script, has few imports, and ends with the last rank of the node. Its arguments are the number of the socket on
which it listens, and the process of the first rank.
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

FIRST_RANK = 60.0  # seconds in which the first rank must connect, while the one that started this lives
PARENT = 0.2  # seconds between two checks for the parent
ALL_ENDS = 2.0  # seconds in which launchers end the other ranks of the node after one has ended
TOGETHER = 0.15  # seconds between a death and a launcher's first signal to the others; its SIGKILL comes later
LEAVING = 2.0  # seconds in which a launcher may kill the others, because one has ended properly but with an error
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
SENDING = 1.0  # seconds in which a client must receive data
SHOWN = 8  # ranks whose last events are printed
CRASH = "a crash in compiled code: PYTHONFAULTHANDLER=1 shows where"


class Rank:
    """A living rank of this node."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.pid, self.uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.who, self.text, self.ended = f"a rank, process {self.pid}", b"", False
        self.status = 0  # as it has said at its end
        self.events: int | None = None  # the descriptor of its recorder's memory


def status_of(pid: int) -> int | None:
    """Return the status of a process that has just ended, as in waitpid; None if it is too late."""
    try:
        for _ in range(20):
            with open(f"/proc/{pid}/stat") as stat:
                words = stat.read().rsplit(")", 1)[1].split()
            if words[0] == "Z" or words[49] != "0":
                return int(words[49])
            time.sleep(1e-3)  # its files are closed, and it is about to end
    except (OSError, IndexError, ValueError):
        pass
    return None


def ended_by_error(rank: Rank) -> bool:
    """Return whether a rank that has said that it ends does so with an error, after which launchers end the others."""
    try:
        with open(f"/proc/{rank.pid}/stat") as stat:
            return stat.read().split()[-1] != "0"
    except (OSError, IndexError):  # the launcher was quicker
        return rank.status != 0


def report(rank: Rank, status: int | None, nodes: int, at: float) -> str:
    """Return the line about a rank that died without a message."""
    when = time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
    number = 0 if status is None else status & 0x7F
    if status is None:
        how = f"ended without a message at {when}: killed, crashed, or ended by os._exit"
    elif number:
        name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
        how = f"was ended by {name} at {when}: {REMEDIES.get(number, CRASH)}"
    else:
        how = f"ended with status {status >> 8} at {when}, without a message: by os._exit, or a library"
    more = "; if other hosts report a rank too, the earliest time counts" if nodes > 1 else ""
    return f"mpistrat: {rank.who}, process {rank.pid}, {how}{more}\n"


def last_events(descriptor: int, at: float, count: int = 4) -> str:
    """Return a rank's last events in words, from the memory of its recorder (see `comm.recorder` for its layout).

    Args:
        descriptor: of the memory.
        at: the time, by the clock of `time.time`.
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
    """Report to the supervisor of `mpistrat run --restarts`, if it is on this node, that the ranks end by themselves."""
    job, generation = os.environ.get("MPISTRAT_JOB"), os.environ.get("MPISTRAT_GENERATION", "")
    if job:
        names = run_leftovers()
        names["set_word"](job, names["ENDED"], 1 + int(generation) if generation.isdigit() else 1)


def run_leftovers() -> dict[str, Any]:
    """Return the definitions of `leftovers.py`."""
    return run_file("leftovers.py")


def run_file(*path: str) -> dict[str, Any]:
    """Return the definitions of a file; loaded late, because it is rarely needed, and this process must start fast."""
    import runpy

    return runpy.run_path(os.path.join(os.path.dirname(__file__), *path))


class Death:
    """A rank's end without a message, and its status as far as the system shows it."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.at, self.status = rank, time.time(), status_of(rank.pid)
        number = None if self.status is None else self.status & 0x7F
        self.asked = number in ASKED
        self.killed = number is None or number == signal.SIGKILL


def shared_memory_of(pid: int) -> set[str]:
    """Return the files of /dev/shm that a process has mapped: those that its MPI created at its start."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as maps:
            return {line[line.index("/dev/shm/") :].rstrip("\n") for line in maps if " /dev/shm/" in line}
    except OSError:
        return set()


class ExitMonitor:
    """The known state of the ranks of this node."""

    def __init__(self) -> None:
        self.nodes, self.quiet, self.left = 1, False, time.monotonic() - LEAVING
        self.survives = False  # the others continue
        self.kill_at = 0.0  # time to kill ranks that do not end with the job, which no launcher does
        self.deaths: list[Death] = []  # in order
        self.living: dict[int, Rank] = {}
        self.until = 0.0  # time to report the first death, though not all have ended

    def receive(self, rank: Rank, words: str) -> None:
        kind, _, rest = words.partition(" ")
        if kind == "who":
            rank.who = rest
        elif kind == "nodes":
            self.nodes = int(rest)
        elif kind == "told":  # the ranks report why the job ends
            mark_end()
            self.quiet = self.quiet or not self.deaths  # after a death, that is the reason
            if self.survives and not self.kill_at:
                self.kill_at = time.monotonic() + ALL_ENDS
        elif kind == "survives":
            self.survives = True
        elif kind == "bye":
            rank.ended, rank.status = True, int(rest or 0)

    def closed(self, rank: Rank) -> None:
        """Handle a closed connection."""
        if rank.ended and ended_by_error(rank):
            self.left = time.monotonic()
        if rank.ended or self.quiet:
            return
        death = Death(rank)
        if self.survives:
            if not death.asked:
                self.report(death, [rank])
            if death.status is not None and death.status > 0xFF:  # an exit, which a surviving MPI does not notice
                self.quiet = True
                text = (
                    f"{rank.who}, process {rank.pid}, ended with status {death.status >> 8}: the others cannot continue"
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
        """Report the rank that died first, when all have ended or had time to.

        Connections close in the order of deaths: the system closes files that a process opened last before those opened first,
        such as the launcher's connection. But launchers send a signal before they kill: a rank that got such a signal is not the
        first if another was killed, or crashed, at the same moment.
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
        """Print a death, and the last events of ranks of this node: the dead one, and some others."""
        with contextlib.suppress(OSError):
            text = report(death.rank, death.status, self.nodes, death.at)
            for rank in [death.rank, *(other for other in ranks if other is not death.rank)][:SHOWN]:
                with contextlib.suppress(OSError, ValueError, struct.error, IndexError):
                    words = last_events(rank.events, death.at) if rank.events is not None else ""
                    text += f"  {rank.who}, last: {words}\n" if words else ""
            text = run_file("..", "..", "base", "text.py")["printable"](text, keep="\n")
            os.write(2, text.encode(errors="replace"))


class Connections:
    """The process's side of the ranks' connections."""

    def __init__(self, listener: socket.socket, parent: int) -> None:
        self.parent = parent
        self.listener, self.events, self.monitor = listener, select.epoll(), ExitMonitor()
        self.ranks: dict[int, Rank] = {}
        self.seen = False  # a rank has connected
        self.watchers: dict[int, Rank] = {}  # processes of the same user that query the ranks
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
            ready = self.events.poll(idle)  # in order of the events
            if 0 < self.monitor.kill_at <= time.monotonic():
                self.end_ranks()
            if self.monitor.deaths and time.monotonic() >= self.monitor.until:
                died = any(death.status != 0 for death in self.monitor.deaths)
                self.monitor.finish()
                if died and os.environ.get("MPISTRAT_JOB"):  # the launcher has not ended them, and the job is restarted
                    self.end_ranks()
            for descriptor, _ in ready:
                if descriptor == self.listener.fileno():
                    self.accept()
                else:
                    self.receive(descriptor)
        self.monitor.finish()
        self.clean()

    def end_ranks(self) -> None:
        """Kill the living ranks: each would wait for the dead one."""
        for rank in self.ranks.values():
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)

    def clean(self) -> None:
        """Remove files that killed ranks, or ranks that ended the job, left in shared memory."""
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
        """Mark a connection as a watcher's, and send it the ranks, with the memories of their recorders."""
        watcher = self.ranks.pop(descriptor)
        if not self.ranks and not self.seen:  # it connected before the first rank
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
