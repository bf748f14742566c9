"""What a client meets beside a chief that does at once what it sends: old answers, several threads, clients that come and go."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.remote import service
from mpistrat.remote import zmq as transport
from mpistrat.remote.channel import Kind
from mpistrat.remote.service import serve
from mpistrat.remote.zmq import JOB, ClientSocket, ServerSocket, read_connection_file

pytest.importorskip("zmq")
pytest.importorskip("cloudpickle")


class Chief:
    """Stands for a ClusterCoordinator without workers: only `call` is served."""

    num_workers = 1
    strategy = SimpleNamespace(rank=0, scope=contextlib.nullcontext)
    seconds = 0.0  # that a fetch takes

    def fetch(self, thing):
        time.sleep(self.seconds)
        return thing

    def cancel(self):
        pass

    def done(self):
        return True

    def require_workers(self):
        pass


@pytest.fixture
def chief(tmp_path):
    socket, made = ServerSocket(tmp_path / "serve.json", "127.0.0.1"), Chief()
    thread = threading.Thread(target=serve, args=(made, socket), daemon=True)
    thread.start()
    yield made
    if thread.is_alive():
        ms.connect(tmp_path / "serve.json", timeout=20).shutdown()
    thread.join(20)
    socket.close()


def test_a_value_that_was_not_waited_for_is_not_taken_for_a_later_one(chief, tmp_path):
    with ms.connect(tmp_path / "serve.json", timeout=20) as cluster:
        box = cluster.call(lambda: [1])
        chief.seconds = 0.3
        with pytest.raises(TimeoutError, match="not ready after 0.05 s"):
            box.get(timeout=0.05)
        chief.seconds = 0.0

        def change(values):
            values[0] = 2

        cluster.call(change, (box,))  # which ends after the old value has come
        assert box.get() == [2]


def test_threads_that_fetch_the_same_value_all_have_it(chief, tmp_path):
    with ms.connect(tmp_path / "serve.json", timeout=20) as cluster:
        box = cluster.call(lambda: np.arange(3))
        found = []
        threads = [
            threading.Thread(target=lambda: found.extend(box.get(timeout=10).sum() for _ in range(20)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found == [3] * 80


def test_a_thread_that_waits_leaves_the_connection_to_others(chief, tmp_path):
    with ms.connect(tmp_path / "serve.json", timeout=20) as cluster:
        waiting = ms.coordinator.RemoteObject(cluster, 99)  # for which nothing ever comes
        ended = []

        def wait():
            with contextlib.suppress(TimeoutError):
                cluster._settled(waiting, 6.0)
            ended.append(True)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        for _ in range(3):
            assert cluster.call(lambda: 5).get() == 5
        assert not ended
        thread.join()


def test_what_stands_for_the_coordinator_is_not_waited_for(chief, tmp_path):
    with ms.connect(tmp_path / "serve.json", timeout=20) as cluster:
        assert isinstance(cluster.coordinator.get(timeout=5), Chief)


def test_a_result_that_is_too_large_does_not_end_the_session(chief, tmp_path, monkeypatch):
    with ms.connect(tmp_path / "serve.json", timeout=20) as cluster:
        large = cluster.call(lambda: b"x" * 100_000)
        monkeypatch.setattr(transport, "LARGEST", 50_000)
        with pytest.raises(ValueError, match=r"RemoteValue.get: expected at most 50000 bytes, got 100\d\d\d"):
            large.get(timeout=10)
        assert cluster.call(len, (large,)).get() == 100_000


def test_an_error_that_is_too_large_is_told_by_its_text(chief, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "_ERROR", 10_000)
    monkeypatch.setattr(transport, "LARGEST", 50_000)

    def fail():
        raise ValueError("what went wrong", b"x" * 100_000)

    with ms.connect(tmp_path / "serve.json", timeout=20) as cluster:
        with pytest.raises(ms.coordinator.RemoteError, match="xxx"):
            cluster.call(fail)
        assert cluster.call(lambda: 1).get() == 1


def test_who_comes_after_one_that_has_left_is_served_whatever_that_had_sent(chief, tmp_path):
    busy = ms.connect(tmp_path / "serve.json", timeout=20)
    with busy._lock:
        busy._send(Kind.CALL, time.sleep, (1.0,), {})
    for _ in range(20):
        busy.cancel()
    busy.close()
    with ms.connect(tmp_path / "serve.json", timeout=20) as cluster:
        assert cluster.call(lambda: 1).get() == 1


def test_who_comes_after_one_that_vanished_is_served_at_once(chief, tmp_path):
    gone = ms.connect(tmp_path / "serve.json", timeout=20)
    gone._socket.close()  # as when its kernel is started again
    time.sleep(0.3)
    with ms.connect(tmp_path / "serve.json", timeout=20) as cluster:
        assert cluster.call(lambda: 1).get() == 1
        with pytest.raises(ms.errors.ClusterError, match="the job serves another client"):
            ms.connect(tmp_path / "serve.json", timeout=20)


def test_a_job_does_not_wait_for_a_client_that_does_not_look(tmp_path):
    server = ServerSocket(tmp_path / "serve.json", "127.0.0.1")
    client = ClientSocket(tmp_path / "serve.json", 10)
    client.send(JOB, Kind.HELLO)
    (message,) = server.poll(10)
    sent = []

    def tell():
        for number in range(80_000):
            sent.append(server.send(message.peer, Kind.DONE, number))

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and all(sent)
    client.close()
    server.close()


def test_a_file_that_is_not_yet_written_is_waited_for(tmp_path):
    server = ServerSocket(tmp_path / "serve.json", "127.0.0.1")
    text = (tmp_path / "serve.json").read_text()
    path = tmp_path / "late.json"
    path.touch(0o600)
    writer = threading.Timer(0.5, path.write_text, (text,))
    writer.start()
    assert read_connection_file(path, 10)["version"] == 1
    writer.join()
    server.close()
