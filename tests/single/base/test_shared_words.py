"""Words and bytes in memory that processes share, in C: what is written when, what is refused, and that no wait is long."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mpistrat.base import loops

pytestmark = pytest.mark.skipif(not loops.used()[0], reason=f"no compiled loops: {loops.used()[1]}")

ANNOUNCED, VERSION, DATA = 8, 16, 64


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros(256, np.uint8)


def words(memory: np.ndarray) -> np.ndarray:
    return memory.view(np.int64)


def test_a_wait_ends_when_the_word_is_large_enough_or_soon(memory: np.ndarray) -> None:
    words(memory)[2] = 5
    assert loops.await_word(memory, VERSION, 5)
    assert loops.await_word(memory, VERSION, -1)
    start = time.perf_counter()
    assert not loops.await_word(memory, VERSION, 6)
    assert time.perf_counter() - start >= 5e-5


def test_other_threads_run_during_a_wait(memory: np.ndarray) -> None:
    def write() -> None:
        words(memory)[2] = 1

    thread = threading.Thread(target=write)
    thread.start()
    until = time.monotonic() + 30
    while not loops.await_word(memory, VERSION, 1):
        assert time.monotonic() < until
    thread.join()


@pytest.mark.parametrize("pair", [0, 1])
def test_any_two_words_that_differ_end_a_wait(memory: np.ndarray, pair: int) -> None:
    offsets = (0, 8, 16, 24)
    assert not loops.await_difference(memory, offsets)
    assert not loops.await_difference(memory, ())
    words(memory)[2 * pair + 1] = 1
    assert loops.await_difference(memory, offsets)
    words(memory)[2 * pair] = 1
    assert not loops.await_difference(memory, offsets)


def test_a_wait_for_the_words_of_very_many_workers_ends_soon(memory: np.ndarray) -> None:
    assert not loops.await_difference(memory, (0, 8) * 2000)
    words(memory)[0] = 1
    assert loops.await_difference(memory, (0, 8) * 2000)


def test_parts_are_copied_and_the_word_is_written(memory: np.ndarray) -> None:
    parts = [(DATA, np.arange(3, dtype=np.float32)), (DATA + 12, b"ab"), (255, np.full(1, 7, np.uint8))]
    assert loops.publish(memory, parts, VERSION, -9)
    expected = np.zeros(256, np.uint8)
    expected[DATA : DATA + 12] = np.frombuffer(np.float32([0, 1, 2]).tobytes(), np.uint8)
    expected[DATA + 12 : DATA + 14], expected[255] = [97, 98], 7
    words(expected)[2] = -9
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("at", [-1, 250, 1 << 62])
def test_parts_outside_of_the_memory_are_refused_and_the_word_stays(memory: np.ndarray, at: int) -> None:
    with pytest.raises(ValueError, match="no room"):
        loops.publish(memory, [(at, bytes(8))], VERSION, 1)
    assert not memory.any()


@pytest.mark.parametrize("offset", [-8, 4, 249, 256])
def test_there_is_no_word_elsewhere(memory: np.ndarray, offset: int) -> None:
    with pytest.raises(ValueError, match="no word"):
        loops.publish(memory, [], offset, 1)
    with pytest.raises(ValueError, match="no word"):
        loops.await_word(memory, offset, 1)
    with pytest.raises(ValueError, match="no word"):
        loops.await_difference(memory, (0, offset))
    with pytest.raises(ValueError, match="no word"):
        loops.read_version(bytearray(8), memory, DATA, offset, memory, ANNOUNCED, 1)


@pytest.mark.parametrize("nbytes", [0, 5, 128, 192])
def test_a_read_gives_the_bytes_and_their_version(memory: np.ndarray, nbytes: int) -> None:
    memory[DATA:] = np.arange(192)
    words(memory)[2] = 12
    words(memory)[1] = 3
    out = np.zeros(nbytes, np.uint8)
    assert loops.read_version(out, memory, DATA, VERSION, memory, ANNOUNCED, 99) == 6
    assert out.tolist() == list(range(nbytes))
    assert words(memory)[1] == 0  # no longer announced


def test_what_is_being_written_is_not_read(memory: np.ndarray) -> None:
    words(memory)[2] = 13
    out = np.ones(8, np.uint8)
    assert loops.read_version(out, memory, DATA, VERSION, memory, ANNOUNCED, 99) == -1
    assert out.all()
    assert words(memory)[1] == 0


def test_a_read_outside_of_the_memory_is_refused(memory: np.ndarray) -> None:
    with pytest.raises(ValueError, match="no 8 bytes"):
        loops.read_version(bytearray(8), memory, 250, VERSION, memory, ANNOUNCED, 99)


def test_reads_are_whole_while_another_thread_writes(memory: np.ndarray) -> None:
    """The writer does as a server does: an odd version, the bytes, an even one; what is read was written with its version."""
    large = np.zeros(DATA + (1 << 20), np.uint8)  # so large that others run while it is copied
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            words(large)[2] += 1
            large[DATA:] = number % 251
            words(large)[2] += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        out, whole, until = np.zeros(1 << 20, np.uint8), 0, time.monotonic() + 3
        while whole < 20 and time.monotonic() < until:
            version = loops.read_version(out, large, DATA, VERSION, memory, ANNOUNCED, 99)
            if version >= 0:
                whole += 1
                assert (out == version % 251).all()
    finally:
        stop.set()
        thread.join()
