"""Unix sockets without a file between processes of one user on one machine.

Every user of the machine may connect to such a socket, or listen on a free name. So both sides ask the system for the owner of
the process at the other end.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

__all__ = ["connect", "is_of_this_user", "listen"]

_BACKLOG = 4096


def listen(prefix: bytes, nbytes: int) -> tuple[socket.socket, bytes]:
    """Listen on a name that cannot be guessed; return the socket and the name, which has `nbytes` bytes.

    Raises:
        AttributeError, OSError: this system has no such sockets.
    """
    name = prefix + secrets.token_hex((nbytes - len(prefix)) // 2).encode()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(b"\0" + name)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener, name


def connect(name: bytes, seconds: float | None = None) -> socket.socket:
    """Connect to a process of this user that listens on a name.

    Args:
        name: the result of `listen`.
        seconds: the time limit of later sends and receives. With one, a listener that accepts no connection is an immediate
            error.

    Raises:
        AttributeError, OSError: no process, or another user's, listens there.
    """
    line = socket.socket(socket.AF_UNIX)
    try:
        line.settimeout(seconds)
        line.connect(b"\0" + name)
        if not is_of_this_user(line):
            raise PermissionError("another user's process listens there")
    except BaseException:
        line.close()
        raise
    return line


def is_of_this_user(line: socket.socket) -> bool:
    """Return True if the peer process is of this user, or was when it connected or listened."""
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())
