"""Exit reports: a small process on each node reports a killed rank, which cannot report itself.

The launcher ends the others before one of them could. The first rank of a node starts the process (`exit_report_process.py`), and
every rank of the node has a Unix socket to it: "rank 2 of 4 (ps 0) on h1". A rank that ends properly sends that, and so does one
that reports why the job ends. A socket that closes without either is a dead rank, and the process prints a line about the first
one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...base import local_socket, log
from ...base.frames import stacks
from ...base.programs import isolated
from ...base.text import encoded
from ...cluster.world import survives
from ..recorder import RECORDER

if TYPE_CHECKING:
    from ...cluster.topology import Topology

__all__ = [
    "PREFIX",
    "answer",
    "begin",
    "end",
    "register_rank",
    "report_exit",
    "start",
]  # one per process: the strategies of a rank share its connection

_PROGRAM = Path(__file__).with_name("exit_report_process.py")
PREFIX = b"mpistrat"  # of the process's name
_NAME_BYTES = 32
_CONNECT = 5.0  # seconds

_name = b""  # of the process's socket, once this rank has one
_line: socket.socket | None = None


def start(topology: Topology) -> None:
    """Start the process, on the first rank of each node, unless it runs. No rank waits for it yet."""
    if topology.local_rank == 0 and not _name:
        listener = _listen()
        if listener is not None:
            _start(listener)


def begin(topology: Topology) -> None:
    """Connect to the process, which reports this rank if it is killed. Collective over the topology; after `start`.

    Without Unix sockets, or an interpreter to start, there is none.
    """
    global _name
    name = np.zeros(_NAME_BYTES, np.uint8)
    if topology.local_rank == 0 and _name:
        name[:] = np.frombuffer(_name, np.uint8)
    if topology.intra is not None:
        topology.intra.Bcast(name)
    who = f"rank {topology.rank} of {topology.size} (worker {topology.rank}) on {topology.hostname}"
    if _line is None and name.any():
        _name = name.tobytes()
        _connect(who, topology.num_nodes)
    if survives():
        register_rank(who)
        _send("survives")


def _listen() -> socket.socket | None:
    """Listen on a name that cannot be guessed and is not a file."""
    global _name
    try:
        listener, _name = local_socket.listen(PREFIX, _NAME_BYTES)
    except (AttributeError, OSError) as error:
        log.logger.debug("a killed rank will not be named: %s", error)
        return None
    return listener


def _start(listener: socket.socket) -> None:
    """Start the process in a separate session, so signals that end the ranks do not reach it. It has only stderr."""
    try:
        subprocess.Popen(
            isolated(str(_PROGRAM), str(listener.fileno()), str(os.getpid())),
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        ).returncode = 0  # no wait for it: it ends after this rank
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.logger.debug("a killed rank will not be named: %s", error)
    listener.close()


def _connect(who: str, nodes: int) -> None:
    global _line
    try:
        line = local_socket.connect(_name, _CONNECT)
    except (AttributeError, OSError) as error:
        log.logger.debug("a killed rank will not be named: %s", error)
        return
    try:
        line.recv(1)  # it listens: the order of closed connections before that is lost
    except OSError as error:
        log.logger.debug("a killed rank will not be named: %s", error)
        line.close()
        return
    _line = line
    os.register_at_fork(after_in_child=_forget)
    _send(f"nodes {nodes}")
    register_rank(who)
    if RECORDER.descriptor is not None:
        with contextlib.suppress(OSError, AttributeError):
            socket.send_fds(line, [b"events\n"], [RECORDER.descriptor])


def answer(position: Callable[[], str], end: Callable[[str], None]) -> None:
    """Handle the process's requests: send the stacks of all threads, or end the job. The watchdog calls it periodically.

    Args:
        position: returns the position of this rank, in words.
        end: called with the line about a rank that has ended with an error, which MPI does not notice if ranks may die.
    """
    line = _line
    if line is None or not select.select([line], [], [], 0)[0]:
        return
    with contextlib.suppress(OSError):
        words = line.recv(4096)
        if words.startswith(b"ended "):
            end(words[6:].decode(errors="replace").partition("\n")[0])
        if b"stacks" not in words:
            return
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        found = {names.get(ident, str(ident)): "".join(stack) for ident, stack in stacks().items()}
        _send("stacks " + json.dumps({"position": position(), "threads": found}))


def _forget() -> None:
    """Close the connection in a forked child, which must not keep it open."""
    global _line
    if _line is not None:
        _line.close()
        _line = None


def _send(words: str) -> None:
    """Send the process a line."""
    if _line is not None:
        with contextlib.suppress(OSError):
            _line.sendall(encoded(words) + b"\n")


def register_rank(who: str) -> None:
    """Send the name of this rank for the report of its death."""
    _send(f"who {who}")


def report_exit() -> None:
    """Report that the ranks themselves print why the job ends."""
    _send("told")


def end(status: int) -> None:
    """Report that this rank ends by itself. The connection stays open until the process has ended."""
    _send(f"bye {status}")
