"""Unix sockets without a file."""

import socket

import pytest

from mpistrat.base import local_socket


def test_a_name_is_found_by_who_knows_it():
    listener, name = local_socket.listen(b"mpi-test-", 33)
    with listener:
        assert len(name) == 33 and name.startswith(b"mpi-test-")
        with local_socket.connect(name, 5.0) as line, listener.accept()[0] as other:
            assert local_socket.is_of_this_user(line) and local_socket.is_of_this_user(other)
            line.sendall(b"x")
            assert other.recv(1) == b"x"
    with pytest.raises(ConnectionRefusedError):
        local_socket.connect(name, 5.0)


def test_a_listener_that_accepts_nobody_is_not_waited_for():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0mpi-test-full")
        listener.listen(0)
        lines = [local_socket.connect(b"mpi-test-full", 5.0)]
        with pytest.raises(BlockingIOError):
            local_socket.connect(b"mpi-test-full", 5.0)
        lines[0].close()
