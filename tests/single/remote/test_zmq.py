"""Who may speak to a job that serves: nobody without its file, whatever they send."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket as sockets
import stat
import struct
import threading
import time

import pytest

import mpistrat as ms
from mpistrat.errors import ClosedError, ClusterError
from mpistrat.remote import zmq as transport
from mpistrat.remote.channel import Kind, Message
from mpistrat.remote.zmq import JOB, ClientSocket, ServerSocket, read_connection_file

zmq = pytest.importorskip("zmq")


@pytest.fixture
def server(tmp_path):
    made = ServerSocket(tmp_path / "serve.json", "127.0.0.1")
    yield made
    made.close()


def said(tmp_path):
    return read_connection_file(tmp_path / "serve.json")


def place(tmp_path):
    host, port = said(tmp_path)["address"].removeprefix("tcp://").split(":")
    return host, int(port)


def greeting_arrives(server, tmp_path) -> bool:
    """Whether the client that has the file still gets through, and is answered."""
    client = ClientSocket(tmp_path / "serve.json", 10)
    try:
        client.send(JOB, Kind.HELLO, 7, b"me")
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for message in server.poll(0.1):
                assert message[1:] == (Kind.HELLO, 7, 0, b"me")
                assert server.send(message.peer, Kind.WELCOME, 3, b"x" * 100_000)
                return client.poll(10) == [Message(JOB, Kind.WELCOME, 3, 0, b"x" * 100_000)]
        return False
    finally:
        client.close()


def nothing_comes(server, seconds=0.0) -> bool:
    return not server.poll(seconds)


def test_the_file_is_its_owners_alone_and_goes_with_the_job(tmp_path):
    path = tmp_path / "serve.json"
    server = ServerSocket(path, "127.0.0.1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError, match="expected no file, got a file. Another job serves by it"):
        ServerSocket(path, "127.0.0.1")
    assert path.exists()  # that the second one did not remove
    server.close()
    assert not path.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "", "::"])
def test_a_job_listens_at_one_address(tmp_path, host):
    with pytest.raises(ValueError, match="expected one address of this node"):
        ServerSocket(tmp_path / "serve.json", host)
    assert not (tmp_path / "serve.json").exists()


def test_another_nodes_address_is_told(tmp_path):
    with pytest.raises(OSError, match="expected an address of this node"):
        ServerSocket(tmp_path / "serve.json", "192.0.2.1")
    assert not (tmp_path / "serve.json").exists()


@pytest.mark.timeout(20)  # who opens a pipe waits
def test_what_is_no_file_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(0o700)
    with contextlib.closing(sockets.socket(sockets.AF_UNIX)) as end:
        end.bind(str(tmp_path / "end"))
    for name, kind in (("pipe", "a pipe"), ("folder", "a directory"), ("end", "a device or a socket")):
        with pytest.raises(ClusterError, match=f"expected your own file, readable by you alone, got {kind}"):
            ms.connect(tmp_path / name, timeout=5)
        with pytest.raises(FileExistsError, match=f"expected no file, got {kind}. Name another file"):
            ServerSocket(tmp_path / name, "127.0.0.1")
    with pytest.raises(ClusterError, match="got Not a directory"):
        ms.connect(tmp_path / "pipe" / "serve.json", timeout=5)
    with pytest.raises(
        FileNotFoundError, match="mpistrat serve: .*: expected a file that can be created, got No such file"
    ):
        ServerSocket(tmp_path / "absent" / "serve.json", "127.0.0.1")


def test_a_file_is_not_followed_nor_believed(tmp_path, server):
    path = tmp_path / "serve.json"
    for mode in (0o640, 0o604, 0o666):
        path.chmod(mode)
        with pytest.raises(ClusterError, match=f"expected your own file, .* mode {mode:o}"):
            read_connection_file(path)
    path.chmod(0o600)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with pytest.raises(ClusterError, match="expected your own file, .*, got a symbolic link. Name the file itself"):
        read_connection_file(link)
    with pytest.raises(FileExistsError, match="expected no file, got a symbolic link. Name another file"):
        ServerSocket(link, "127.0.0.1")
    dangling = tmp_path / "dangling.json"
    dangling.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(FileExistsError):
        ServerSocket(dangling, "127.0.0.1")
    assert not (tmp_path / "elsewhere.json").exists()
    wrong = [{**said(tmp_path), "version": 99}, {**said(tmp_path), "address": 3}]
    for text in ("", "[]", "{}", *map(json.dumps, wrong), "\0" * 100, "[" * 60_000):
        other = tmp_path / "other.json"
        other.write_text(text)
        other.chmod(0o600)
        with pytest.raises(ClusterError, match="expected the file of a job that serves"):
            read_connection_file(other)
    with pytest.raises(TimeoutError, match="expected the file of a job that serves, got none"):
        read_connection_file(tmp_path / "absent.json", 0.2)


def test_a_client_sees_that_the_job_ends(tmp_path):
    server = ServerSocket(tmp_path / "serve.json", "127.0.0.1")
    client = ClientSocket(tmp_path / "serve.json", 10)
    client.send(JOB, Kind.HELLO)
    assert server.poll(10)[0].kind == Kind.HELLO
    server.close()
    with pytest.raises(ClosedError, match="expected a job that serves, got no connection"):
        client.poll(20)
    client.close()


def test_a_job_sees_that_its_client_is_gone(server, tmp_path):
    client = ClientSocket(tmp_path / "serve.json", 10)
    client.send(JOB, Kind.HELLO)
    sender = server.poll(10)[0].peer
    assert server.send(sender, Kind.ALIVE)
    client.close()
    end = time.monotonic() + 10
    while server.send(sender, Kind.ALIVE):
        assert time.monotonic() < end
        time.sleep(0.05)


# Attacks. Each tries to have a message arrive; none may, and the client with the file must get through after them.


def other_keys(tmp_path, random_):
    """A client with keys of its own, which knows the job's public key."""
    public, secret = zmq.curve_keypair()
    return {
        "curve_serverkey": said(tmp_path)["server_key"].encode(),
        "curve_publickey": public,
        "curve_secretkey": secret,
    }


def known_public_key(tmp_path, random_):
    """The client's public key, without the secret one."""
    _, secret = zmq.curve_keypair()
    own = said(tmp_path)
    return {
        "curve_serverkey": own["server_key"].encode(),
        "curve_publickey": own["client_key"].encode(),
        "curve_secretkey": secret,
    }


def wrong_server(tmp_path, random_):
    """The client's keys, for another server."""
    public, _ = zmq.curve_keypair()
    own = said(tmp_path)
    return {
        "curve_serverkey": public,
        "curve_publickey": own["client_key"].encode(),
        "curve_secretkey": own["client_secret"].encode(),
    }


def no_key(tmp_path, random_):
    return {}


def name_and_word(tmp_path, random_):
    return {"plain_username": b"root", "plain_password": bytes(random_.randbytes(8)).replace(b"\0", b"x")}


def by_zeromq(options):
    def attack(server, tmp_path, random_):
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger, dealer.sndtimeo = 0, 1000  # a refused connection may leave no room to send into
        for name, value in options(tmp_path, random_).items():
            setattr(dealer, name, value)
        dealer.connect(said(tmp_path)["address"])
        with contextlib.suppress(zmq.Again):
            dealer.send_multipart([struct.pack("<Bq", random_.choice(list(Kind)), 0), random_.randbytes(20)])
        time.sleep(0.1)
        dealer.close()
        context.term()

    return attack


def by_bytes(make):
    def attack(server, tmp_path, random_):
        with sockets.create_connection(place(tmp_path), 5) as plain:
            plain.settimeout(0.1)
            try:
                for piece in make(tmp_path, random_):
                    plain.sendall(piece)
                plain.recv(1000)
            except OSError:
                pass

    return attack


GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00"


def noise(tmp_path, random_):
    yield random_.randbytes(random_.randrange(1, 5000))


def half_a_handshake(tmp_path, random_):
    yield (GREETING + b"CURVE".ljust(20, b"\0") + b"\0" * 32)[: random_.randrange(1, 64)]


def null_mechanism(tmp_path, random_):
    yield GREETING + b"NULL".ljust(20, b"\0") + b"\0" * 32
    yield b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0"
    yield b"\x01\x09" + struct.pack("<Bq", Kind.END, 0) + b"\x00\x00"


def huge_frame(tmp_path, random_):
    yield GREETING + b"CURVE".ljust(20, b"\0") + b"\0" * 32
    yield b"\x06" + struct.pack(">Q", 1 << random_.randrange(31, 63)) + random_.randbytes(1000)


def noise_for_hello(tmp_path, random_):
    yield GREETING + b"CURVE".ljust(20, b"\0") + b"\0" * 32
    yield b"\x04\xc8\x05HELLO\x01\0" + random_.randbytes(192)


def old_version(tmp_path, random_):
    yield bytes([1, 0]) + random_.randbytes(50)


ATTACKS = [
    *(by_zeromq(options) for options in (other_keys, known_public_key, wrong_server, no_key, name_and_word)),
    *map(by_bytes, (noise, half_a_handshake, null_mechanism, huge_frame, noise_for_hello, old_version)),
]


@pytest.mark.parametrize("seed", range(5))
def test_nothing_of_a_stranger_arrives(server, tmp_path, seed):
    random_ = random.Random(seed)
    for number in range(40):  # five times 40: 200 in all
        attack = ATTACKS[(seed * 40 + number) % len(ATTACKS)]
        attack(server, tmp_path, random_)
        assert nothing_comes(server)
    assert nothing_comes(server, 0.2)
    assert greeting_arrives(server, tmp_path)


def test_what_was_recorded_of_a_connection_is_nothing_in_another(server, tmp_path):
    """A relay records what the client sends, and sends it again: the job must not take it a second time."""
    relay = sockets.create_server(("127.0.0.1", 0))
    recorded = bytearray()

    def carry(a, b, note):
        while data := a.recv(65536):
            if note:
                recorded.extend(data)
            b.sendall(data)
        b.shutdown(sockets.SHUT_WR)

    def pass_on():
        one, _ = relay.accept()
        two = sockets.create_connection(place(tmp_path))
        back = threading.Thread(target=carry, args=(two, one, False), daemon=True)
        back.start()
        carry(one, two, True)

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    through = {**said(tmp_path), "address": f"tcp://127.0.0.1:{relay.getsockname()[1]}"}
    other = tmp_path / "relayed.json"
    other.write_text(json.dumps(through))
    other.chmod(0o600)
    client = ClientSocket(other, 10)
    client.send(JOB, Kind.SCHEDULE, 5, b"once")
    assert server.poll(10)[0][1:] == (Kind.SCHEDULE, 5, 0, b"once")
    client.close()
    thread.join(10)
    assert len(recorded) > 300 and b"once" not in recorded  # encrypted
    for cut in (len(recorded), *range(64, len(recorded), 40)):
        with sockets.create_connection(place(tmp_path), 5) as again:
            again.sendall(bytes(recorded[:cut]))
            again.settimeout(0.05)
            try:
                again.recv(65536)
            except OSError:
                pass
        assert nothing_comes(server)
    assert nothing_comes(server, 0.2)
    assert greeting_arrives(server, tmp_path)


def test_many_that_never_finish_their_handshake_keep_nobody_out(server, tmp_path):
    idle = [sockets.create_connection(place(tmp_path), 5) for _ in range(200)]
    assert greeting_arrives(server, tmp_path)
    for one in idle:
        one.close()


def test_a_message_larger_than_the_limit_is_not_sent_and_ends_a_connection(server, tmp_path, monkeypatch):
    client = ClientSocket(tmp_path / "serve.json", 10)
    monkeypatch.setattr(transport, "LARGEST", 1000)
    with pytest.raises(ValueError, match="expected at most 1000 bytes"):
        client.send(JOB, Kind.CALL, 0, b"x" * 1001)
    client.close()
    small = ServerSocket(tmp_path / "small.json", "127.0.0.1")
    monkeypatch.setattr(transport, "LARGEST", 1 << 30)
    client = ClientSocket(tmp_path / "small.json", 10)
    client.send(JOB, Kind.CALL, 0, b"x" * 1300)
    assert not small.poll(0.5)
    client.close()
    small.close()


def test_the_key_of_the_job_is_in_no_file(server, tmp_path):
    text = (tmp_path / "serve.json").read_text()
    keys = {name: value for name, value in json.loads(text).items() if "key" in name or "secret" in name}
    assert set(keys) == {"server_key", "client_key", "client_secret"}
    assert os.listdir(tmp_path) == ["serve.json"]
