"""The connection of a client and a serving job: messages over TCP, encrypted by CurveZMQ, and the file with the keys.

A message is a kind, a number and a payload. Only owners of the file can communicate with the job: ZeroMQ drops other connections
in the handshake. Each connection has its own keys, so a recorded one cannot be replayed.

Source: CurveZMQ, https://rfc.zeromq.org/spec/26/; ZMTP, https://rfc.zeromq.org/spec/23/.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import struct
from pathlib import Path
from time import monotonic
from typing import Any, Final, final

from ..base.errors import ClosedError, ClusterError, MissingDependencyError, explain
from .channel import Message

__all__ = ["JOB", "LARGEST", "ClientSocket", "ServerSocket", "read_connection_file"]

JOB: Final = b""  # the only peer of a client
LARGEST: Final = 1 << 30  # bytes of a message
_ROOM: Final = 256  # the most bytes that encryption adds to a message
_HEAD = struct.Struct("<Bq")
_VERSION = 1
_HEARTBEAT, _DEAD = 2_000, 15_000  # milliseconds between heartbeats, and without one until a peer is dead
_HANDSHAKE = 5_000  # milliseconds that a connection may take to show its key
_DOMAIN: Final = b"mpistrat"  # of accepted connections
_EXPECTED: Final = "your own file, readable by you alone"
_LINGER = 1_000  # milliseconds to send the last messages


@final
class ServerSocket:
    """The chief's `Channel`, whose peers are clients: writes the file with the keys, and removes it at the end.

    Args:
        path: of the file, which must not exist; only its owner may read it.
        host: the address at which the job listens: 127.0.0.1, or this node's in the job's own network.

    Raises:
        ValueError: a wildcard address.
        OSError: the file exists, or cannot be written; the address is not this node's.
        MissingDependencyError: pyzmq is not installed, or has no CurveZMQ.
    """

    def __init__(self, path: Path, host: str) -> None:
        zmq = _zmq("mpistrat serve")
        if host in ("", "*", "0.0.0.0", "::", "[::]"):
            expected, got = "one address of this node: 127.0.0.1, or that of its network within the job", repr(host)
            raise ValueError(explain("mpistrat serve", "--host", expected=expected, got=got))
        public, secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._path, self._context, self._written = path.absolute(), zmq.Context(), False
        self._gate: Any = None
        try:
            self._gate = _gate(self._context, client_public)
            self._socket = self._context.socket(zmq.ROUTER)
            options = {"maxmsgsize": LARGEST + _ROOM, "curve_server": True, "router_mandatory": True}
            options |= {"heartbeat_ivl": _HEARTBEAT, "heartbeat_timeout": _DEAD, "handshake_ivl": _HANDSHAKE}
            for name, value in options.items():
                setattr(self._socket, name, value)
            self._socket.zap_domain, self._socket.zap_enforce_domain = _DOMAIN, True  # no connection without the gate
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
            try:
                port = self._socket.bind_to_random_port(f"tcp://{socket.gethostbyname(host)}")
            except (OSError, zmq.ZMQError) as error:
                expected = "an address of this node"
                raise OSError(
                    explain("mpistrat serve", "--host", expected=expected, got=f"{host!r}: {error}")
                ) from None
            said = {"version": _VERSION, "address": f"tcp://{socket.gethostbyname(host)}:{port}"}
            said |= {"server_key": public.decode(), "client_key": client_public.decode()}
            said |= {"client_secret": client_secret.decode(), "host": socket.gethostname(), "process": str(os.getpid())}
            _write_once(path, json.dumps(said))
            self._written = True
        except BaseException:
            self.close()
            raise

    def poll(self, seconds: float = 0.0) -> list[Message]:
        """Return the next message in a list; an empty one if none arrives within `seconds`."""
        if not self._socket.poll(int(seconds * 1000)):
            return []
        frames = self._socket.recv_multipart()
        if len(frames) != 3 or len(frames[1]) != _HEAD.size:
            return [Message(frames[0], 0, 0, 0, b"")]
        kind, number = _HEAD.unpack(frames[1])
        return [Message(frames[0], kind, number, 0, frames[2])]

    def send(self, peer: bytes, kind: int, number: int = 0, payload: bytes = b"") -> bool:
        """Send a message to a client; return False if the client is gone.

        Raises:
            ValueError: it is too large.
        """
        import zmq

        if len(payload) > LARGEST:  # it would end the connection
            remedy = "Fetch parts of it, or let the ranks write it to a file"
            expected, got = f"at most {LARGEST} bytes", f"{len(payload)}"
            raise ValueError(explain("RemoteValue.get", "", expected=expected, got=got, remedy=remedy))
        try:
            self._socket.send_multipart([peer, _HEAD.pack(kind, number), payload])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        """Remove the file, and stop listening."""
        if self._written:
            with contextlib.suppress(OSError):
                self._path.unlink()
        if self._gate is not None:
            self._gate.stop()
        self._context.destroy(_LINGER)


@final
class ClientSocket:
    """The client's `Channel`, whose only peer is `JOB`.

    Args:
        path: the file that the job has written.
        seconds: the most seconds to wait for the file and the job.

    Raises:
        TimeoutError, ClusterError: they do not appear; the file is another user's, or others may read it.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        zmq = _zmq("connect")
        said = read_connection_file(path, seconds)
        self._address, self._host = said["address"], said["host"]
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        options = {"routing_id": b"c" + secrets.token_bytes(15), "maxmsgsize": LARGEST + _ROOM}
        options |= {"rcvhwm": 0}  # no limit: else the job would wait for a client that does not read
        options |= {"heartbeat_ivl": _HEARTBEAT, "heartbeat_timeout": _DEAD, "connect_timeout": int(seconds * 1000)}
        for name, value in options.items():
            setattr(self._socket, name, value)
        self._socket.curve_serverkey = said["server_key"].encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = (
            said["client_key"].encode(),
            said["client_secret"].encode(),
        )
        self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._address)

    def poll(self, seconds: float = 0.0) -> list[Message]:
        """Return the next message in a list; an empty one if none arrives within `seconds`.

        Raises:
            ClosedError: the job is gone.
        """
        end = monotonic() + seconds
        while not self._socket.poll(max(0, min(500, int((end - monotonic()) * 1000)))):
            if self._events.poll(0):
                got = f"no connection to {self._address} any more"
                remedy = f"The job on {self._host} has ended, or cannot be reached"
                raise ClosedError(explain("connect", "", expected="a job that serves", got=got, remedy=remedy))
            if monotonic() >= end:
                return []
        head, payload = self._socket.recv_multipart()
        kind, number = _HEAD.unpack(head)
        return [Message(JOB, kind, number, 0, payload)]

    def send(self, peer: bytes, kind: int, number: int = 0, payload: bytes = b"") -> bool:
        """Send a message, and return True: `poll` reports a job that has ended.

        Raises:
            ValueError: it is too large.
        """
        if len(payload) > LARGEST:
            remedy = "Let the ranks read or make large data themselves"
            expected, got = f"at most {LARGEST} bytes with all that it refers to", f"{len(payload)}"
            raise ValueError(explain("connect", "function", expected=expected, got=got, remedy=remedy))
        self._socket.send_multipart([_HEAD.pack(kind, number), payload])
        return True

    def close(self) -> None:
        """Disconnect."""
        self._context.destroy(_LINGER)


def read_connection_file(path: Path, seconds: float = 0.0) -> dict[str, str]:
    """Return the contents of a serving job's file; wait at most `seconds` for it.

    Raises:
        TimeoutError: there is none.
        ClusterError: it is another user's, others may read it, or it is not such a file.
    """
    from time import sleep

    end = monotonic() + seconds
    while (size := _size(path)) < 1:  # the job creates it before it writes
        if monotonic() >= end:
            if size == 0:
                break
            remedy = "Start `mpistrat serve FILE` in the job, and wait until it runs"
            raise TimeoutError(
                explain("connect", str(path), expected="the file of a job that serves", got="none", remedy=remedy)
            )
        sleep(0.1)
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:  # it has changed since
        raise ClusterError(explain("connect", str(path), expected=_EXPECTED, got=str(error.strerror))) from None
    with open(number, encoding="utf-8") as file:
        _check(path, os.fstat(file.fileno()))
        try:
            said = json.loads(file.read(1 << 16))
        except (ValueError, RecursionError):
            said = None
    wanted = {"version", "address", "server_key", "client_key", "client_secret", "host"}
    if (
        not isinstance(said, dict)
        or not wanted <= set(said)
        or said["version"] != _VERSION
        or not all(isinstance(said[name], str) for name in wanted - {"version"})
    ):
        expected, got = f"the file of a job that serves, of version {_VERSION}", "other contents"
        raise ClusterError(explain("connect", str(path), expected=expected, got=got))
    return said


def _size(path: Path) -> int:
    """Return the bytes in a file, -1 if it does not exist. Checks before opening, because opening a pipe would block.

    Raises:
        ClusterError: it is not a regular file, or not the user's alone.
    """
    try:
        state = path.lstat()
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise ClusterError(explain("connect", str(path), expected=_EXPECTED, got=str(error.strerror))) from None
    _check(path, state)
    return state.st_size


def _check(path: Path, state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode):
        remedy = "Name the file itself" if stat.S_ISLNK(state.st_mode) else ""
        got = _kind(state.st_mode)
        raise ClusterError(explain("connect", str(path), expected=_EXPECTED, got=got, remedy=remedy))
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        got = f"owner {state.st_uid}, mode {state.st_mode & 0o777:o}"
        raise ClusterError(explain("connect", str(path), expected=_EXPECTED, got=got))


def _kind(mode: int) -> str:
    """Return the kind of a path."""
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
    }
    return kinds.get(stat.S_IFMT(mode), "a device or a socket")


def _write_once(path: Path, text: str) -> None:
    """Write a new file that only its owner may read."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        got, remedy = _kind(os.lstat(path).st_mode), "Name another file"
        if got == "a file":
            remedy = "Another job serves by it, or has ended without removing it: then remove it"
        text = explain("mpistrat serve", str(path), expected="no file", got=got, remedy=remedy)
        raise FileExistsError(text) from None
    except OSError as error:
        expected = "a file that can be created"
        text = explain("mpistrat serve", str(path), expected=expected, got=str(error.strerror))
        raise type(error)(text) from None
    with open(number, "w", encoding="utf-8") as file:
        os.fchmod(number, 0o600)
        file.write(text)


def _gate(context: Any, known: bytes) -> Any:
    """Start the check that each connection has the client's key. Source: https://rfc.zeromq.org/spec/27/."""
    from zmq.auth.thread import ThreadAuthenticator
    from zmq.utils import z85

    key = z85.decode(known)

    class Keys:
        def callback(self, domain: str, given: bytes) -> bool:
            return secrets.compare_digest(z85.decode(given), key)

    gate = ThreadAuthenticator(context)
    gate.start()
    gate.configure_curve_callback(domain=_DOMAIN.decode(), credentials_provider=Keys())
    return gate


def _zmq(function: str) -> Any:
    try:
        import zmq
    except ImportError as error:
        remedy = "pip install 'mpistrat[client]'"
        text = explain(function, "", expected="the package pyzmq", got=str(error), remedy=remedy)
        raise MissingDependencyError(text) from error
    if not zmq.has("curve"):
        raise MissingDependencyError(
            explain(function, "", expected="a ZeroMQ with CurveZMQ", got=f"ZeroMQ {zmq.zmq_version()} without it")
        )
    return zmq
